"""One batch: whole or in parts, in the precision that the device has, compiled or not."""

import re
from collections import namedtuple
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from elche.errors import InvalidJob
from elche.extent import Extent
from elche_worker import TrainingJob, record_scalar
from elche_worker.data.fetching import Fetch, Indices
from elche_worker.device.kinds import KINDS, MemoryUse
from elche_worker.model.step import Built, TrainStep, build_model, merge_of, possible_precision, split
from elche_worker.user.loading import describe_raised

CPU = torch.device("cpu")
Pair = namedtuple("Pair", "x y")


def train_step(model: nn.Module, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    pair = batch["pair"]
    loss = nn.functional.mse_loss(model(pair.x), pair.y)
    return {"loss": loss, "size": torch.tensor(float(len(pair.x)))}


JOB = TrainingJob(
    model=lambda: nn.Linear(4, 1),
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    dataset=lambda: [0],
    train_step=train_step,
    batch_size=8,
    epochs=1,
)


def stepped(job: TrainingJob, size: int = 7, num_steps: int = 3) -> tuple[torch.Tensor, float]:
    """The weights after some batches of `size` samples, and the last loss."""
    torch.manual_seed(0)
    model = job.model()
    step = TrainStep(job, Built(model, job.optimizer(model)), CPU, "train.py")
    loss = torch.zeros(())
    for _ in range(num_steps):
        batch = {"pair": Pair(torch.randn(size, 4), torch.randn(size, 1)), "names": ["a"] * size, "scale": 2.0}
        loss, _ = step.run(batch, size)
    assert isinstance(model, nn.Linear)
    return model.weight.detach(), loss.item()


def test_gradients_that_no_optimizer_steps_neither_add_up_nor_count_for_clipping() -> None:
    """Of a model whose head alone was given to the optimizer, the rest's gradients grew from batch to batch, and with
    them the norm by which the head's were divided: soon nothing was trained.
    """

    def head(model: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([model.bias], lr=0.1)

    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    job = replace(JOB, optimizer=head, max_grad_norm=1.0)
    step = TrainStep(job, Built(model, head(model)), CPU, "train.py")
    for _ in range(5):
        before = model.bias.item()
        step.run({"pair": Pair(torch.ones(8, 4), torch.full((8, 1), 1e3)), "names": [], "scale": 2.0}, 8)
        assert abs(model.bias.item() - before) == pytest.approx(0.1)
        assert model.weight.grad is None


def test_an_optimizer_with_parameters_beside_the_model_is_refused() -> None:
    """Those of a loss, such as class centres, were trained on each rank for itself, and were in no checkpoint."""
    centres = nn.Linear(1, 3)
    for more in (list(centres.parameters()), [torch.zeros(3, requires_grad=True)]):
        job = replace(JOB, optimizer=lambda model, more=more: torch.optim.SGD([*model.parameters(), *more], lr=0.1))
        with pytest.raises(InvalidJob, match=f"the optimizer has {len(more)} parameters that the model"):
            build_model(job, CPU, "train.py")
    together = replace(JOB, model=lambda: nn.ModuleDict({"net": nn.Linear(4, 1), "loss": centres}))
    assert len(build_model(together, CPU, "train.py").all_optimizers[0].param_groups[0]["params"]) == 4


class Sharp(torch.optim.SGD):
    """As public SAMs: it refuses in words of its own what its signature allows."""

    def step(self, closure: Any = None) -> Any:
        assert closure is not None, "Sharpness Aware Minimization requires closure, but it was not provided"


class Calling(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return torch.enable_grad()(closure)()


class Broken(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        raise ValueError("no such group")


@pytest.mark.parametrize("kind", [Sharp, Calling, Broken])
def test_an_optimizer_that_turns_out_to_need_a_closure_is_told_what_helps(kind: Any) -> None:
    """The job failed with an assertion within the optimizer, as if `train_step` could give it one."""
    model = nn.Linear(4, 1)
    optimizer = kind(model.parameters(), lr=0.1)
    step = TrainStep(JOB, Built(model, optimizer), CPU, "train.py")
    told = f"train.py: {kind.__name__} needs a closure at every step: use manual_optimization=True"
    with pytest.raises(Exception, match="no such group" if kind is Broken else told):
        step.run({"pair": Pair(torch.ones(8, 4), torch.zeros(8, 1)), "names": [], "scale": 2.0}, 8)


LONG = Extent(dataset_size=32_000, batch_size=32, epochs=1)
"""A thousand batches."""


@pytest.mark.parametrize("said", ["auto", "adascale", "mean"])
@pytest.mark.parametrize(("num_optimizers", "is_manual"), [(1, False), (2, False), (1, True), (2, True)])
def test_rounds_of_a_game_make_the_mean_unless_the_job_says_otherwise(
    said: str, num_optimizers: int, is_manual: bool
) -> None:
    job = replace(JOB, merge=said, manual_optimization=is_manual)
    model = job.model()
    built = Built(model, [job.optimizer(model) for _ in range(num_optimizers)])
    chosen = "mean" if is_manual and num_optimizers > 1 else "adascale"
    assert merge_of(job, built, LONG) == (chosen if said == "auto" else said)


@pytest.mark.parametrize("is_manual", [False, True])
def test_rounds_of_steps_that_need_a_closure_make_the_mean(is_manual: bool) -> None:
    """Of LBFGS: a sine, two ranks, three seeds each, had errors of up to 2e11 with the sum of steps, and 0.08 at most
    with the mean.
    """
    job = replace(JOB, manual_optimization=is_manual)
    model = job.model()
    built = Built(model, torch.optim.LBFGS(model.parameters()))
    assert merge_of(job, built, LONG) == ("mean" if is_manual else "adascale")


@pytest.mark.parametrize("said", ["auto", "adascale", "mean"])
@pytest.mark.parametrize(
    ("max_steps", "chosen"),
    [(801, "adascale"), (800, "rows")],
)
def test_a_short_training_takes_no_gains(said: str, max_steps: int, chosen: str) -> None:
    job = replace(JOB, merge=said)
    model = job.model()
    extent = replace(LONG, max_steps=max_steps)
    assert merge_of(job, Built(model, job.optimizer(model)), extent) == (chosen if said == "auto" else said)


def test_of_a_warm_up_nothing_stays_but_what_was_compiled() -> None:
    calls = []

    def noted(model: nn.Module, batch: Any) -> torch.Tensor:
        calls.append(len(batch))
        record_scalar("warm", 1.0)
        return model(nn.functional.dropout(batch)).square().mean()

    def trained(*, warms_up: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
        step = TrainStep(replace(JOB, train_step=noted), Built(model, JOB.optimizer(model)), CPU, "train.py")
        batch = torch.randn(8, 4)
        if warms_up:
            step.warm_up(batch, 8)
        _, recorded = step.run(batch, 8)
        assert recorded["warm"][1] == 1, "recorded once"
        return [one.clone() for one in model.state_dict().values()]

    torch.testing.assert_close(trained(warms_up=True), trained(warms_up=False), rtol=0, atol=0)
    assert len(calls) == 3


def test_steps_of_ones_own_are_not_warmed_up() -> None:
    job = replace(JOB, manual_optimization=True, train_step=lambda *_: pytest.fail("it would move the model"))
    model = job.model()
    TrainStep(job, Built(model, job.optimizer(model)), CPU, "train.py").warm_up({}, 8)


def test_an_optimizer_that_steps_within_backward_is_refused() -> None:
    """Warm-ups and trial batches moved the model, and parts of a batch were steps, in silence."""

    def optimizer(model: nn.Module) -> Any:
        each = {one: torch.optim.SGD([one], lr=0.1) for one in model.parameters()}
        for one in each:
            one.register_post_accumulate_grad_hook(lambda parameter: each[parameter].step())
        return list(each.values())

    with pytest.raises(InvalidJob, match=r"parameters are changed within backward\(\), .* manual_optimization=True"):
        stepped(replace(JOB, optimizer=optimizer))


def test_a_loss_of_another_model_is_refused() -> None:
    """The job succeeded with the model as it was built."""
    other = nn.Linear(4, 1)
    job = replace(JOB, train_step=lambda model, batch: train_step(other, batch))
    with pytest.raises(InvalidJob, match=r"depends on no parameter that the optimizer has, .* the model that is given"):
        stepped(job)


def test_a_model_without_values_is_refused() -> None:
    with pytest.raises(InvalidJob, match=r"train\.py: the model's weight has no values, .*to_empty\(device='cpu'\)"):
        build_model(replace(JOB, model=lambda: nn.Linear(4, 1, device="meta")), CPU, "train.py")


@pytest.mark.parametrize(
    ("returned", "words"),
    [("detach", "without backward\\(\\), step\\(\\), detach"), ("item", "not float: leave out item")],
)
def test_a_loss_without_a_gradient_is_told_what_to_leave_out(returned: str, words: str) -> None:
    job = replace(JOB, train_step=lambda model, batch: getattr(train_step(model, batch)["loss"], returned)())
    with pytest.raises(InvalidJob, match=words):
        stepped(job)


def test_a_model_in_data_parallel_is_refused() -> None:
    job = replace(JOB, model=lambda: nn.Sequential(nn.DataParallel(nn.Linear(4, 1))))
    with pytest.raises(InvalidJob, match=r"train\.py: model\.0 is in DataParallel, which would take other ranks' GPUs"):
        build_model(job, CPU, "train.py")


@pytest.mark.parametrize("accumulate", [2, 3, 7, 20])
def test_parts_make_the_step_of_the_whole_batch(accumulate: int) -> None:
    whole, loss = stepped(replace(JOB, max_grad_norm=1.0))
    parts, parts_loss = stepped(replace(JOB, max_grad_norm=1.0, accumulate=accumulate))
    torch.testing.assert_close(parts, whole)
    assert parts_loss == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("max_norm", [0.01, 0.1])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_a_gradient_that_is_too_long_is_shortened(max_norm: float, accumulate: int, scale: float) -> None:
    """With plain SGD and a rate of 1 the model moves by just as much; the norm that is told is the gradient's own,
    without the factor by which losses are scaled in fp16.
    """
    job = replace(
        JOB,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1.0),
        max_grad_norm=max_norm,
        accumulate=accumulate,
    )
    torch.manual_seed(0)
    model = job.model()
    before = torch.cat([one.detach().clone().reshape(-1) for one in model.parameters()])
    step = TrainStep(job, Built(model, job.optimizer(model)), CPU, "train.py")
    step.scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=scale != 1)
    step.run({"pair": Pair(torch.randn(8, 4), torch.randn(8, 1))}, 8)
    after = torch.cat([one.detach().reshape(-1) for one in model.parameters()])
    assert float((after - before).norm()) == pytest.approx(max_norm, rel=1e-3)
    assert step.grad_norm is not None
    assert 0.5 < float(step.grad_norm) < 50


def test_a_gradient_that_is_short_enough_stays_as_it_is() -> None:
    clipped, _ = stepped(replace(JOB, max_grad_norm=1e6))
    assert torch.equal(clipped, stepped(JOB)[0])


@pytest.mark.parametrize("together", [list, tuple, lambda several: dict(enumerate(several))])
def test_several_optimizers_step_one_after_the_other(together: Any) -> None:
    """They make the step of one that has all parameters; the gradient is shortened as a whole."""

    def several(model: nn.Module) -> Any:
        return together([torch.optim.SGD([one], lr=0.1) for one in model.parameters()])

    one, loss = stepped(replace(JOB, max_grad_norm=0.5))
    each, each_loss = stepped(replace(JOB, max_grad_norm=0.5, optimizer=several))
    torch.testing.assert_close(each, one)
    assert each_loss == pytest.approx(loss)


def test_a_step_begins_without_the_gradients_of_the_last() -> None:
    model = nn.Linear(4, 1)
    step = TrainStep(JOB, Built(model, JOB.optimizer(model)), CPU, "train.py")
    batch = {"pair": Pair(torch.randn(8, 4), torch.randn(8, 1))}
    step.run(batch, 8)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_parts_record_is_counted_for_each() -> None:
    job = replace(JOB, accumulate=2)
    model = job.model()
    step = TrainStep(job, Built(model, job.optimizer(model)), CPU, "train.py")
    _, scalars = step.run({"pair": Pair(torch.randn(7, 4), torch.randn(7, 1))}, 7)
    assert (float(scalars["size"][0]), scalars["size"][1]) == (7.0, 2)


def test_a_batch_for_which_memory_runs_out_begins_anew_in_more_parts() -> None:
    """Of the parts that had fitted no gradient is left, and nothing that they recorded."""
    sizes: list[int] = []

    def run_out(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        pair = batch["pair"]
        sizes.append(len(pair.x))
        record_scalar("size", len(pair.x))
        if sizes == [4, 4]:
            raise torch.OutOfMemoryError("there is no memory for the second part")
        return nn.functional.mse_loss(model(pair.x), pair.y)

    job = replace(JOB, accumulate=2, train_step=run_out)
    models = [nn.Linear(4, 1) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    batch = {"pair": Pair(torch.randn(8, 4), torch.randn(8, 1))}
    step = TrainStep(job, Built(models[0], job.optimizer(models[0])), CPU, "train.py", backs_off=True)
    _, scalars = step.run(batch, 8)
    assert sizes == [4, 4, 2, 2, 2, 2]
    assert scalars == {"size": (8.0, 4)}
    TrainStep(JOB, Built(models[1], JOB.optimizer(models[1])), CPU, "train.py").run(batch, 8)
    torch.testing.assert_close(models[0].weight, models[1].weight)


def test_a_single_sample_for_which_there_is_no_memory_ends_it() -> None:
    """It was cut, and tried, forever."""
    sizes: list[int] = []

    def run_out(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        sizes.append(len(batch))
        assert len(sizes) < 20
        raise torch.OutOfMemoryError("there is no memory")

    model = nn.Linear(4, 1)
    job = replace(JOB, train_step=run_out)
    step = TrainStep(job, Built(model, job.optimizer(model)), CPU, "train.py", backs_off=True)
    with pytest.raises(torch.OutOfMemoryError):
        step.run(torch.zeros(4, 4), 4)
    assert sizes == [4, 2, 1]


def test_batches_that_wait_on_the_device_leave_it_before_a_batch_is_cut() -> None:
    """Twice there were such, so that the batch begins anew as it is; then it goes in parts."""
    sizes: list[int] = []
    waiting = [True, True]

    def run_out(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        sizes.append(len(batch["pair"].x))
        if len(sizes) <= 3:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
        return nn.functional.mse_loss(model(batch["pair"].x), batch["pair"].y)

    job = replace(JOB, train_step=run_out)
    model = nn.Linear(4, 1)
    batch = {"pair": Pair(torch.randn(8, 4), torch.randn(8, 1))}
    built = Built(model, job.optimizer(model))
    step = TrainStep(job, built, CPU, "train.py", backs_off=True, make_room=lambda: bool(waiting and waiting.pop()))
    step.run(batch, 8)
    assert sizes == [8, 8, 8, 4, 4]
    sizes.clear()
    with pytest.raises(RuntimeError, match="ALLOC_FAILED"):
        TrainStep(job, built, CPU, "train.py", make_room=lambda: False).run(batch, 8)


@pytest.mark.parametrize(
    ("backs_off", "manual", "said"),
    [
        (False, False, r"8 samples in 2 parts; .*: lower batch_size, give batch_size=\"auto\", or"),
        (True, False, r"8 samples in 8 parts; .*: lower batch_size, or"),
        (False, True, r"8 samples; .*: lower batch_size, or"),
    ],
)
def test_where_memory_runs_out_for_good_one_line_has_the_figures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], backs_off: bool, manual: bool, said: str
) -> None:
    use = MemoryUse(used=22 << 30, reserved=21 << 30, peak=0, total=24 << 30)
    monkeypatch.setattr(KINDS["cpu"], "memory", lambda device: use)

    def run_out(*given: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    model = nn.Linear(4, 1)
    job = replace(JOB, train_step=run_out, accumulate=1 if manual else 2, manual_optimization=manual)
    step = TrainStep(job, Built(model, job.optimizer(model)), CPU, "train.py", backs_off=backs_off)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        step.run(torch.zeros(8, 4), 8)
    line = str(describe_raised(raised.value, __file__))
    assert "\n" not in line
    figures = "of cpu's memory 22.00 of 24.00 GiB are in use, 21.00 GiB of it held by this process's allocator"
    assert figures in line
    assert re.search(f"Tried to allocate 2.00 GiB .*, at a batch of {said} make the model smaller$", line), line
    assert (figures in capsys.readouterr().err) == backs_off


@pytest.mark.parametrize(
    ("size", "settings", "said"),
    [
        (1, {}, "a batch had 1 sample, as the last one of an epoch may: give drop_last=True"),
        (1, {"drop_last": True}, "a batch had 1 sample, though drop_last is set: give all ranks one batch_size"),
        (4, {"accumulate": 4}, "a batch of 4 samples went through the model in 4 parts: lower accumulate"),
    ],
)
def test_a_sample_alone_in_batch_norm_is_told_with_what_helps(size: int, settings: dict[str, Any], said: str) -> None:
    """It was PyTorch's error alone, about the shape of the last batch."""
    job = replace(JOB, model=lambda: nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2), nn.Linear(2, 1)), **settings)
    model = job.model()
    step = TrainStep(job, Built(model, job.optimizer(model)), CPU, "train.py")
    batch = {"pair": Pair(torch.randn(size, 4), torch.randn(size, 1))}
    with pytest.raises(ValueError, match="Expected more than 1 value per channel") as raised:
        step.run(batch, size)
    assert said in str(describe_raised(raised.value, "train.py"))


def test_only_what_has_an_entry_for_each_sample_is_cut() -> None:
    batch = {"x": torch.arange(5), "pair": Pair(torch.zeros(5, 2), torch.zeros(())), "names": list("abcde"), "n": 5}
    (first, first_size), (second, second_size) = split(batch, 5, 2)
    assert (first_size, second_size) == (2, 3)
    assert first["x"].tolist() == [0, 1]
    assert second["names"] == ["c", "d", "e"]
    assert (first["pair"].x.shape, first["pair"].y.shape, first["n"]) == ((2, 2), (), 5)


def test_fields_of_texts_are_not_taken_for_samples() -> None:
    """With as many fields as samples they were: each part got one field of both."""
    texts = [("a1", "a2"), ("b1", "b2")]
    assert split(texts, 2, 2) == [([("a1",), ("b1",)], 1), ([("a2",), ("b2",)], 1)]


class Attributes(dict[str, Any]):
    """Samples of libraries: a dict whose keys are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


def test_parts_of_a_batch_are_of_its_types() -> None:
    batch = Attributes(x=torch.arange(4), more=Attributes(y=torch.arange(4)))
    for number, (part, _) in enumerate(split(batch, 4, 2)):
        assert part.x.tolist() == part.more.y.tolist() == [2 * number, 2 * number + 1]
    assert batch.x.tolist() == batch.more.y.tolist() == [0, 1, 2, 3]


def test_what_collate_fn_makes_is_not_cut_but_made_of_fewer_samples() -> None:
    """Images and targets of a detection batch were cut differently, so that each went with another's target."""
    seen: list[list[tuple[int, int]]] = []

    def look(model: nn.Module, batch: Any) -> torch.Tensor:
        images, targets = batch
        seen.append([(int(image[0, 0]), target) for image, target in zip(images, targets, strict=True)])
        return model(torch.zeros(1, 4)).sum()

    job = replace(JOB, accumulate=2, collate_fn=lambda samples: tuple(zip(*samples, strict=True)), train_step=look)
    model = nn.Linear(4, 1)
    step = TrainStep(job, Built(model, job.optimizer(model)), CPU, "train.py")
    fetch = Fetch([(torch.full((3, 2), float(n)), n) for n in range(5)], job.collate_fn, "train.py", num_parts=2)
    for indices in ([0, 1, 2], [3], [4, 0]):
        step.run(fetch.collate(fetch.__getitems__(Indices(indices, 0, len(indices)))), len(indices))
    assert seen == [[(0, 0)], [(1, 1), (2, 2)], [(3, 3)], [(4, 4)], [(0, 0)]]


def test_memory_that_runs_out_for_what_collate_fn_makes_ends_it_with_what_to_do() -> None:
    def run_out(model: nn.Module, batch: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("there is no memory")

    model = nn.Linear(4, 1)
    job = replace(JOB, train_step=run_out, collate_fn=torch.stack)
    step = TrainStep(job, Built(model, job.optimizer(model)), CPU, "train.py", backs_off=True)
    with pytest.raises(InvalidJob, match=r"no memory for 8 samples at once.*cannot be split: give accumulate=2"):
        step.run(torch.zeros(8, 4), 8)


def test_bf16_computes_in_bf16_and_keeps_the_parameters() -> None:
    seen = []

    def watched(model: nn.Module, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        seen.append(model(batch["pair"].x).dtype)
        return train_step(model, batch)

    weight, _ = stepped(replace(JOB, precision="bf16", train_step=watched))
    assert set(seen) == {torch.bfloat16}
    assert weight.dtype is torch.float32


def test_a_device_without_a_precision_takes_the_full_one() -> None:
    assert possible_precision("fp16", CPU) == "fp32"
    assert possible_precision("bf16", CPU) == "bf16"
    assert stepped(replace(JOB, precision="fp16"))[1] == stepped(JOB)[1]


def test_the_compiled_model_is_what_the_step_gets() -> None:
    called = []

    def watched(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        called.append(type(model).__name__)
        return next(model.parameters()).square().mean()

    stepped(replace(JOB, compile=True, train_step=watched), num_steps=1)
    assert called == ["OptimizedModule"]

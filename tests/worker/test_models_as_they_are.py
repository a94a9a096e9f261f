"""Models and optimizers of any kind: what they share, which modes they are in, and what no file can hold."""

import gc
import json
import math
from dataclasses import replace
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from torch import nn

from elche.errors import InvalidJob
from elche_worker import TrainingJob
from elche_worker.model.checkpoint import CheckpointData, Loaded, other_buffers
from elche_worker.model.evaluation import evaluate
from elche_worker.model.layout import Layout
from elche_worker.model.modes import eval_mode_notice, evaluated_weights
from elche_worker.model.savable import check_savable, check_state, check_steps, take_form
from elche_worker.model.step import build_model
from elche_worker.model.storage import results_of_views
from elche_worker.model.tensors import flattened, unflattened
from elche_worker.rank.checkpoint_capture import _copy
from elche_worker.run.alone import train_alone

CPU = torch.device("cpu")


def job(model: Any, optimizer: Any = lambda model: torch.optim.SGD(model.parameters(), lr=0.1), **more: Any) -> Any:
    return TrainingJob(
        model=model,
        optimizer=optimizer,
        dataset=lambda: [0],
        train_step=lambda model, batch: model(batch).sum(),
        batch_size=1,
        epochs=1,
        **more,
    )


class Tied(nn.Module):
    """A weight, its transpose, a slice of it, and all of it in one row, each under a name of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.Parameter(torch.arange(6.0).reshape(2, 3))
        self.dec = nn.Parameter(self.enc.data.t())
        self.part = nn.Parameter(self.enc.data[1:])
        self.register_buffer("flat", self.enc.data.view(-1))
        self.alone = nn.Parameter(torch.zeros(2))


def test_views_of_a_tensor_are_averaged_with_it_whatever_their_shape() -> None:
    assert [entry.name for entry in Layout(Tied()).entries] == ["enc", "alone"]


def test_a_storage_that_parameters_are_slices_of_is_averaged_once() -> None:
    model = nn.Module()
    model.register_buffer("store", torch.zeros(6))
    model.one = nn.Parameter(model.store[:2].view(2, 1))
    model.two = nn.Parameter(model.store[2:])
    assert {entry.name: entry.kind for entry in Layout(model).entries} == {"one": "float32", "two": "float32"}


def test_a_real_view_of_complex_numbers_is_not_averaged_beside_them() -> None:
    model = nn.Module()
    model.phase = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    model.register_buffer("running_pairs", torch.view_as_real(model.phase.data))
    assert [entry.name for entry in Layout(model).entries] == ["phase"]


def test_a_scripted_model_has_its_tensors() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
    plain = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    assert [entry.name for entry in Layout(scripted).entries] == [entry.name for entry in Layout(plain).entries]


def test_tensors_that_share_a_part_are_refused_by_name() -> None:
    model = nn.Module()
    memory = torch.zeros(6)
    model.one, model.two = nn.Parameter(memory[:4]), nn.Parameter(memory[2:])
    with pytest.raises(InvalidJob, match="the model's two and one share a part of their memory"):
        Layout(model)


def test_a_checkpoint_has_the_result_of_a_view_under_its_own_name() -> None:
    """It was what the rank had made meanwhile, and won over the result when the checkpoint was read."""
    model = Tied()
    live = model.state_dict()
    results = {"enc": 10 * torch.arange(6.0).reshape(2, 3)}
    views = results_of_views(live, results)
    assert views.keys() == {"dec", "part", "flat"}
    assert torch.equal(views["dec"], results["enc"].t())
    assert torch.equal(views["part"], results["enc"][1:])
    assert torch.equal(views["flat"], results["enc"].view(-1))
    assert model.enc[1, 2] == 5  # the model itself goes on


def test_a_checkpoint_has_complex_parameters_in_their_own_shape() -> None:
    """The pairs of real numbers, of which rounds make the average, were saved with an imaginary part of 0 each."""
    model = nn.Module()
    model.phase = nn.Parameter(torch.randn(3, 2, dtype=torch.complex64))
    layout = Layout(model)
    layout.place(CPU)
    layout.gather()
    data = CheckpointData({}, {})
    _copy(data, model.state_dict(), layout.result_views(), {})
    assert torch.equal(data.weights["phase"], model.phase.detach())


def test_a_moving_average_of_complex_parameters_is_a_model() -> None:
    weights = {"phase": torch.zeros(2, dtype=torch.complex64)}
    loaded = Loaded("", {}, weights, {}, mean={"phase": torch.tensor([[1.0, 2.0], [3.0, 4.0]])})
    assert loaded.model["phase"].tolist() == [1 + 2j, 3 + 4j]


def test_only_statistics_are_averaged_and_queues_come_from_one_rank() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2, affine=False), nn.Linear(2, 1))
    model.register_buffer("queue", torch.zeros(4, 2))
    kinds = {entry.name: entry.kind for entry in Layout(model).entries}
    assert kinds["0.running_mean"] == kinds["0.running_var"] == "float32"
    assert kinds["queue"] == kinds["0.num_batches_tracked"] == "broadcast"


def test_a_buffer_with_the_name_of_a_statistic_that_begins_at_infinity_is_refused() -> None:
    model = nn.Linear(2, 1)
    model.register_buffer("running_max", torch.tensor([0.0, -math.inf]))
    with pytest.raises(InvalidJob, match=r"running_max is not finite .* another name, or buffers='from_source'"):
        Layout(model)
    assert {entry.name: entry.kind for entry in Layout(model, buffers="from_source").entries}[
        "running_max"
    ] == "broadcast"


def test_to_train_what_was_frozen_is_refused_and_to_freeze_what_is_trained_is_not() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].requires_grad_(False)
    layout = Layout(model)
    layout.place(CPU)
    model[1].requires_grad_(False)
    layout.check()
    layout.gather()
    model[0].requires_grad_(True)
    for use in (layout.check, layout.gather):
        with pytest.raises(InvalidJob, match=r"the model's 0.weight was frozen and is to be trained now"):
            use()


def test_parameters_that_come_later_are_refused() -> None:
    """Those that train_step added on two ranks were not averaged, in silence, if no epoch began after it."""
    model = nn.Sequential(nn.Linear(2, 2))
    layout = Layout(model)
    layout.place(CPU)
    model.append(nn.Linear(2, 1))
    for use in (layout.check, layout.gather):
        with pytest.raises(InvalidJob, match=r"a new parameter, 1\.weight"):
            use()
    del model[1]
    layout.check()
    model[0] = nn.Linear(2, 2)
    for use in (layout.check, layout.gather):
        with pytest.raises(InvalidJob, match=r"the module of the model's 0\.weight was replaced"):
            use()


def test_groups_that_an_optimizer_gets_later_are_refused() -> None:
    """A rank that was started again trained without them, in silence, and no checkpoint could be resumed."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    layout = Layout(model, [optimizer])
    optimizer.param_groups[0]["lr"] = 0.2
    layout.check()
    optimizer.add_param_group({"params": list(model[1].parameters())})
    with pytest.raises(InvalidJob, match=r"the optimizer's groups of parameters have changed: .* return all groups"):
        layout.check()


@pytest.mark.parametrize("where", ["epoch_fn", "train_step"])
def test_a_run_without_a_coordinator_refuses_groups_that_come_later_as_ranks_do(where: str) -> None:
    """It trained them, in silence, and the same file failed when it was submitted."""
    optimizers: list[torch.optim.Optimizer] = []

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        optimizers.append(torch.optim.SGD(model[0].parameters(), lr=0.1))
        return optimizers[0]

    def add(model: nn.Module) -> None:
        if len(optimizers[0].param_groups) == 1:
            optimizers[0].add_param_group({"params": list(model[1].parameters())})

    def train_step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if where == "train_step":
            add(model)
        return model(batch).sum()

    some = TrainingJob(
        model=lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)),
        optimizer=optimizer,
        dataset=lambda: torch.ones(3, 2),
        train_step=train_step,
        batch_size=1,
        epochs=1,
        epoch_fn=(lambda rank, epoch: add(rank.model)) if where == "epoch_fn" else None,
    )
    with pytest.raises(InvalidJob, match=r"the optimizer's groups of parameters have changed"):
        train_alone(some, device="cpu")


@pytest.mark.parametrize(
    ("name", "given"), [("outer_optimizer", "nesterov"), ("after_round", lambda model, version: None)]
)
def test_a_run_without_a_coordinator_refuses_what_changes_the_model_in_rounds(name: str, given: Any) -> None:
    """It left them out, in silence: the model was another than that of the same file under `elche run`."""
    some = job(lambda: nn.Linear(1, 1), **{name: given})
    with pytest.raises(InvalidJob, match=rf"makes no rounds, so {name} would have no effect, .* or job.start\(\)"):
        train_alone(some, device="cpu")


def test_the_next_run_without_a_coordinator_frees_what_the_last_one_trained() -> None:
    """Models and optimizers of a sweep stayed in the memory of the device until Python looked for circles."""
    trained = []

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        made = torch.optim.SGD(model.parameters(), lr=0.1)
        trained.append(ref(made))
        return made

    gc.disable()
    try:
        for _ in range(3):
            train_alone(
                replace(job(lambda: nn.Linear(1, 1), optimizer), dataset=lambda: torch.ones(1, 1)), device="cpu"
            )
        assert trained[1]() is None
    finally:
        gc.enable()


def test_a_parameter_that_is_replaced_in_its_module_is_refused_when_a_round_begins() -> None:
    """The optimizer kept the former one, so that the new one was averaged and saved, but never trained, in silence."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].requires_grad_(False)
    layout = Layout(model)
    layout.place(CPU)
    model[1].weight.data = torch.zeros(1, 2)  # of the same parameter
    model[0].weight = nn.Parameter(torch.zeros(2, 2), requires_grad=False)
    layout.gather()
    model[1].weight = nn.Parameter(torch.zeros(1, 2))
    for use in (layout.check, layout.gather):
        with pytest.raises(InvalidJob, match=r"the model's 1\.weight was replaced while it is trained"):
            use()


def test_modules_keep_the_modes_that_they_have() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Sequential(nn.Dropout(), nn.Dropout()))
    model[0].eval()
    model[1][1].eval()
    before = [module.training for module in model.modules()]
    seen: list[bool] = []

    def look(model: nn.Module) -> dict[str, float]:
        seen.extend(module.training for module in model.modules())
        return {"loss": 0.0}

    evaluate(job(lambda: model, evaluate=look), model, "train.py")
    assert not any(seen)
    assert [module.training for module in model.modules()] == before
    assert eval_mode_notice(model).startswith("2 of the model's 5 modules are in eval mode")
    assert eval_mode_notice(nn.Linear(1, 1)) == ""


def test_a_model_that_is_in_eval_mode_as_a_whole_is_trained() -> None:
    """As libraries return pretrained ones."""
    built = build_model(job(lambda: nn.Sequential(nn.Linear(2, 1), nn.Dropout()).eval()), CPU, "train.py")
    assert all(module.training for module in built.model.modules())
    said = eval_mode_notice(built.model, came_in_eval_mode=built.came_in_eval_mode)
    assert said.startswith("model() has returned the model in eval mode")


def test_a_modules_own_train_is_called_after_an_evaluation() -> None:
    """Adapters merge their weights in eval mode, and take them out again when they are trained."""
    called: list[bool] = []

    class Adapter(nn.Linear):
        def train(self, mode: bool = True) -> "Adapter":
            called.append(mode)
            return super().train(mode)

    model = nn.Sequential(Adapter(1, 1))
    evaluate(job(lambda: model, evaluate=lambda model: {}), model, "train.py")
    assert called == [False, True]


class TwoSets(torch.optim.SGD):
    """Moves the weights by 1 for an evaluation."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        self.is_training = False
        super().__init__(*arguments, **more)

    def train(self) -> None:
        self.is_training = True

    @torch.no_grad()
    def eval(self) -> None:
        self.is_training = False
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(1)


def test_an_optimizer_with_two_sets_of_weights_is_told_and_training_has_its_own_again() -> None:
    built = build_model(job(lambda: nn.Linear(2, 1), lambda model: TwoSets(model.parameters())), CPU, "train.py")
    assert built.optimizers.is_training
    before = built.model.weight.detach().clone()
    with evaluated_weights(built.all_optimizers):
        assert torch.equal(built.model.weight, before + 1)
    assert built.optimizers.is_training
    assert torch.equal(built.model.weight, before)


def test_lazy_modules_are_refused_with_what_to_do() -> None:
    with pytest.raises(InvalidJob, match=r"the model's 0\.weight has no shape yet .* run the model on one sample"):
        build_model(job(lambda: nn.Sequential(nn.LazyLinear(1))), CPU, "train.py")


def test_a_model_that_switches_gradients_off_is_refused() -> None:
    def build() -> nn.Module:
        torch.set_grad_enabled(False)
        return nn.Linear(2, 1)

    with torch.enable_grad(), pytest.raises(InvalidJob, match=r"train\.py: it has switched gradients off"):
        build_model(job(build), CPU, "train.py")


def test_an_expanded_buffer_gets_memory_of_its_own() -> None:
    def build() -> nn.Module:
        model = nn.Linear(4, 1)
        model.register_buffer("running_mean", torch.tensor([0.5]).expand(4))
        return model

    built = build_model(job(build), CPU, "train.py")
    layout = Layout(built.model)
    layout.place(CPU)
    layout.gather()
    layout.apply()
    assert built.model.running_mean.tolist() == [0.5] * 4


def test_a_buffer_that_was_made_in_inference_mode_can_be_written_to() -> None:
    """The model was refused: it could not load its own state_dict()."""

    def build() -> nn.Module:
        model = nn.BatchNorm1d(2)
        with torch.inference_mode():
            model.running_mean = torch.full((2,), 0.5)
        return model

    built = build_model(job(build), CPU, "train.py")
    check_savable(built.model)
    built.model(torch.ones(4, 2))
    assert built.model.running_mean.tolist() == pytest.approx([0.55, 0.55])


def test_a_buffer_of_inference_mode_that_two_modules_share_stays_one() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with torch.inference_mode():
        shared = torch.zeros(2)
    for one in model:
        one.register_buffer("mask", shared)
    take_form(model)
    assert model[0].mask is model[1].mask
    assert not model[0].mask.is_inference()


def test_a_parameter_that_was_made_in_inference_mode_is_refused_by_name() -> None:
    """All that was said was AssertionError, of elche's own code."""

    def build() -> nn.Module:
        with torch.inference_mode():
            return nn.Linear(2, 1)

    with pytest.raises(InvalidJob, match=r"train\.py: the model's weight was made in torch\.inference_mode\(\)"):
        build_model(job(build), CPU, "train.py")


@pytest.mark.parametrize(("persistent", "buffers"), [(True, "average"), (True, "local"), (False, "average")])
def test_an_empty_buffer_that_gets_values_is_refused_when_a_round_begins(persistent: bool, buffers: str) -> None:
    """Each rank had its own, and no checkpoint could be resumed: all that was trained was lost."""
    model = nn.Linear(2, 1)
    model.register_buffer("memory", torch.zeros(0, 2), persistent=persistent)
    layout = Layout(model, buffers=buffers)
    layout.place(CPU)
    layout.gather()
    model.memory = torch.cat([model.memory, torch.ones(1, 2)])
    if persistent and buffers == "average":
        with pytest.raises(InvalidJob, match=r"the model's memory was torch\.float32 \(0, 2\) and is .*\(1, 2\) now"):
            layout.gather()
    else:
        layout.gather()


def test_an_optimizer_that_needs_a_closure_is_refused_unless_the_step_is_the_jobs_own() -> None:
    parameters = [nn.Parameter(torch.zeros(1))]
    with pytest.raises(InvalidJob, match="LBFGS needs a closure at every step: use manual_optimization=True"):
        check_steps([torch.optim.LBFGS(parameters)])
    check_steps([torch.optim.Adam(parameters), torch.optim.SGD(parameters)])


def sparse(*, persistent: bool) -> nn.Module:
    model = nn.Linear(1, 1)
    model.register_buffer("edges", torch.eye(3).to_sparse(), persistent=persistent)
    return model


class WithExtra(nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 1}


class TakesNothingBack(nn.Linear):
    def load_state_dict(self, *arguments: Any, **more: Any) -> Any:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (lambda: nn.Linear(1, 1).to(torch.complex128), r"weight is torch.complex128.*use complex64"),
        (lambda: sparse(persistent=True), r"edges is torch.sparse_coo.*persistent=False"),
        (lambda: WithExtra(1, 1), r"_extra_state is of type dict.*return a tensor"),
        (lambda: TakesNothingBack(1, 1), r"cannot load its own state_dict\(\).*RuntimeError: no"),
    ],
)
def test_what_no_file_can_hold_is_refused_before_training(model: Any, said: str) -> None:
    with pytest.raises(InvalidJob, match=said):
        check_savable(model())


class OnlyHead(nn.Module):
    """Leaves its body out of its state, as models do whose body is a library's, and loads what is there."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(2, 2), nn.Linear(2, 1)

    def state_dict(self, *arguments: Any, **named: Any) -> Any:
        state = super().state_dict(*arguments, **named)
        return {name: one.float() for name, one in state.items() if name.startswith("head")}

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict(state, strict=False, assign=assign)


def test_what_is_trained_and_not_in_a_models_state_is_refused() -> None:
    """A resumed job went on with a body as model() makes it, in silence."""
    model = OnlyHead()
    with pytest.raises(InvalidJob, match=r"body\.weight is trained, and its state_dict\(\) leaves it out"):
        check_savable(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    check_savable(model, [torch.optim.SGD(model.head.parameters(), lr=0.1)])
    model.body.requires_grad_(False)
    check_savable(model, [torch.optim.SGD(model.parameters(), lr=0.1)])


def test_sparse_and_quantized_buffers_that_no_file_holds_are_left_alone() -> None:
    model = sparse(persistent=False)
    model.register_buffer("table", torch.quantize_per_tensor(torch.rand(4), 0.1, 0, torch.qint8), persistent=False)
    check_savable(model)
    assert [entry.name for entry in Layout(model).entries] == ["weight", "bias"]
    assert other_buffers(model) == {}


def test_numbers_of_numpy_are_numbers_in_a_checkpoint() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=np.float32(0.5), weight_decay=np.float64(0.25))
    check_state([optimizer])
    back = unflattened(flattened(optimizer.state_dict(), {}), {})
    assert [type(back["param_groups"][0][key]) for key in ("lr", "weight_decay")] == [float, float]
    assert back["param_groups"][0]["lr"] == 0.5


def test_a_dtype_in_an_optimizers_groups_is_kept() -> None:
    """Optimizers of others have the one in which they compute there (Kron), and were refused, with no way out."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    optimizer.param_groups[0]["precondition_dtype"] = torch.bfloat16
    check_state([optimizer])
    structure = json.loads(json.dumps(flattened(optimizer.state_dict(), {})))
    assert unflattened(structure, {})["param_groups"][0]["precondition_dtype"] is torch.bfloat16


def test_a_foreign_object_in_an_optimizer_is_named_before_training() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    optimizer.param_groups[0]["note"] = object()
    with pytest.raises(InvalidJob, match=r"optimizers\[0\]\['param_groups'\]\[0\]\['note'\] is of type object"):
        check_state([optimizer])


class Unloadable(torch.optim.SGD):
    """Reads in its state what it does not save."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        for group in self.param_groups:
            group["lr"] = state["rate"]


def test_an_optimizer_that_cannot_load_its_state_is_refused_and_one_that_can_stays_as_it_is() -> None:
    """KeyError: 'rate', but only in the job that was to go on from a checkpoint, days later."""
    with pytest.raises(InvalidJob, match=r"Unloadable cannot load its own state_dict.*KeyError: 'rate'"):
        check_state([Unloadable([nn.Parameter(torch.zeros(1))], lr=0.1)])
    optimizer = torch.optim.Adam([nn.Parameter(torch.zeros(1, requires_grad=True))])
    optimizer.param_groups[0]["params"][0].grad = torch.ones(1)
    optimizer.step()
    groups, state = optimizer.param_groups[0], optimizer.state
    check_state([optimizer])
    assert optimizer.param_groups[0] is groups
    assert optimizer.state is state

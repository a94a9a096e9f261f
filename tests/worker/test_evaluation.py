"""Evaluations in one process: means, tensors that are summed, metrics of sums, and the rehearsal before training."""

import copy
import random
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from elche.errors import InvalidJob, JobFailed
from elche.evaluation import MAX_SUM_BYTES
from elche.v1 import rank_pb2
from elche_worker import TrainingJob, record_scalar, this_rank
from elche_worker.model.evaluation import Evaluated, evaluate, evaluate_part, metrics_of, rehearse
from elche_worker.rank.evaluation_messages import evaluated_message, tensors_of
from elche_worker.user.scalars import take_scalars
from support.replicas import Make
from support.solo import JOB
from support.told import Rank

NUM_CLASSES = 3
LABELS = torch.randint(NUM_CLASSES, (101,), generator=torch.Generator().manual_seed(3))


def held_out() -> TensorDataset:
    inputs = torch.randn(len(LABELS), 3, generator=torch.Generator().manual_seed(2))
    return TensorDataset(inputs, LABELS)


def confusion(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, Any]:
    inputs, labels = batch
    predicted = (model(inputs).squeeze(1) > 0).long()
    counts = torch.bincount(labels * NUM_CLASSES + predicted, minlength=NUM_CLASSES**2)
    return {
        "mean": inputs.mean(),
        "confusion": counts.reshape(NUM_CLASSES, NUM_CLASSES),
        "inputs": inputs.double().sum(dim=0),
    }


def accuracy(sums: dict[str, torch.Tensor]) -> dict[str, Any]:
    matrix = sums["confusion"]
    return {"accuracy": matrix.diagonal().sum() / matrix.sum(), "samples": matrix.sum()}


EVALUATED = replace(JOB, eval_dataset=held_out, eval_step=confusion, eval_metrics=accuracy)


def part(job: TrainingJob, offset: int, size: int, batch_size: int = 16) -> Evaluated:
    torch.manual_seed(0)
    return evaluate_part(job, nn.Linear(3, 1), held_out(), offset, size, "train.py", batch_size=batch_size)


def test_an_evaluation_draws_none_of_trainings_random_numbers() -> None:
    job = replace(JOB, evaluate=None, eval_dataset=held_out, eval_step=confusion, eval_metrics=accuracy)
    model = nn.Linear(3, 1)
    before = torch.get_rng_state()
    evaluate_part(job, model, held_out(), 0, 9, "train.py", batch_size=3)
    assert torch.equal(torch.get_rng_state(), before)


def drawn(*given: Any) -> dict[str, float]:
    return {"torch": torch.rand(()).item(), "python": random.random(), "numpy": np.random.rand()}


def test_what_a_jobs_evaluation_draws_changes_neither_training_nor_the_next_evaluation() -> None:
    """The rank that evaluated, and a job that was resumed before its evaluation, trained with other random numbers."""
    model = nn.Linear(3, 1)
    job = replace(JOB, evaluate=drawn, seed=5)
    in_batches = replace(JOB, evaluate=None, eval_dataset=held_out, eval_step=drawn, seed=5)
    torch.manual_seed(7), random.seed(7), np.random.seed(7)
    expected = drawn()
    torch.manual_seed(7), random.seed(7), np.random.seed(7)
    first, first_part = evaluate(job, model, ""), evaluate_part(in_batches, model, held_out(), 20, 9, "", batch_size=3)
    assert drawn() == expected
    assert evaluate(job, model, "") == first
    assert evaluate_part(in_batches, model, held_out(), 20, 9, "", batch_size=3) == first_part
    assert evaluate_part(in_batches, model, held_out(), 29, 9, "", batch_size=3) != first_part


def test_gradients_that_an_evaluation_makes_are_not_added_to_trainings() -> None:
    """As of adversarial samples: the next batch was trained with them."""

    def attacked(model: nn.Module) -> dict[str, float]:
        with torch.enable_grad():
            model(torch.ones(2, 3)).sum().backward()
        return {"loss": 0.0}

    model = nn.Linear(3, 1)
    evaluate(replace(JOB, evaluate=attacked), model, "train.py")
    assert [one.grad for one in model.parameters()] == [None, None]
    model(torch.zeros(1, 3)).sum().backward()  # as a train step that accumulates over batches
    before = [one.grad for one in model.parameters()]
    evaluate(replace(JOB, evaluate=attacked), model, "train.py")
    assert [one.grad for one in model.parameters()] == before
    assert not model.weight.grad.any()


def test_what_an_evaluation_freezes_is_trained_on() -> None:
    """As a linear probe does: the rank that evaluated trained without these layers, in silence."""

    def probed(model: nn.Module) -> dict[str, float]:
        model.requires_grad_(False)
        return {"loss": 0.0}

    model = nn.Linear(3, 1)
    model.bias.requires_grad_(False)
    evaluate(replace(JOB, evaluate=probed), model, "train.py")
    assert [one.requires_grad for one in model.parameters()] == [True, False]


def in_train_mode(model: nn.Module, *_: Any) -> dict[str, float]:
    model.train()
    return {"loss": model(torch.ones(4, 3)).sum().item()}


@torch.no_grad()
def adapted(model: nn.Module, *_: Any) -> dict[str, float]:
    for parameter in model.parameters():
        parameter.data.add_(1.0)
    return {"loss": 0.0}


@torch.no_grad()
def put_back(model: nn.Module, *_: Any) -> dict[str, float]:
    kept = copy.deepcopy(model.state_dict())
    adapted(model)
    model.load_state_dict(kept)
    return {"loss": 0.0}


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (in_train_mode, "other values in the model's 1.running_mean and 1 more than"),
        (adapted, "other values in the model's 0.weight and 3 more than"),
        (put_back, ""),
    ],
)
@pytest.mark.parametrize("way", ["evaluate", "eval_step"])
def test_an_evaluation_that_changes_the_model_is_told_so(
    function: Any, said: str, way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """They were in the trained model, without a word: test-time adaptation, dropout for several predictions."""
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    if way == "evaluate":
        evaluate(replace(JOB, evaluate=function), model, "train.py")
    else:
        job = replace(JOB, evaluate=None, eval_dataset=held_out, eval_step=function)
        rehearse(job, model, held_out(), "train.py", batch_size=8, backs_off=False)
    told = capsys.readouterr().err
    assert (f"elche: {way}() leaves {said}" in told) if said else not told


def test_a_part_of_an_evaluation_counts_each_of_its_samples_once() -> None:
    """Also those of its last batch, which is smaller."""
    samples = torch.arange(9.0)
    job = replace(JOB, eval_dataset=lambda: samples, eval_step=lambda model, batch: {"mean": batch.mean()})
    done = evaluate_part(job, nn.Linear(1, 1), samples, 1, 7, "train.py", batch_size=3)
    assert done == Evaluated({"mean": (pytest.approx(float(samples[1:8].sum())), 7)})


@pytest.mark.parametrize("batch_size", [1, 16, 101])
def test_tensors_are_summed_over_all_batches(batch_size: int) -> None:
    done = part(EVALUATED, 0, 101, batch_size)
    assert done.tensors["confusion"].dtype == torch.int64
    assert done.tensors["confusion"].sum(dim=1).tolist() == torch.bincount(LABELS).tolist()
    assert done.tensors["inputs"].dtype == torch.float64
    assert torch.allclose(done.tensors["inputs"], held_out().tensors[0].double().sum(dim=0))
    metrics = metrics_of(EVALUATED, done, "train.py")
    assert metrics["samples"] == 101
    assert metrics["mean"] == pytest.approx(float(held_out().tensors[0].mean()))


def test_a_sum_does_not_change_with_what_the_job_keeps() -> None:
    kept = torch.zeros(2, dtype=torch.int64)

    def eval_step(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        return {"kept": kept.add_(1)}

    job = replace(EVALUATED, eval_step=eval_step)
    assert part(job, 0, 32).tensors["kept"].tolist() == [1 + 2] * 2


def test_sums_of_parts_are_those_of_the_whole_and_travel_as_they_are() -> None:
    parts, whole = [part(EVALUATED, 0, 40), part(EVALUATED, 40, 61)], part(EVALUATED, 0, 101)
    told = [evaluated_message(4, one, 5.0) for one in parts]
    assert [(one.epoch, one.duration_ms, one.is_made, one.sums["mean"].count) for one in told] == [
        (4, 5.0, False, 40),
        (4, 5.0, False, 61),
    ]
    arrived = [tensors_of(rank_pb2.Evaluated.FromString(one.SerializeToString()).tensors) for one in told]
    for name in ("confusion", "inputs"):
        assert all(torch.equal(one[name], sent.tensors[name]) for one, sent in zip(arrived, parts, strict=True))
        assert torch.allclose(arrived[0][name] + arrived[1][name], whole.tensors[name])
    arrived[0]["confusion"] += 1  # eval_metrics may


MISTAKES: dict[str, tuple[Mapping[str, Any], str]] = {
    "no eval_metrics": (
        {"eval_metrics": None},
        "eval_step() returned 'confusion', which must be a number, not a tensor of shape (3, 3); eval_metrics makes "
        "metrics of tensors that are summed",
    ),
    "nothing to sum": (
        {"eval_step": lambda model, batch: {"mean": batch[0].mean()}},
        "eval_metrics is given, and eval_step() returns no tensor with dimensions",
    ),
    "a name twice": (
        {"eval_metrics": lambda sums: {"mean": 0.0}},
        "eval_metrics returns 'mean', which eval_step returns, too: give one another name",
    ),
    "a list": ({"eval_metrics": lambda sums: [1.0]}, "eval_metrics() must return a dict of numbers, not list"),
    "a tensor": (
        {"eval_metrics": lambda sums: sums},
        "eval_metrics() returned 'confusion', which must be a number, not a tensor of shape (3, 3)",
    ),
    "too large": (
        {"eval_step": lambda model, batch: {"x": torch.zeros(MAX_SUM_BYTES // 8), "y": torch.zeros(1)}},
        f"eval_step() returned tensors whose sums take {MAX_SUM_BYTES + 8} bytes, with 'y'",
    ),
    "complex": (
        {"eval_step": lambda model, batch: {"x": torch.zeros(2, dtype=torch.complex64)}},
        "eval_step() returned 'x', which must be a dense tensor of real numbers",
    ),
    "a value for each sample": (
        {"eval_step": lambda model, batch: {"scores": model(batch[0])[:, 0]}},
        "eval_step() returned 'scores' of shape (3,), and of shape (4,) for a batch before it: only tensors of one",
    ),
    "another metric monitored": ({"monitor": "f1"}, "the evaluation gives no metric 'f1', which monitor names; it"),
}


@pytest.mark.parametrize(("changes", "said"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_told_before_the_first_batch(changes: Mapping[str, Any], said: str) -> None:
    def train_step(model: nn.Module, batch: Any) -> torch.Tensor:
        raise AssertionError("it has trained")

    with pytest.raises(InvalidJob) as raised:
        replace(EVALUATED, **changes, train_step=train_step).run(device="cpu")
    assert said in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1


def test_what_eval_metrics_needs_is_said_when_the_job_is_made() -> None:
    with pytest.raises(InvalidJob, match="give eval_dataset and eval_step, too"):
        replace(JOB, eval_metrics=accuracy)


# The rehearsal


class Restless(nn.Module):
    """Whatever may change in an evaluation does."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.still = nn.Linear(3, 1), nn.Dropout()
        self.register_buffer("calls", torch.zeros(()))
        self.still.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        draw = torch.rand(()) + random.random() + np.random.rand()
        return self.linear(x) + draw


def test_nothing_stays_of_a_rehearsal() -> None:
    model = Restless()
    model.linear(torch.ones(3)).backward()
    draws = torch.rand(3), random.random(), np.random.rand()
    torch.manual_seed(7), random.seed(7), np.random.seed(7)
    expected = torch.rand(()), random.random(), np.random.rand()
    torch.manual_seed(7), random.seed(7), np.random.seed(7)
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def eval_step(model: nn.Module, batch: Any) -> dict[str, Any]:
        assert not model.training
        assert not torch.is_grad_enabled()
        record_scalar("seen", 1.0)
        return confusion(model, batch)

    rehearse(replace(EVALUATED, eval_step=eval_step), model, held_out(), "train.py", batch_size=16, backs_off=False)
    assert (torch.rand(()), random.random(), np.random.rand()) == expected, draws
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert (model.training, model.linear.training, model.still.training) == (True, True, False)
    assert take_scalars() == {}


def test_a_job_with_a_rehearsal_trains_the_same_model_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    def train_step(model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(model(batch[0]) + torch.rand(()), batch[1])

    job = replace(EVALUATED, model=Restless, train_step=train_step)
    told: list[dict[str, float]] = []
    state = job.run(device="cpu", on_epoch=lambda epoch, metrics: told.append(metrics))
    monkeypatch.setattr("elche_worker.run.alone.rehearse", lambda *arguments, **more: None)
    without = job.run(device="cpu", on_epoch=lambda epoch, metrics: told.append(metrics))
    assert {name: value.tolist() for name, value in state.params.items()} == {
        name: value.tolist() for name, value in without.params.items()
    }
    assert told[:2] == told[2:]


class TrainsItself(nn.Linear):
    """As a model of the forward-forward algorithm, whose `train` is no mode."""

    def train(self, positive: Any, negative: Any) -> Any:  # type: ignore[override]
        raise AssertionError("elche does not call it")


def exported() -> nn.Module:
    return torch.export.export(nn.Linear(3, 1), (torch.ones(2, 3),)).module()


MODELESS = {
    "its train() is no mode": (
        lambda: TrainsItself(3, 1),
        r"model.eval\(\) calls its train\(False\), which raised .* give a method",
    ),
    "exported": (exported, r"model.eval\(\) raised NotImplementedError .* return the module that was exported"),
}


@pytest.mark.parametrize(("model", "said"), MODELESS.values(), ids=MODELESS)
@pytest.mark.parametrize("way", ["alone", "rank"])
def test_a_model_that_cannot_go_into_eval_mode_is_refused_before_training(
    world: Make, way: str, model: Callable[[], nn.Module], said: str
) -> None:
    """Its job failed after the first epoch, or with a traceback."""
    parts: dict[str, Any] = {"model": model, "evaluate": lambda model: {}}
    if way == "rank":
        rehearse_job: Callable[[], object] = partial(world(1, **parts).ranks[0].replica.rehearse, warms_up=False)
    else:
        rehearse_job = partial(replace(JOB, **parts).run, device="cpu")
    with pytest.raises(InvalidJob, match=said):
        rehearse_job()


# Of a rank


def test_a_rank_makes_metrics_of_the_sums_that_it_is_told(start: Any) -> None:
    rank: Rank = start(eval_dataset=held_out, eval_step=confusion, eval_metrics=accuracy)
    matrix = torch.tensor([[3, 1, 0], [0, 2, 0], [0, 0, 4]])
    sums = evaluated_message(0, Evaluated({}, {"confusion": matrix}), 0.0).tensors
    rank.tell(make_metrics=rank_pb2.MakeMetrics(epoch=4, tensors=sums, names=["mean"]))
    (told,) = rank.said.wait("evaluated")
    assert (told.epoch, told.is_made, dict(told.tensors)) == (4, True, {})
    assert {name: (one.sum, one.count) for name, one in told.sums.items()} == {
        "accuracy": (pytest.approx(0.9), 1),
        "samples": (10.0, 1),
    }


def test_metrics_of_sums_are_made_in_the_epoch_of_their_evaluation(start: Any) -> None:
    """The rank that makes them may have trained batches of the next one."""
    rank: Rank = start(
        eval_dataset=held_out, eval_step=confusion, eval_metrics=lambda sums: {"epoch": this_rank().epoch}
    )
    sums = evaluated_message(0, Evaluated({}, {"confusion": torch.eye(3)}), 0.0).tensors
    rank.tell(make_metrics=rank_pb2.MakeMetrics(epoch=4, tensors=sums))
    (told,) = rank.said.wait("evaluated")
    assert told.sums["epoch"].sum == 4


# Metrics that are not numbers


def spoilt(*losses: float, **changes: Any) -> TrainingJob:
    told = iter(losses)
    return replace(JOB, epochs=len(losses), evaluate=lambda model: {"loss": next(told)}, **changes)


@pytest.mark.parametrize("monitor", [None, "loss"])
def test_a_training_alone_fails_when_a_metric_is_no_number_any_more(monitor: str | None) -> None:
    with pytest.raises(JobFailed, match=r"loss is nan in the final evaluation, .* after epoch 1: lower the learning"):
        spoilt(0.5, float("nan"), monitor=monitor).run(device="cpu")


@pytest.mark.parametrize(("nonfinite", "is_said"), [("fail", True), ("ignore", False)])
def test_a_training_alone_fails_when_its_model_is_no_numbers_any_more(nonfinite: str, is_said: bool) -> None:
    """It returned that, in silence, where a rank fails the job."""
    job = replace(
        JOB, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=float("inf")), nonfinite=nonfinite
    )
    with pytest.raises(JobFailed, match=r"weight is not finite .* after epoch 1") if is_said else nullcontext():
        job.run(device="cpu")


def test_a_training_alone_says_that_a_metric_was_never_a_number(capsys: pytest.CaptureFixture[str]) -> None:
    spoilt(float("nan"), float("inf")).run(device="cpu")
    assert capsys.readouterr().err == "elche: never a finite number: loss\n"
    spoilt(float("nan"), 0.5).run(device="cpu")
    assert capsys.readouterr().err == ""

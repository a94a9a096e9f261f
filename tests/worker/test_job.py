"""A `TrainingJob` refuses what cannot work, by name, and trains on one device without a coordinator."""

import sys
from copy import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from elche.errors import InvalidJob
from elche_worker import Strategy, TrainedState, TrainingJob
from elche_worker.run import handle


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(200, 4, generator=generator)
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())


def train_step(model: nn.Module, batch: Any) -> torch.Tensor:
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs), labels)


def accuracy(model: nn.Module) -> dict[str, float]:
    inputs, labels = dataset().tensors
    return {"accuracy": float((model(inputs).argmax(1) == labels).float().mean())}


JOB = TrainingJob(
    model=lambda: nn.Linear(4, 2),
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.5),
    dataset=dataset,
    train_step=train_step,
    batch_size=16,
    epochs=5,
    evaluate=accuracy,
)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("model", nn.Linear(1, 1).weight, "model must be a function"),
        ("optimizer", "adam", "optimizer must be a function"),
        ("evaluate", 3, "evaluate must be a function or None"),
        ("batch_size", 0, "batch_size must be at least 1, not 0"),
        ("batch_size", 2.5, "batch_size must be a whole number"),
        ("epochs", -1, "epochs must be at least 1"),
        ("epochs", True, "epochs must be a whole number"),
        ("policy", "hope", "policy must be one of cadence, async, sync"),
        ("seed", -1, "seed must be at least 0"),
        ("drop_last", "yes", "drop_last must be True or False"),
        ("overhead_target", float("nan"), "overhead_target must be a number"),
        ("speed_hint", (0,), "speed_hint must be"),
        ("speed_hint", (0, float("inf")), "speed_hint must be"),
    ],
)
def test_a_value_that_cannot_work_is_refused_by_name(field: str, value: object, says: str) -> None:
    with pytest.raises(InvalidJob, match=says):
        replace(JOB, **{field: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("anchor", 3),
        ("max_anchor", 20),
        ("overhead_target", 0.1),
        ("divergence_threshold", 0.0),
        ("speed_hint", (1, 2.0)),
        ("max_batch_diff", 4),
    ],
)
def test_what_has_no_effect_after_every_batch_is_refused_by_name(name: str, value: object) -> None:
    """They were taken, and ignored."""
    with pytest.raises(InvalidJob, match=rf"{name} has no effect with policy 'sync', .*: leave it at .*, or use"):
        replace(JOB, policy="sync", **{name: value})
    replace(JOB, policy="sync", **{name: getattr(JOB, name)})
    replace(JOB, policy="async", **{name: value})


def test_on_one_device_a_job_trains_without_a_coordinator() -> None:
    metrics: list[float] = []
    state = JOB.run(device="cpu", on_epoch=lambda epoch, evaluated: metrics.append(evaluated["accuracy"]))
    assert len(metrics) == JOB.epochs
    assert metrics[-1] > 0.95
    assert isinstance(state, TrainedState)
    assert set(state.params) == {"weight", "bias"}


def test_training_alone_is_reproducible() -> None:
    first, second = JOB.run(device="cpu"), JOB.run(device="cpu")
    assert torch.equal(first.params["weight"], second.params["weight"])


class Augmented(TensorDataset):
    """Samples with noise, drawn beside a model with dropout."""

    def __getitem__(self, index: int) -> Any:
        inputs, targets = super().__getitem__(index)
        return inputs + 0.1 * torch.randn(inputs.shape), targets


def test_training_on_what_is_drawn_is_reproducible_with_and_without_worker_processes() -> None:
    samples = JOB.dataset()
    job = replace(
        JOB,
        model=lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2)),
        dataset=lambda: Augmented(*samples.tensors),
    )
    first, second, by_workers = (replace(job, num_workers=num).run(device="cpu") for num in (0, 0, 1))
    for name, value in first.params.items():
        assert torch.equal(value, second.params[name])
        assert torch.equal(value, by_workers.params[name])


def test_what_the_data_set_raises_reaches_the_caller() -> None:
    class Broken(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        replace(JOB, dataset=lambda: Broken(torch.zeros(10, 4))).run(device="cpu")


# Replica groups


def test_in_lockstep_nobody_trains_on_while_an_average_is_made() -> None:
    assert replace(JOB, max_batch_diff=1).overlaps
    assert not replace(JOB, max_batch_diff=0).overlaps
    with pytest.raises(InvalidJob, match=r"max_batch_diff 0 is lockstep.*averaging='blocking'"):
        replace(JOB, max_batch_diff=0, averaging="overlapped")


@pytest.mark.parametrize("shard", ["full_shard", "shard_grad_op", "no_shard", Strategy.HYBRID_SHARD(2)])
def test_a_group_and_how_it_divides_its_model_go_together(shard: object) -> None:
    job = replace(JOB, group_size=4, shard=shard)
    assert isinstance(job.shard, Strategy)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"group_size": 2}, "group_size is 2: choose how they shard the model, such as shard='full_shard'"),
        ({"shard": "full_shard"}, "shard needs group_size, .* at least 2 \\(--group-size N\\)"),
        ({"shard": "in_half", "group_size": 2}, "shard must be one of full_shard, shard_grad_op, no_shard or None"),
        ({"shard": 2, "group_size": 2}, "shard must be a Strategy, the name of one, or None, not int"),
        (
            {"shard": Strategy.HYBRID_SHARD(2), "group_size": 3},
            "HYBRID_SHARD\\(intra_node_size=2\\) cannot divide a group of 3 \\(group_size\\)",
        ),
        ({"group_size": 0}, "group_size must be at least 1, not 0"),
    ],
)
def test_a_group_that_cannot_be_is_refused(values: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidJob, match=says):
        replace(JOB, **values)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("manual_optimization", True),
        ("compile", True),
        ("precision", "fp16"),
        ("buffers", "local"),
        ("optimizer_state", "average"),
        ("backend", "cpu"),
        ("batch_size", "auto"),
    ],
)
def test_what_a_sharded_job_cannot_have_yet_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(InvalidJob, match=f"^{name}=.* does not work with shard yet"):
        replace(JOB, group_size=2, shard="full_shard", **{name: value})


def test_a_group_does_not_train_in_one_process() -> None:
    with pytest.raises(InvalidJob, match=r"job\.run\(\) is one process, and group_size is 2: use `elche run`"):
        replace(JOB, group_size=2, shard="full_shard").run()


def test_a_field_that_there_is_not_is_named_with_those_that_are_like_it() -> None:
    with pytest.raises(InvalidJob, match=r"^a TrainingJob has no epoch; did you mean epochs or epoch_fn\?$"):
        TrainingJob(epoch=3)
    with pytest.raises(InvalidJob, match=r"^a TrainingJob has no xyzzy$"):
        TrainingJob(xyzzy=3)


def test_a_field_that_is_missing_is_named_as_of_a_training_job() -> None:
    given = {name: getattr(JOB, name) for name in ("model", "optimizer", "dataset", "train_step", "batch_size")}
    with pytest.raises(InvalidJob, match=r"^a TrainingJob needs epochs$"):
        TrainingJob(**given)
    assert copy(JOB).epochs == JOB.epochs


def test_a_job_with_other_functions_than_its_files_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks run the file anew, and would train with the functions of its `job`."""
    monkeypatch.setattr(sys.modules[__name__], "job", JOB, raising=False)
    monkeypatch.delitem(sys.modules, "elche_job", raising=False)  # a job's file that another test has loaded
    begun: list[str] = []
    monkeypatch.setattr(handle, "Handle", lambda job, arguments: begun.extend(arguments))
    other = replace(JOB, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(InvalidJob, match=r"runs the `job` of its file, and this one has another optimizer"):
        other.start()
    assert not begun
    replace(JOB, epochs=7).start()
    assert begun[begun.index("--epochs") + 1] == "7"

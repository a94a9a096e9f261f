"""Batches for which the job's data give None: they are counted, and change nothing."""

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

from elche.errors import InvalidJob
from elche_worker import TrainingJob
from elche_worker.data.dataset import AsItIs
from elche_worker.data.fetching import Fetch, FetchError
from elche_worker.data.lease_loader import LeasedPart, LeaseLoader
from elche_worker.device.transfer import InParts
from elche_worker.model.step import TrainStep, build_model
from elche_worker.run.alone import train_alone
from elche_worker.telemetry.meter import Meter
from support.replicas import Make, weight
from support.solo import BATCH_SIZE, CPU, JOB


class EveryOther:
    """Gives None in place of every other batch."""

    def __init__(self) -> None:
        self.num_made = 0

    def __call__(self, samples: list[Any]) -> Any:
        self.num_made += 1
        return None if self.num_made % 2 == 0 else default_collate(samples)


def with_none(samples: list[Any]) -> Any:
    """As people write it who leave bad samples out."""
    kept = [sample for sample in samples if sample is not None]
    return default_collate(kept) if kept else None


def test_a_batch_of_none_changes_no_parameter_and_its_samples_are_done(world: Make) -> None:
    ranks = world(1, averaging="blocking", collate_fn=EveryOther())
    ranks.round(1)
    (rank,) = ranks.ranks
    rank.train(1)
    before = weight(rank)
    rank.train(1)
    assert torch.equal(weight(rank), before)
    rank.train(1)
    assert not torch.equal(weight(rank), before)
    meter = rank.replica.meter
    assert (meter.local_step, meter.num_processed, meter.num_skipped) == (3, 3 * BATCH_SIZE, 1)
    (work,) = meter.take_work().to_messages()
    assert (work.num_batches, work.num_skipped, work.num_samples) == (2, 1, 3 * BATCH_SIZE)


def test_a_rank_reports_a_batch_that_it_has_skipped() -> None:
    """A round may wait for that report, and a batch that is not trained has no time."""
    meter = Meter(reads_losses=True)
    meter.skip_batch(0, 4)
    assert meter.has_unreported
    assert meter.take_report().num_processed == 4
    assert not meter.has_unreported


def test_of_a_batch_in_parts_those_of_none_are_left_out_and_the_others_count_for_all() -> None:
    """The step is that of the samples that are left, not half of it."""
    job = replace(JOB, accumulate=3, collate_fn=with_none)
    good = [(torch.ones(3), torch.ones(1))] * 4
    fetch = Fetch([None, None, *good], with_none, "train.py", num_parts=3)
    batch = fetch.collate(fetch.__getitems__([0, 1, 2, 3, 4, 5]))
    assert [size for _, size in batch] == [2, 2]
    steps = [TrainStep(job, build_model(job, CPU, "train.py"), CPU, "train.py") for _ in range(2)]
    (loss, _), (whole, _) = steps[0].run(batch, 6), steps[1].run(InParts([(default_collate(good), 4)]), 4)
    assert loss.item() == pytest.approx(whole.item())
    first, second = ([*step._model.parameters()] for step in steps)
    assert all(torch.allclose(one, other) for one, other in zip(first, second, strict=True))
    assert fetch.collate(fetch.__getitems__([0, 1, 0, 1])) is None


def test_without_a_collate_fn_samples_of_none_are_refused_unless_the_whole_batch_is() -> None:
    fetch = Fetch([None, None, torch.ones(2)], None, "train.py")
    assert fetch.collate(fetch.__getitems__([0, 1])) is None
    error = fetch.collate(fetch.__getitems__([1, 2]))
    assert isinstance(error, FetchError)
    assert "the data set gives None for 1 of the 2 samples of a batch: give collate_fn" in error.message


def test_a_replica_group_whose_processes_train_each_batch_together_refuses_none() -> None:
    ready = threading.Semaphore(0)
    loader = LeaseLoader(
        list(range(8)), order=AsItIs(), batch_size=8, collate_fn=lambda samples: None, wake=ready.release, group_size=2
    )
    loader.add(LeasedPart(id=1, epoch=0, offset=0, size=8))
    assert ready.acquire(timeout=100)
    with pytest.raises(InvalidJob, match="collate_fn gave None for a batch, and the processes of a replica group"):
        loader.take()
    loader.stop()


def test_alone_too_batches_of_none_are_skipped_and_an_epoch_of_nothing_else_ends_it(
    capfd: pytest.CaptureFixture[str],
) -> None:
    job = replace(JOB, epochs=1, collate_fn=EveryOther())
    train_alone(job)
    assert "elche: skipped 50 batches in epoch 1" in capfd.readouterr().err
    with pytest.raises(InvalidJob, match="nothing was trained in epoch 1"):
        train_alone(replace(job, collate_fn=lambda samples: None))


def test_an_evaluation_says_what_it_cannot_leave_out() -> None:
    job = replace(
        JOB,
        epochs=1,
        collate_fn=lambda samples: None if len(samples) == 1 else default_collate(samples),
        eval_dataset=lambda: [(torch.ones(3), torch.ones(1))] * (BATCH_SIZE + 1),
        eval_step=lambda model, batch: {"mse": nn.functional.mse_loss(model(batch[0]), batch[1])},
    )
    with pytest.raises(InvalidJob, match=r"collate_fn gave None for a batch of eval_dataset\(\)"):
        train_alone(job)


def test_alone_too_skipped_batches_count_as_steps_and_in_the_average_of_the_weights() -> None:
    """A rank of a job counts them, since their samples are done."""
    steps: list[tuple[int, float]] = []
    job = TrainingJob(
        model=lambda: nn.Linear(1, 1, bias=False),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1.0),
        dataset=lambda: torch.zeros(2, 1),
        train_step=lambda model, batch: -model.weight.sum(),
        collate_fn=EveryOther(),
        batch_size=1,
        epochs=2,
        ema=0.5,
        epoch_fn=lambda rank, epoch: steps.append((rank.local_step, rank.model.weight.item())),
    )
    mean = train_alone(job).params["weight"].item()
    (_, first), (num_steps, _) = steps
    assert num_steps == 2
    assert mean - first == pytest.approx(1.375)  # half of the way to 0, 1, 1 and 2 above the first weight

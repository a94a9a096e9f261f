"""Ranks without a coordinator: real models, loaders and gloo groups, and the test in their loops' place."""

import errno
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

from elche.errors import JobFailed
from elche_audit.rank_file import read as audited
from elche_worker import outer, this_rank
from elche_worker.collectives.operations import CollectiveFailed
from elche_worker.data.lease_loader import LeasedPart
from elche_worker.model.checkpoint import load, new_whole
from elche_worker.rank import checkpoint_capture, replica
from elche_worker.rank.acts import TrainBatch, UseResult
from elche_worker.rank.replica import Replica
from support.replicas import Make, World, weight, write, written
from support.solo import BATCH_SIZE, SIZE

# The learning rate's position (row W4)


def test_a_learning_rate_follows_the_samples_of_all_ranks(world: Make) -> None:
    """Between rounds each rank adds its own; a round brings it those of all."""
    ranks = world(2, averaging="blocking")
    ranks.round(1)
    ranks.ranks[0].train(3)
    ranks.ranks[1].train(2)
    assert [one.samples for one in ranks.ranks[0].asked] == [0, 0, 4, 8]  # twice for the first batch
    assert [one.samples for one in ranks.ranks[1].asked] == [0, 0, 4]
    ranks.round(2)
    for rank in ranks.ranks:
        rank.train(2)
        assert [one.samples for one in rank.asked[-2:]] == [20, 24]
        assert (rank.asked[-1].total_samples, rank.asked[-1].batch_size) == (2 * SIZE, BATCH_SIZE)


def test_after_an_overlapped_round_batches_since_the_snapshot_count_too(world: Make) -> None:
    """What a rank has made while the average was on its way is not in the result: its position is beyond that."""
    ranks = world(2)
    ranks.round(1)
    ranks.ranks[0].train(3)
    ranks.ranks[1].train(2)
    ranks.round(2, 2, 0)
    assert [one.samples for one in ranks.ranks[0].asked] == [0, 0, 4, 8, 12, 16]
    assert [rank.replica.progress.samples for rank in ranks.ranks] == [20 + 8, 20]
    for rank in ranks.ranks:
        rank.train(1)
    assert [rank.asked[-1].samples for rank in ranks.ranks] == [28, 20]
    ranks.round(3, 1, 0)
    assert [rank.replica.progress.samples for rank in ranks.ranks] == [36 + 4, 36]


class Following(nn.Module):
    """A layer, and a slow one that follows it: frozen, and changed by each step; a counter, which is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.fast, self.slow = nn.Linear(3, 1), nn.Linear(3, 1).requires_grad_(False)
        self.register_buffer("steps", torch.zeros(1, dtype=torch.int64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.steps += 1
            self.slow.bias += 1
        out: torch.Tensor = self.fast(inputs)
        return out


@pytest.mark.parametrize("averaging", ["overlapped", "blocking"])
def test_what_steps_change_beside_the_average_is_not_lost_to_rounds_that_overlap(world: Make, averaging: str) -> None:
    """All ranks get it from the source: there it goes on with each step, and not back to what was sent."""
    ranks = world(2, model=Following, averaging=averaging)
    models = [one.replica.model for one in ranks.ranks]
    begin = float(models[0].slow.bias)  # type: ignore[union-attr, arg-type, operator]
    ranks.round(1)
    for number in range(2, 5):
        ranks.ranks[0].train(3)
        ranks.ranks[1].train(1)
        ranks.round(number, *((2, 1) if averaging == "overlapped" else ()))
    made = ranks.ranks[0].replica.local_step
    assert int(models[0].steps) == made  # type: ignore[arg-type]
    assert float(models[0].slow.bias) == pytest.approx(begin + made)  # type: ignore[union-attr, arg-type, operator]
    behind = 2 if averaging == "overlapped" else 0
    assert int(models[1].steps) == made - behind, "others have what was sent"  # type: ignore[arg-type]


def test_what_after_round_changes_beside_the_average_stays_on_the_source_too(world: Make) -> None:
    ranks = world(2, model=Following, after_round=lambda model, version: model.steps.add_(1000))
    ranks.round(1)
    ranks.ranks[0].train(3)
    ranks.round(2, 2, 0)
    assert [int(one.replica.model.steps) for one in ranks.ranks] == [1005, 1003]  # type: ignore[arg-type]


def test_a_scheduler_is_taken_at_the_position_of_all_ranks(world: Make) -> None:
    ranks = world(
        2, averaging="blocking", scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.1)
    )
    ranks.round(1)
    ranks.ranks[0].train(4)
    ranks.ranks[1].train(1)
    assert [rank.lr for rank in ranks.ranks] == pytest.approx([0.1, 0.1])
    ranks.round(2)
    for rank in ranks.ranks:
        rank.train(1)
    assert [rank.lr for rank in ranks.ranks] == pytest.approx([0.01, 0.01])


@pytest.mark.parametrize(("size", "ratio", "factor"), [(1, 0.5, 1.0), (2, 0.5, 1.5), (3, 0.5, 2.0), (3, 0.0, 1.0)])
def test_learning_rates_are_scaled_by_the_number_of_ranks(world: Make, size: int, ratio: float, factor: float) -> None:
    ranks = world(size, lr_scale_ratio=ratio)
    ranks.round(1)
    for rank in ranks.ranks:
        rank.train(1)
        assert rank.lr == pytest.approx(0.1 * factor)


def test_the_scale_is_that_of_the_group_that_trains(world: Make) -> None:
    ranks = world(3, lr_scale_ratio=1.0)
    ranks.round(1)
    alone = ranks.ranks[0]
    assert alone.replica.rates.scale == 3.0
    alone.join(2, 0, 1)
    assert alone.replica.rates.scale == 3.0, "until a round is entered in it"
    alone.enter(2)
    assert alone.replica.rates.scale == 1.0


def test_the_scale_holds_without_a_schedule_and_beside_a_factor_of_the_users(world: Make) -> None:
    ranks = world(2, lr_scale_ratio=0.5, epoch_fn=lambda rank, epoch: setattr(rank, "lr_factor", 0.2))
    for rank in ranks.ranks:
        rank.replica.rates._schedule = None
    ranks.round(1)
    for rank in ranks.ranks:
        rank.train(1)
        assert rank.lr == pytest.approx(0.1 * 1.5 * 0.2)


# Divergence (rows C8, W6)


@pytest.mark.parametrize("averaging", ["blocking", "overlapped"])
def test_every_rank_measures_how_far_it_was_from_the_result(world: Make, averaging: str) -> None:
    ranks = world(2, averaging=averaging, merge="mean")
    assert [held.averaged.divergence for held in ranks.round(1)] == [0.0, 0.0]
    ranks.ranks[0].train(3)
    ranks.ranks[1].train(1)
    before = [torch.cat([one.detach().reshape(-1) for one in rank.replica.model.parameters()]) for rank in ranks.ranks]
    result = (3 * before[0] + before[1]) / 4
    newer = (1, 0) if averaging == "overlapped" else ()
    measured = [held.averaged.divergence for held in ranks.round(2, *newer)]
    expected = [float((one - result).norm() / result.norm()) for one in before]
    assert measured == pytest.approx(expected, rel=1e-3)
    assert measured[1] > 2 * measured[0] > 0


def test_sync_measures_no_divergence(world: Make) -> None:
    ranks = world(2, policy="sync")
    ranks.round(1)
    for rank in ranks.ranks:
        rank.train(1)
    assert [held.averaged.divergence for held in ranks.round(2)] == [None, None]


# Rounds


def test_newer_batches_stay_when_the_result_of_an_overlapped_round_comes(world: Make) -> None:
    ranks = world(2)
    ranks.round(1)
    for rank in ranks.ranks:
        rank.train(2)
    ranks.all(lambda at, rank: rank.enter(2))
    snapshots = [weight(rank) for rank in ranks.ranks]
    ranks.ranks[0].train(3)
    newer = [weight(rank) - snapshot for rank, snapshot in zip(ranks.ranks, snapshots, strict=True)]
    ranks.all(lambda at, rank: rank.replica.apply_result())
    result = (snapshots[0] + snapshots[1]) / 2
    assert torch.allclose(weight(ranks.ranks[0]), result + newer[0], atol=1e-6)
    assert torch.allclose(weight(ranks.ranks[1]), result, atol=1e-7)
    assert float(newer[0].abs().max()) > 1e-3


def test_the_header_says_what_each_rank_brings(world: Make) -> None:
    ranks = world(2)
    ranks.round(1)
    ranks.ranks[0].train(3)
    ranks.ranks[1].train(1)
    for held in ranks.round(2, 2, 0):
        rows = held.averaged.rows
        assert [(one.weight, one.cut, one.local_step, one.version) for one in rows] == [(12, 12, 3, 1), (4, 4, 1, 1)]
        assert all(one.compute_us > 0 for one in rows)
    ranks.ranks[1].train(1)
    for held in ranks.round(3):
        rows = held.averaged.rows
        assert [(one.weight, one.cut, one.local_step, one.version) for one in rows] == [(8, 20, 5, 2), (4, 8, 2, 2)]


def test_moments_of_a_rank_that_was_left_out_are_forgotten(world: Make) -> None:
    ranks = world(
        2, nonfinite="skip", optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    )
    ranks.round(1)
    for rank in ranks.ranks:
        rank.train(2)
    with torch.no_grad():
        next(ranks.ranks[1].replica.model.parameters()).fill_(float("nan"))
    held = ranks.round(2)
    assert [len(rank.replica.optimizers[0].state) for rank in ranks.ranks] == [2, 0]
    assert torch.isfinite(weight(ranks.ranks[1])).all()
    told = held[1].averaged.divergence
    assert told is not None
    assert not told < 1e9, "it was as far away as can be"


def test_moments_of_a_rank_whose_step_is_far_too_long_are_forgotten_when_it_is_so_again(world: Make) -> None:
    ranks = world(2, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    ranks.round(1)
    kept = []
    for number in range(2, 16):
        for rank in ranks.ranks:
            rank.train(1)
        if number >= 14:
            with torch.no_grad():
                next(ranks.ranks[1].replica.model.parameters()).fill_(1e6)
        held = ranks.round(number)
        assert [one.averaged.is_discarded for one in held] == [False, number >= 14]
        kept.append([len(rank.replica.optimizers[0].state) for rank in ranks.ranks])
    assert kept[-2:] == [[2, 2], [2, 0]]


def test_a_round_that_is_over_becomes_no_checkpoint(world: Make) -> None:
    """The buffers have a later result, which the books of that round do not know: its samples would count twice."""
    ranks = world(2)
    ranks.round(1)
    for rank in ranks.ranks:
        rank.train(1)
    ranks.round(2)
    replica = ranks.ranks[0].replica
    told = write(replica, 1)
    replica.checkpoints.writer._thread.shutdown(wait=True)
    assert [(one.checkpoint_failed.version, one.checkpoint_failed.is_late) for one in told] == [(1, True)]


def copy_late(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of results are made no sooner than somebody waits for them."""
    is_waited_for = threading.Event()
    copy, finish_copy = checkpoint_capture._copy, replica.checkpoints.capture.finish_copy

    def wait_and_copy(*arguments: Any) -> None:
        assert is_waited_for.wait(400)
        copy(*arguments)

    def wait_for_copy() -> None:
        is_waited_for.set()
        finish_copy()

    monkeypatch.setattr(checkpoint_capture, "_copy", wait_and_copy)
    monkeypatch.setattr(replica.checkpoints.capture, "finish_copy", wait_for_copy)


def test_a_round_that_follows_at_once_is_not_in_the_checkpoint(world: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """It uses the buffers from which the result is copied, and steps the outer optimizer."""
    ranks = world(2, outer_optimizer=outer.SGD(lr=0.7, momentum=0.9))
    ranks.round(1)
    for rank in ranks.ranks:
        rank.train(2)
    ranks.all(lambda at, rank: rank.enter(2, may_be_checkpoint=at == 0))
    writer = ranks.ranks[0]
    copy_late(writer.replica, monkeypatch)
    ranks.all(lambda at, rank: rank.replica.apply_result())
    result = weight(writer)
    moment = writer.replica.averaging.reduction._memories["float32"].moments[0].clone()
    writer.train(2)
    ranks.round(3)
    loaded = written(writer.replica, 2)
    assert torch.equal(loaded.weights["weight"], result)
    assert torch.equal(loaded.state["outer"]["float32"]["moments"][0], moment)


def test_a_checkpoint_that_is_being_written_is_not_what_the_next_is_copied_over(
    world: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one is copied into the memory of one that is written, which costs less than new memory."""
    ranks = world(2)
    ranks.round(1)
    writer = ranks.ranks[0].replica
    write_all, has_begun, may_write = writer.checkpoints.writer.target.write, threading.Event(), threading.Event()
    results = []

    def write_late(*arguments: Any) -> Any:
        has_begun.set()
        assert may_write.wait(400)
        return write_all(*arguments)

    monkeypatch.setattr(writer.checkpoints.writer.target, "write", write_late)
    for round_id in (2, 3):
        for rank in ranks.ranks:
            rank.train(2)
        ranks.all(lambda at, rank: rank.enter(round_id, may_be_checkpoint=at == 0))  # noqa: B023
        ranks.all(lambda at, rank: rank.replica.apply_result())
        results.append(weight(ranks.ranks[0]))
        if round_id == 2:
            told = write(writer, 2)
            assert has_begun.wait(400)
    writer.checkpoints.capture.finish_copy()
    may_write.set()
    writer.checkpoints.writer._thread.shutdown(wait=True)
    assert torch.equal(load(told[0].checkpoint_saved.path, new_whole).weights["weight"], results[0])
    assert not torch.equal(*results)


def test_an_evaluation_puts_no_newer_steps_into_the_checkpoint(world: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it lasts, the buffers from which the result is copied have the steps that are newer."""
    evaluated: list[torch.Tensor] = []

    def evaluate(model: Any) -> dict[str, float]:
        writer.replica.checkpoints.capture.finish_copy()
        evaluated.append(model.weight.detach().clone())
        return {}

    ranks = world(2, evaluate=evaluate)
    ranks.round(1)
    for rank in ranks.ranks:
        rank.train(2)
    ranks.all(lambda at, rank: rank.enter(2, may_be_checkpoint=at == 0))
    writer = ranks.ranks[0]
    copy_late(writer.replica, monkeypatch)
    writer.train(2)
    ranks.all(lambda at, rank: rank.replica.apply_result())
    writer.replica.use_result(
        UseResult(round=2, version=2, evaluates=True, epoch=0, offset=0, size=0, calls_back=False, saves_final=False)
    )
    assert torch.equal(written(writer.replica, 2).weights["weight"], evaluated[0])
    assert not torch.equal(weight(writer), evaluated[0])


def test_a_final_model_waits_for_room_on_the_disk(
    world: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A training of any length once failed if the disk was full in the moment of its end."""
    ranks = world(1)
    ranks.round(1)
    only, full = ranks.ranks[0].replica, [OSError(errno.ENOSPC, "No space left on device")] * 2
    save = replica.save_weights

    def save_if_there_is_room(weights: Any, path: Path, frozen: str) -> None:
        if full:
            raise full.pop()
        save(weights, path, frozen)

    monkeypatch.setattr(replica, "save_weights", save_if_there_is_room)
    monkeypatch.setattr(replica, "AGAIN_S", 0.0)
    look = UseResult(round=1, version=1, evaluates=False, epoch=0, offset=0, size=0, calls_back=False, saves_final=True)
    only.use_result(look)
    assert only.launch.model_path.exists()
    problem = f"the final model cannot be written to {only.launch.model_path}: No space left on device"
    assert capsys.readouterr().out == f"elche: {problem}; this is tried again for 10 minutes\n"
    full.append(OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(replica, "SAVE_S", 0.0)
    with pytest.raises(JobFailed, match=re.escape(problem)):
        only.use_result(look)


def test_a_checkpoint_has_the_result_and_the_moments_of_its_round(world: Make) -> None:
    """Of an overlapped round: what is trained while it is made is in neither."""
    ranks = world(2, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    ranks.round(1)
    for rank in ranks.ranks:
        rank.train(2)
    ranks.all(lambda at, rank: rank.enter(2, may_be_checkpoint=at == 0))
    writer = ranks.ranks[0].replica
    snapshots = [weight(rank) for rank in ranks.ranks]
    moments = [one["momentum_buffer"].clone() for one in writer.optimizers[0].state.values()]
    ranks.ranks[0].train(2)
    ranks.all(lambda at, rank: rank.replica.apply_result())
    ranks.ranks[0].train(2)
    loaded = written(writer, 2)
    model = nn.Linear(3, 1)
    loaded.restore_model(model)
    assert torch.allclose(model.weight, (snapshots[0] + snapshots[1]) / 2, atol=1e-7)
    kept = [one["momentum_buffer"] for one in loaded.state["optimizers"][0]["state"].values()]
    assert all(torch.equal(one, other) for one, other in zip(kept, moments, strict=True))


def test_a_training_that_goes_on_from_a_checkpoint_is_the_one_that_went_on(world: Make) -> None:
    """With its moments and those of its outer optimizer, its position, its version and the rates that were set."""
    options = {
        "after_round": lambda model, version: this_rank().set_lr_scale(0.5 if version == 2 else this_rank().lr_factor),
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        "outer_optimizer": outer.SGD(lr=0.7, momentum=0.9),
    }
    first = world(1, **options)
    first.round(1)
    for round_id in (2, 3):
        first.ranks[0].train(2)
        first.all(lambda at, rank: rank.enter(round_id, may_be_checkpoint=round_id == 3))  # noqa: B023
        first.all(lambda at, rank: rank.replica.apply_result())
    loaded = written(first.ranks[0].replica, 3, training='{"version": 3, "samples": 16}')
    again = world(1, loaded=loaded, **options)
    again.ranks[0].num_leased = first.ranks[0].num_leased
    assert torch.equal(weight(again.ranks[0]), weight(first.ranks[0]))
    again.round(1)
    for those in (first, again):
        those.ranks[0].train(2)
        those.round(4)
    assert torch.allclose(weight(again.ranks[0]), weight(first.ranks[0]))
    assert [one.samples for one in again.ranks[0].asked] == [16, 16, 20]
    assert again.ranks[0].replica.version == 5


GONE = "NCCL error in: /pytorch/a.cpp:1, remote process exited or there was a network error, NCCL version 2.28.9"


@pytest.mark.parametrize(("text", "raised"), [(GONE, CollectiveFailed), ("shapes do not match", RuntimeError)])
def test_a_peer_of_the_job_s_own_collectives_is_no_error_of_the_job(
    world: Make, text: str, raised: type[Exception]
) -> None:
    """A model that is divided among processes runs collectives in its forward."""

    def train_step(model: nn.Module, batch: Any) -> torch.Tensor:
        raise RuntimeError(text)

    (rank,) = world(1, train_step=train_step).ranks
    with pytest.raises(raised, match=text[:20]) as seen:
        rank.train(1)
    assert type(seen.value) is raised


# What is the user's


def test_a_rank_that_joins_gets_the_rates_and_multiplies_none_twice(world: Make) -> None:
    called: list[int] = []

    def halve(rank: Any, epoch: int) -> None:
        called.append(epoch)
        rank.set_lr_scale(rank.lr_factor / 2)

    old, new = (world(1, averaging="blocking", epoch_fn=halve).ranks[0] for _ in range(2))
    World([old]).round(1)
    old.train(1)
    both = World([old, new])
    both.all(lambda at, rank: rank.join(2, at, 2))
    both.round(2)
    assert new.replica.rates.factor == 0.5
    both.all(lambda at, rank: rank.train(1))
    assert called == [0, 0]  # it may set more than rates, on each rank
    assert [rank.lr for rank in both.ranks] == pytest.approx([0.05, 0.05])


def switch(rank: Any, epoch: int) -> None:
    """In epoch 0 alone: what a rank that begins in a later one never hears of."""
    if epoch == 0:
        rank.model[0].requires_grad_(False)
        rank.model[1].eval()


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


def test_a_rank_that_joins_has_what_callbacks_have_frozen_and_the_modes_of_modules(world: Make) -> None:
    """Of a layer that epoch_fn had frozen in the first epoch, it trained its own and brought it into the model."""
    old, new = (world(1, averaging="blocking", model=normalised, epoch_fn=switch).ranks[0] for _ in range(2))
    World([old]).round(1)
    old.train(1)
    new.replica._begun_epoch = 0  # it is dealt none of the first
    both = World([old, new])
    both.all(lambda at, rank: rank.join(2, at, 2))
    both.round(2)
    model: Any = new.replica.model
    assert [one.requires_grad for one in model.parameters()] == [False, False, True, True, True, True]
    assert [module.training for module in model] == [True, False, True]


def test_a_resumed_rank_has_what_callbacks_have_frozen_and_the_modes_of_modules(world: Make) -> None:
    first = world(1, averaging="blocking", model=normalised, epoch_fn=switch)
    first.round(1)
    first.ranks[0].train(1)
    first.ranks[0].enter(2, may_be_checkpoint=True)
    first.ranks[0].replica.apply_result()
    loaded = written(first.ranks[0].replica, 2, '{"version": 2, "samples": 4}')
    model: Any = world(1, model=normalised, loaded=loaded).ranks[0].replica.model
    assert [one.requires_grad for one in model.parameters()] == [False, False, True, True, True, True]
    assert [module.training for module in model] == [True, False, True]


@pytest.mark.parametrize(
    ("leased", "expected"), [((0, 1, 0, 1, 2), (0, 1, 2)), ((0, 3, 1, 4), (0, 1, 2, 3, 4)), ((4, 6, 5), (4, 5, 6))]
)
def test_epoch_fn_is_called_once_for_each_epoch_from_the_first_that_a_rank_has_begun(
    world: Make, leased: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    """Later leases may be of an earlier epoch, and of an epoch a rank may have got nothing."""
    called: list[int] = []
    (rank,) = world(1, epochs=9, epoch_fn=lambda rank, epoch: called.append(epoch)).ranks
    for number, epoch in enumerate(leased, 1):
        rank.replica.take_lease(LeasedPart(id=number, epoch=epoch, offset=rank.num_leased, size=BATCH_SIZE))
        rank.num_leased += BATCH_SIZE
        assert rank.ready.acquire(timeout=100)
        rank.replica.train(TrainBatch(0, rank.replica.rates.factor))
        assert rank.replica.epoch == epoch
    assert called == list(expected)


@pytest.mark.parametrize("averaging", ["blocking", "overlapped"])
def test_what_after_round_changes_stays_in_the_result_and_beside_newer_steps(world: Make, averaging: str) -> None:
    results: dict[int, torch.Tensor] = {}

    @torch.no_grad()
    def after_round(model: Any, version: int) -> None:
        results[id(model)] = model.weight.clone()
        model.weight += 0.5

    ranks = world(2, averaging=averaging, after_round=after_round)
    newer = (2, 0) if averaging == "overlapped" else ()
    ranks.round(1)
    ranks.all(lambda at, rank: rank.train(1))
    ranks.all(lambda at, rank: rank.enter(2))
    entered = weight(ranks.ranks[0])
    for rank, num_batches in zip(ranks.ranks, newer, strict=False):
        rank.train(num_batches)
    newer_steps = weight(ranks.ranks[0]) - entered
    ranks.all(lambda at, rank: rank.replica.apply_result())
    first, second = ranks.ranks
    for rank in ranks.ranks:
        shifted = results[id(rank.replica.model)] + 0.5
        assert torch.equal(rank.replica.layout.result_views()["weight"].view_as(shifted), shifted)
    assert torch.equal(weight(second), results[id(second.replica.model)] + 0.5)
    assert bool(newer_steps.any()) == bool(newer)
    assert torch.allclose(weight(first) - weight(second), newer_steps, rtol=0, atol=1e-6)


@pytest.mark.parametrize("averaging", ["blocking", "overlapped"])
def test_after_round_sees_the_same_progress_on_all_ranks(world: Make, averaging: str) -> None:
    """A mean of the weights that began in a certain epoch began in other rounds on each rank: a slow one had made no
    batch of that epoch.
    """
    seen: dict[int, list[int]] = {}

    def after_round(model: Any, version: int) -> None:
        (view,) = (rank.replica.view for rank in ranks.ranks if rank.replica.model is model)
        seen.setdefault(version, []).append(view.progress.samples)

    ranks = world(2, averaging=averaging, after_round=after_round)
    first, second = ranks.ranks
    ranks.round(1)
    for version, batches in ((2, (1, 3)), (3, (2, 1))):
        first.train(batches[0])
        second.train(batches[1])
        ranks.all(lambda at, rank, version=version: rank.enter(version))
        if averaging == "overlapped":
            first.train(1)
        ranks.all(lambda at, rank: rank.replica.apply_result())
    assert seen == {2: [4 * BATCH_SIZE] * 2, 3: [(7 + (averaging == "overlapped")) * BATCH_SIZE] * 2}
    assert second.replica.view.progress.samples == first.replica.view.progress.samples - (
        BATCH_SIZE if averaging == "overlapped" else 0
    )


# The audit


def test_time_to_fetch_in_step_belongs_to_the_batch(world: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    (rank,) = world(1).ranks
    loader = rank.replica.loader
    loader.fetch_in_step()
    fetch = loader._fetch_here.batch

    def slow(indices: list[int]) -> Any:
        time.sleep(0.05)
        return fetch(indices)

    monkeypatch.setattr(loader._fetch_here, "batch", slow)
    rank.ready.release(2)  # nobody wakes the loop: it takes what it can fetch
    rank.train(2)
    report = rank.replica.meter.take_report()
    assert report.data_wait_ms >= 100
    assert all(ms >= 50 for ms in report.batch_ms)


def test_a_replica_writes_what_its_loader_has_fetched(world: Make) -> None:
    ranks = world(2, averaging="blocking", audit=True)
    ranks.round(1)
    ranks.ranks[0].train(2)
    ranks.ranks[1].train(1)
    ranks.round(2)
    ranks.ranks[0].train(1)
    (first, second) = (rank.replica.audit.log for rank in ranks.ranks)
    assert first is not None
    assert second is not None
    first.end(3)
    files = [audited(log._path) for log in (first, second)]
    assert [[(one.offset, one.size, one.step) for one in file.batches] for file in files] == [
        [(0, 4, 1), (4, 4, 2), (8, 4, 3)],
        [(0, 4, 1)],
    ]
    assert [[(one.round, one.cut, one.weight) for one in file.rounds] for file in files] == [
        [(1, 0, 0), (2, 8, 8)],
        [(1, 0, 0), (2, 4, 4)],
    ]
    contents = [file.results[1, 2].content for file in files]
    assert contents[0] == contents[1]
    assert (contents[0]["the version"], contents[0]["the number of samples"]) == (2, 12)
    assert not any(file.problems for file in files)


def test_a_replica_writes_which_batches_it_has_skipped(world: Make) -> None:
    seen: list[int] = []

    def collate(samples: list[Any]) -> Any:
        seen.append(len(samples))
        return None if len(seen) == 2 else default_collate(samples)

    (rank,) = world(1, averaging="blocking", audit=True, collate_fn=collate).ranks
    rank.train(3)
    log = rank.replica.audit.log
    assert log is not None
    log.end(3)
    assert [(one.offset, one.is_skipped) for one in audited(log._path).batches] == [(0, False), (4, True), (8, False)]


def test_a_replica_writes_from_which_checkpoint_it_resumes(world: Make) -> None:
    """The place that was submitted may be a folder of checkpoints, with newer ones when the run is audited."""
    first = world(1)
    first.round(1)
    first.ranks[0].train(2)
    first.all(lambda at, rank: rank.enter(2, may_be_checkpoint=True))
    first.all(lambda at, rank: rank.replica.apply_result())
    loaded = written(first.ranks[0].replica, 2, training='{"version": 2, "samples": 8}')
    log = world(1, loaded=loaded, audit=True).ranks[0].replica.audit.log
    assert log is not None
    assert audited(log._path).start.resume == loaded.path


def test_a_job_that_does_not_ask_has_no_file(world: Make) -> None:
    assert [rank.replica.audit.log for rank in world(1).ranks] == [None]


def test_an_evaluation_holds_the_data_set_still(world: Make) -> None:
    """It may read the file that the data set reads ahead of training on another thread."""
    is_still: list[bool] = []

    def evaluate(model: nn.Module) -> dict[str, float]:
        free = rank.replica.loader._reading.acquire(blocking=False)
        is_still.append(not free)
        return {}

    ranks = world(1, evaluate=evaluate)
    rank = ranks.ranks[0]
    ranks.round(1)
    look = UseResult(round=1, version=1, evaluates=True, epoch=0, offset=0, size=0, calls_back=False, saves_final=False)
    rank.replica.use_result(look)
    assert is_still == [True]


def test_an_evaluation_sees_the_epoch_that_it_evaluates(world: Make) -> None:
    """What it stored by `this_rank().epoch` had the number of the next epoch, of which its rank had trained batches;
    after a resume, before a batch, -1.
    """
    seen: list[int] = []

    def evaluate(model: nn.Module) -> dict[str, float]:
        seen.append(this_rank().epoch)
        return {}

    ranks = world(1, evaluate=evaluate)
    only = ranks.ranks[0]
    ranks.round(1)
    only.train(1)
    trained = this_rank().epoch
    look = UseResult(round=1, version=1, evaluates=True, epoch=7, offset=0, size=0, calls_back=False, saves_final=False)
    only.replica.use_result(look)
    assert (seen, trained, this_rank().epoch) == ([7], 0, 0)

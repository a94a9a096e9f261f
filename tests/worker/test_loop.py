"""A rank's loop, told what to do by the test in the coordinator's place: what it does, and what it says of it."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from elche.errors import UnknownMessage
from elche.v1 import rank_pb2
from support.solo import BATCH_SIZE
from support.told import Rank

Start = Callable[..., Rank]


def test_a_rank_trains_what_is_leased_and_says_so(start: Start) -> None:
    rank = start()
    rank.lease(5)
    rank.until_step(5)
    newest = rank.said.all("batches_trained")[-1]
    assert (newest.local_step, newest.num_processed) == (5, 5 * BATCH_SIZE)
    assert sum(report.loss_count for report in rank.said.all("batches_trained")) == 5
    assert sum(len(report.batch_ms) for report in rank.said.all("batches_trained")) == 5


class Slowly(Dataset[Any]):
    """Samples that take their time to come, as from a slow disk."""

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(0.01)
        return torch.zeros(3), torch.zeros(1)


def test_what_a_rank_waits_for_data_is_in_its_pace(start: Start) -> None:
    """A batch of 4 samples comes after 40 ms, and is computed in less than a few."""
    rank = start(dataset=Slowly)
    rank.lease(5)
    rank.until_step(5)
    reports = rank.said.all("batches_trained")
    times_ms = [ms for report in reports for ms in report.batch_ms]
    assert len(times_ms) == 5
    assert sorted(times_ms)[2] > 30
    assert reports[-1].data_wait_ms > 120


def test_a_rank_makes_no_batch_beyond_its_limit(start: Start) -> None:
    rank = start()
    rank.tell(throttle=rank_pb2.Throttle(limit_step=3))
    rank.lease(9)
    rank.until_step(3)
    rank.sync(2, after_step=3)  # it has made no other by now
    rank.group.may_finish.release()
    assert rank.said.wait("sync_ack", 2)[-1].header[0].local_step == 3
    rank.tell(throttle=rank_pb2.Throttle(limit_step=9))
    rank.until_step(9)


def test_a_rank_joins_at_its_target(start: Start) -> None:
    rank = start()
    rank.sync(2, after_step=4)
    rank.lease(9)
    rank.said.wait("round_entered", 2)
    rank.group.may_finish.release()
    row = rank.said.wait("sync_ack", 2)[-1].header[0]
    assert (row.local_step, row.cut, row.weight, row.version) == (4, 4 * BATCH_SIZE, 4 * BATCH_SIZE, 1)


def test_beside_an_overlapped_averaging_a_rank_trains_on(start: Start) -> None:
    rank = start(averaging="overlapped")
    rank.sync(2, after_step=2)
    rank.lease(6)
    rank.until_step(6)
    assert len(rank.said.all("sync_ack")) == 1
    rank.group.may_finish.release()
    ack = rank.said.wait("sync_ack", 2)[-1]
    assert (ack.header[0].local_step, ack.newer_batches) == (2, 4)
    assert sum(work.num_batches for work in ack.work) == 2, "what came after belongs to the next round"
    rank.sync(3, after_step=6)
    rank.group.may_finish.release()
    ack = rank.said.wait("sync_ack", 3)[-1]
    assert (ack.header[0].local_step, ack.header[0].weight, ack.newer_batches) == (6, 4 * BATCH_SIZE, 0)


@pytest.mark.parametrize("is_quick", [True, False])
def test_a_result_is_applied_at_the_batch_that_a_recording_says(start: Start, is_quick: bool) -> None:
    """Neither sooner, when it is there already, nor later, when the averaging lasts."""
    rank = start(averaging="overlapped")
    if is_quick:
        rank.group.may_finish.release()
    rank.sync(2, after_step=2, newer_batches=3)
    rank.lease(9)
    if not is_quick:
        rank.until_step(5)
        time.sleep(0.1)
        rank.group.may_finish.release()
    ack = rank.said.wait("sync_ack", 2)[-1]
    assert (ack.header[0].local_step, ack.newer_batches) == (2, 3)
    rank.until_step(9)


def test_in_a_blocking_averaging_a_rank_waits_and_says_how_long(start: Start) -> None:
    rank = start(averaging="blocking")
    rank.sync(2, after_step=2)
    rank.lease(6)
    rank.said.wait("round_entered", 2)
    entered_s = time.perf_counter()
    while time.perf_counter() - entered_s < 0.1:  # the averaging lasts
        assert rank.loop.local_step == 2
        time.sleep(0.01)
    rank.group.may_finish.release()
    ack = rank.said.wait("sync_ack", 2)[-1]
    assert (ack.newer_batches, ack.header[0].local_step) == (0, 2)
    assert ack.stalled_ms > 80
    assert ack.collective_ms > 80


def test_a_rank_without_work_says_how_long_an_overlapped_averaging_has_kept_it(start: Start) -> None:
    rank = start(averaging="overlapped")
    rank.sync(2, after_step=2)
    rank.lease(2)
    rank.said.wait("round_entered", 2)
    time.sleep(0.1)  # the averaging lasts
    rank.group.may_finish.release()
    assert rank.said.wait("sync_ack", 2)[-1].stalled_ms > 80


def test_a_round_that_is_given_up_is_said_and_its_work_is_in_the_next(start: Start) -> None:
    rank = start()
    rank.group.aborts.add(2)
    rank.lease(5)
    rank.sync(2, after_step=2)
    rank.group.may_finish.release()
    failed = rank.said.wait("round_failed")[0]
    assert (failed.round, failed.generation, failed.reason) == (2, 1, "a stream was lost")
    rank.sync(3, after_step=5)
    rank.group.may_finish.release()
    ack = rank.said.wait("sync_ack", 2)[-1]
    row = ack.header[0]
    assert (row.local_step, row.cut, row.weight, row.version) == (5, 20, 20, 1)
    assert sum(work.num_batches for work in ack.work) == 5


def test_a_rank_evaluates_the_result_and_then_goes_on_with_its_newer_steps(start: Start) -> None:
    """Evaluation sees the model as the round has left it, without what was trained meanwhile."""
    seen: list[torch.Tensor] = []

    def evaluate(model: nn.Module) -> dict[str, float]:
        seen.append(next(model.parameters()).detach().clone())
        return {"accuracy": 0.5}

    rank = start(averaging="overlapped", evaluate=evaluate)
    rank.sync(2, after_step=2)
    rank.lease(6)
    rank.said.wait("round_entered", 2)
    rank.until_step(6)
    model = rank.loop._replica.model
    newest = next(model.parameters()).detach().clone()
    rank.group.may_finish.release()
    rank.said.wait("sync_ack", 2)
    result = rank.loop._replica.layout.result_views()["weight"].clone()
    rank.tell(round_outcome=rank_pb2.RoundOutcome(round=2, version=2, evaluate=rank_pb2.Evaluate(epoch=0)))
    told = rank.said.wait("evaluated")[0]
    assert (told.epoch, told.sums["accuracy"].sum, told.sums["accuracy"].count) == (0, 0.5, 1)
    assert torch.equal(seen[0], result)
    assert not torch.equal(seen[0], newest)
    rank.sync(3, after_step=6)
    rank.said.wait("round_entered", 3)
    assert torch.equal(next(model.parameters()), newest), "nothing of it is lost"
    rank.group.may_finish.release()


@pytest.mark.parametrize("said", [{}, {"pause_loop": rank_pb2.PauseLoop()}], ids=["unknown", "pause_loop"])
def test_a_command_that_is_not_for_a_rank_ends_it_with_words(start: Start, said: dict[str, Any]) -> None:
    rank = start()
    rank.ends_with = UnknownMessage
    rank.tell(**said)
    rank._thread.join(400)
    assert "a ConverseResponse came, and this program" in str(rank.ended[0])


def test_a_lost_session_ends_the_loop_wherever_it_waits(start: Start) -> None:
    rank = start(averaging="blocking")
    rank.sync(2, after_step=0)
    rank.said.wait("round_entered", 2)
    rank.control.leave("the coordinator is lost")
    rank._thread.join(400)
    assert [str(one) for one in rank.ended] == ["the coordinator is lost"]

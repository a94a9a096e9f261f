"""A rank's loop, told what to do by the test in the coordinator's place: what it does, and what it says of it."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from elche.errors import UnknownMessage
from elche.v1 import rank_pb2
from elche_worker.collectives.operations import RoundAborted, SoloCollectives
from elche_worker.device.streams import HostStreams
from elche_worker.rank.loop import Leave, RankLoop
from elche_worker.session.control import Control
from support.solo import BATCH_SIZE, JOB, launch, parts_of


class Said:
    """What the loop has said, in order; in place of its stream."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        self.messages: list[rank_pb2.ConverseRequest] = []

    def send(self, message: rank_pb2.ConverseRequest) -> None:
        with self._news:
            self.messages.append(message)
            self._news.notify_all()

    def all(self, kind: str) -> list[Any]:
        """Messages of one kind."""
        return [getattr(one, kind) for one in self.messages if one.HasField(kind)]  # type: ignore[arg-type]

    def wait(self, kind: str, count: int = 1) -> list[Any]:
        """Until there are so many of a kind."""
        with self._news:
            assert self._news.wait_for(lambda: len(self.all(kind)) >= count, timeout=20), (kind, self.messages)
        return self.all(kind)


class Slow(SoloCollectives):
    """A group whose rounds are over when the test says so, or given up."""

    def __init__(self) -> None:
        super().__init__(attempt=1, generation=1, device=torch.device("cpu"))
        self.may_finish = threading.Semaphore(0)
        self.aborts: set[int] = set()
        self._round = 0

    def begin(self, round_id: int) -> None:
        self._round = round_id

    def finish(self) -> None:
        assert self.may_finish.acquire(timeout=20)
        if self._round in self.aborts:
            raise RoundAborted("a stream was lost")


class Rank:
    """A loop on a thread of its own."""

    def __init__(self, folder: Path, stack: ExitStack, **changes: Any) -> None:
        self.control, self.said = Control(), Said()
        job = replace(JOB, **changes)
        session: Any = self.said
        nobody: Any = None
        parts = stack.enter_context(parts_of(job, self.control.notify))
        self.loop = RankLoop(
            launch(folder), job, parts, control=self.control, session=session, channel=nobody, streams=HostStreams()
        )
        self.group = Slow()
        self.ended: list[BaseException] = []
        self.ends_with: type[BaseException] = Leave
        self._num_leased = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        stack.callback(self.leave)

    def _run(self) -> None:
        try:
            self.loop.run()
        except BaseException as error:
            self.ended.append(error)

    def tell(self, **message: Any) -> None:
        self.control.put(rank_pb2.ConverseResponse(**message))

    def begin(self) -> None:
        """Meets a group, and has the first round, which spreads the start state."""
        self.tell(form_group=rank_pb2.FormGroup(attempt=1, generation=1, world_size=1))
        self.said.wait("group_ready")
        self.loop._replica.collectives = self.group
        self.sync(1, after_step=0)
        self.group.may_finish.release()
        self.said.wait("sync_ack")

    def sync(self, round_id: int, *, after_step: int, **more: Any) -> None:
        message = rank_pb2.SyncNow(round=round_id, generation=1, after_step=after_step, count=1, every=1, **more)
        self.tell(sync_now=message)

    def lease(self, num_batches: int) -> None:
        size = num_batches * BATCH_SIZE
        lease = rank_pb2.StartEpoch(
            lease=self._num_leased + 1, epoch=0, partition_offset=self._num_leased, partition_size=size
        )
        self._num_leased += size
        self.tell(start_epoch=lease)

    def until_step(self, step: int) -> None:
        """Until it has said that it has made so many batches."""
        count = 0
        while not count or self.said.all("batches_trained")[-1].local_step < step:
            count += 1
            self.said.wait("batches_trained", count)

    def leave(self) -> None:
        self.control.leave("the test is over")
        self.group.may_finish.release()
        self._thread.join(20)
        assert [type(one) for one in self.ended] == [self.ends_with], self.ended


Start = Callable[..., Rank]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Makes a rank that has had its first round."""
    with ExitStack() as stack:

        def make(**changes: Any) -> Rank:
            rank = Rank(tmp_path, stack, **changes)
            rank.begin()
            return rank

        yield make


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
    rank._thread.join(20)
    assert "a ConverseResponse came, and this program" in str(rank.ended[0])


def test_a_lost_session_ends_the_loop_wherever_it_waits(start: Start) -> None:
    rank = start(averaging="blocking")
    rank.sync(2, after_step=0)
    rank.said.wait("round_entered", 2)
    rank.control.leave("the coordinator is lost")
    rank._thread.join(20)
    assert [str(one) for one in rank.ended] == ["the coordinator is lost"]

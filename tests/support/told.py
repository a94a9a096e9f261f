"""A rank's loop on a thread of its own, which a test tells what to do in the coordinator's place."""

import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from elche.v1 import rank_pb2
from elche_worker.collectives.operations import CollectiveFailed, RoundAborted, SoloCollectives
from elche_worker.device.streams import DeviceStreams
from elche_worker.rank.loop import Leave, RankLoop
from elche_worker.session.control import Control
from support.solo import BATCH_SIZE, JOB, launch, parts_of


class Said:
    """What the loop has said, in order; in place of its stream."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        self.is_connected = True
        self.messages: list[rank_pb2.ConverseRequest] = []

    def send(self, message: rank_pb2.ConverseRequest) -> None:
        with self._news:
            self.messages.append(message)
            self._news.notify_all()

    def all(self, kind: str) -> list[Any]:
        """Messages of one kind."""
        return [getattr(one, kind) for one in self.messages if one.HasField(kind)]  # type: ignore[arg-type]

    def of_rounds(self) -> list[str]:
        """Everything but progress reports, shortly: kind, and round or generation."""
        told = []
        for one in self.messages:
            kind = one.WhichOneof("message") or ""
            message = getattr(one, kind)
            if kind != "batches_trained":
                told.append(f"{kind} {message.round if hasattr(message, 'round') else message.generation}")
        return told

    def until(self, holds: Callable[["Said"], bool]) -> None:
        """Waits for what it says."""
        with self._news:
            assert self._news.wait_for(lambda: holds(self), timeout=400), self.of_rounds()

    def wait(self, kind: str, count: int = 1) -> list[Any]:
        """Until there are so many of a kind."""
        with self._news:
            assert self._news.wait_for(lambda: len(self.all(kind)) >= count, timeout=400), (kind, self.messages)
        return self.all(kind)


class Slow(SoloCollectives):
    """A group whose rounds are over when the test says so, or given up."""

    def __init__(self, generation: int = 1) -> None:
        super().__init__(attempt=1, generation=generation, device=torch.device("cpu"))
        self.may_finish = threading.Semaphore(0)
        self.aborts: set[int] = set()
        self.is_aborted = False
        self.survives_abort = False
        """Whether the abort comes when the result is there."""
        self._round = 0

    def begin(self, round_id: int) -> None:
        self._round = round_id

    def finish(self) -> None:
        assert self.may_finish.acquire(timeout=400)
        if self._round in self.aborts:
            raise RoundAborted("a stream was lost")
        if self.is_aborted and not self.survives_abort:
            raise CollectiveFailed("the sockets were shut")

    def abort(self) -> None:
        self.is_aborted = True
        self.may_finish.release()


class Rank:
    """A loop on a thread of its own."""

    def __init__(self, folder: Path, stack: ExitStack, *, rank: int = 0, **changes: Any) -> None:
        self.control, self.said = Control(), Said()
        job = replace(JOB, **changes)
        session: Any = self.said
        nobody: Any = None
        parts = stack.enter_context(parts_of(job, self.control.notify))
        self.loop = RankLoop(
            launch(folder, rank),
            job,
            parts,
            control=self.control,
            session=session,
            channel=nobody,
            streams=DeviceStreams(),
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
        self.form(1)
        self.said.wait("group_ready")
        self.loop._replica.generations.in_use = self.group
        self.sync(1, after_step=0)
        self.group.may_finish.release()
        self.said.wait("sync_ack")

    def form(self, generation: int, position: int = 0, size: int = 1, backend: str = "gloo") -> None:
        group = rank_pb2.FormGroup(
            attempt=1, generation=generation, position=position, world_size=size, backend=backend
        )
        self.tell(form_group=group)

    def sync(self, round_id: int, *, after_step: int, generation: int = 1, **more: Any) -> None:
        message = rank_pb2.SyncNow(
            round=round_id, generation=generation, after_step=after_step, count=1, every=1, **more
        )
        self.tell(sync_now=message)

    def abandon(self, generation: int, *, keeps_headers: bool = False) -> None:
        self.tell(abandon=rank_pb2.Abandon(generation=generation, keeps_headers=keeps_headers))

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
        self._thread.join(400)
        assert [type(one) for one in self.ended] == [self.ends_with], self.ended

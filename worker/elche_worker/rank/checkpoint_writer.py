"""Writes checkpoints while training goes on."""

import json
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from elche.timeline import CHECKPOINT
from elche.v1 import rank_pb2
from elche_worker.model.checkpoint import About, CheckpointData, CheckpointTarget, divided
from elche_worker.model.tensors import Piece
from elche_worker.rank.checkpoint_capture import CheckpointCapture
from elche_worker.telemetry.timeline import SpanRecorder

if TYPE_CHECKING:
    from elche_worker.rank.pieces import Pieces

MAX_REASON_CHARS = 1000
"""Most characters of a reason, for people, that a message has."""
MAX_WAITING = 2
"""Checkpoints that may wait in memory to be written, besides the one that is captured."""


class CheckpointWriter:
    """Writes a job's checkpoints, one after the other, on a thread, where `send` is called with each outcome."""

    def __init__(
        self,
        target: CheckpointTarget,
        about: About,
        send: Callable[[rank_pb2.ConverseRequest], None],
        timeline: SpanRecorder | None = None,
        pieces: "Pieces | None" = None,
    ) -> None:
        """`pieces` writes a model that is divided among a replica group, whose processes all write together."""
        self._pieces = pieces
        self.target = target
        self._about = about
        self._send = send
        self._timeline = timeline
        self._room = threading.Condition()
        self._num_waiting = 0
        """Checkpoints that are being written or wait for it. Guarded by `_room`."""
        self.num_ranks = 1
        """Ranks of the present generation, for the manifest."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")

    def write(
        self, version: int, order: rank_pb2.WriteCheckpoint | None, data: CheckpointData, capture: CheckpointCapture
    ) -> None:
        """Starts writing, and recycles the memory when that is done. Only a group's leader has an `order`; the other
        processes write their own parts.
        """
        with self._room:
            self._num_waiting += 1
        self._thread.submit(self._write_data, version, order, data, capture)

    def write_draft(self, data: CheckpointData, capture: CheckpointCapture) -> Path:
        """Writes a draft after earlier checkpoints; returns its folder. Raises the storage's errors."""

        def write() -> Path:
            capture.finish_copy()
            return self.target.write_draft(data, replace(self._about, num_ranks=self.num_ranks))

        return self._thread.submit(write).result()

    def refuse(self, version: int, reason: str) -> None:
        """Reports that the round's result is gone, so that the coordinator makes a checkpoint of a later round. Runs on
        the writer's thread, so that it follows the reports of earlier checkpoints.
        """
        failed = rank_pb2.CheckpointFailed(version=version, reason=reason, is_late=True)
        self._thread.submit(self._send, rank_pb2.ConverseRequest(checkpoint_failed=failed))

    def _write_data(
        self, version: int, order: rank_pb2.WriteCheckpoint | None, data: CheckpointData, capture: CheckpointCapture
    ) -> None:
        started_s = time.perf_counter()
        capture.finish_copy()
        if order is None:
            self._write_part(data)
        else:
            self._write(version, order, data)
        if self._timeline is not None:
            self._timeline.add(CHECKPOINT, started_s, time.perf_counter(), version)
        capture.recycle(data)
        with self._room:
            self._num_waiting -= 1
            self._room.notify()

    def wait_for_room(self, is_over: Callable[[], bool]) -> None:
        """Waits while `MAX_WAITING` checkpoints are being written: training pauses rather than lose a checkpoint."""
        with self._room:
            while self._num_waiting >= MAX_WAITING and not is_over():
                # looks again from time to time, since `_room` is not notified when the rank leaves
                self._room.wait(timeout=0.1)

    def _write_part(self, data: CheckpointData) -> None:
        assert self._pieces is not None
        try:
            if folder := self._pieces.agree(""):
                self._pieces.write(Path(folder), divided(data)[-1])
        except Exception as error:  # the leader reports it
            print(f"this process's part of a checkpoint cannot be written: {error}", flush=True)

    def _write(self, version: int, order: rank_pb2.WriteCheckpoint, data: CheckpointData) -> None:
        """Writes a checkpoint, removes those that the order does not keep, and reports the outcome."""
        started_s = time.perf_counter()
        has_begun = False

        def write_pieces(folder: Path, pieces: Mapping[str, Piece]) -> None:
            nonlocal has_begun
            has_begun = True
            assert self._pieces is not None
            self._pieces.agree(str(folder))
            self._pieces.write(folder, pieces)

        try:
            about = replace(self._about, num_ranks=self.num_ranks)
            path, size_bytes = self.target.write(
                order.name, data, about, json.loads(order.training), write_pieces if self._pieces else None
            )
            self.target.keep_only([*order.keep, order.name])
        except Exception as error:  # training goes on, whatever the storage raises
            if self._pieces is not None and not has_begun:
                self._pieces.agree("")  # the other processes wait in `_write_part` for the leader's folder
            reason = f"the checkpoint {self.target.place}/{order.name} cannot be written: {error}"[:MAX_REASON_CHARS]
            failed = rank_pb2.CheckpointFailed(version=version, reason=reason)
            print(reason, flush=True)
            self._send(rank_pb2.ConverseRequest(checkpoint_failed=failed))
            return
        duration_s = time.perf_counter() - started_s
        saved = rank_pb2.CheckpointSaved(version=version, path=path, size_bytes=size_bytes, duration_s=duration_s)
        self._send(rank_pb2.ConverseRequest(checkpoint_saved=saved))

"""Checkpoints of a rank's rounds, from the capture of a result to its file."""

from pathlib import Path
from typing import Any

from elche.v1 import rank_pb2
from elche_worker.model.checkpoint import CheckpointData
from elche_worker.rank.acts import ResolveCheckpoint
from elche_worker.rank.checkpoint_capture import CheckpointCapture
from elche_worker.rank.checkpoint_writer import CheckpointWriter


class RoundCheckpoints:
    """Keeps the captured state of a round until the coordinator decides if it becomes a checkpoint."""

    def __init__(self, capture: CheckpointCapture, writer: CheckpointWriter) -> None:
        self.capture = capture
        self.writer = writer
        self._captured: dict[int, CheckpointData] = {}
        """Captured states by round. When the round is committed, its state is written or its memory reused."""

    def capture_result(self, round_id: int, at_entry: dict[str, Any]) -> None:
        """Captures the result in the flat buffers, with the state that was captured when the round was entered."""
        self._captured[round_id] = self.capture.capture(at_entry)

    def capture_late(self, round_id: int, newest: int) -> bool:
        """Captures a result although its round was not announced as one that may become a checkpoint; does nothing if
        it was captured already. Its moments are a few batches newer than the result (protocol P12.5). Returns False if
        the flat buffers no longer have the result: `newest` is the round entered last.
        """
        if round_id not in self._captured and round_id != newest:
            return False
        if round_id not in self._captured:
            self._captured[round_id] = self.capture.capture(self.capture.capture_at_entry())
        return True

    def write_draft(self, held: int) -> Path:
        """Writes the result of round `held` as a draft; returns its folder. Raises the storage's errors."""
        self.capture_late(held, held)
        return self.writer.write_draft(self._captured.pop(held), self.capture)

    def resolve(self, act: ResolveCheckpoint, write: rank_pb2.WriteCheckpoint | None, newest: int) -> None:
        """Writes the captured state of the round, or discards it. Only a group's leader has `write`."""
        if act.is_written:
            if not self.capture_late(act.round, newest):
                if write is not None:
                    self.writer.refuse(act.version, f"round {act.round} was over when it was to become a checkpoint")
                return
            self.writer.write(act.version, write, self._captured.pop(act.round), self.capture)
        elif (captured := self._captured.pop(act.round, None)) is not None:
            self.capture.recycle(captured)

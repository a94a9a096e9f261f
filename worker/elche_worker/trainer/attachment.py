"""What a user-owned loop reports to a coordinator, and what operators request of it; or nothing, without one."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from elche.v1 import rank_pb2
from elche_worker.user.scalars import Sum


@dataclass(slots=True)
class OperatorRequests:
    """What operators have asked for, written by the session's thread."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    cancelled: str = ""
    """Why the loop is to end; empty while it goes on."""
    wants_checkpoint: bool = False
    is_paused: bool = False

    def take_requests(self) -> tuple[float, float, float]:
        """As ranks exchange them: end, checkpoint, pause. Each request for a checkpoint is taken once."""
        with self.changed:
            wants_checkpoint, self.wants_checkpoint = self.wants_checkpoint, False
            return float(bool(self.cancelled)), float(wants_checkpoint), float(self.is_paused)


@dataclass(frozen=True, slots=True)
class NextGroup:
    """The group that this rank is to form with others, after one has died."""

    generation: int
    position: int
    world_size: int
    store: Any
    """Where they find each other: a `torch.distributed.Store`."""


class Attachment(Protocol):
    """What a loop tells a coordinator. `CoordinatorAttachment` and `NoAttachment` are its forms."""

    operator: OperatorRequests

    @property
    def is_attached(self) -> bool:
        """True if there is a coordinator; without one, nothing need be computed for it."""
        ...

    def add_batches(
        self, num_batches: int, num_samples: int, loss_sum: Any, num_losses: int, scalars: Mapping[str, Sum]
    ) -> None:
        """Adds the batches of one step, and the sum of the losses that are known."""
        ...

    def add_times(self, batch_ms: list[float], waited_ms: float, data_wait_ms: float) -> None:
        """Adds times per batch, and time that was spent averaging and waiting for data."""
        ...

    def add_span(self, kind: int, start_s: float, end_s: float, detail: int = 0) -> None:
        """Adds a span to the timeline, if one is recorded."""
        ...

    def report(self, progress: rank_pb2.LoopProgress, learning_rate: float | None, *, is_last: bool = False) -> None:
        """Reports this rank's progress, and on rank 0 the loop's, at most once per interval."""
        ...

    def end_epoch(self, epoch: int, num_done: int, duration_s: float) -> None:
        """This rank has ended an epoch, of which all ranks together have trained `num_done` samples. Reads its losses
        from the device.
        """
        ...

    def report_metrics(self, epoch: int, metrics: Mapping[str, float]) -> None:
        """Reports the metrics of an evaluation."""
        ...

    def report_saved(self, version: int, path: str, size_bytes: int, duration_s: float) -> None:
        """A checkpoint is complete. From any thread."""
        ...

    def report_not_saved(self, version: int, reason: str) -> None:
        """A checkpoint cannot be written. From any thread."""
        ...

    def leave(self, error: BaseException | None) -> None:
        """The loop has ended; `error` is what it raised, if anything."""
        ...

    def next_group(self, generation: int, reason: str) -> NextGroup | None:
        """Says that nothing of this group runs here any more, and waits for the next one. None when nobody can form it,
        or the loop is to end.
        """
        ...


class NoAttachment:
    """Where there is no coordinator: reports go nowhere, and nobody requests anything."""

    is_attached = False

    def __init__(self) -> None:
        self.operator = OperatorRequests()

    def add_batches(
        self, num_batches: int, num_samples: int, loss_sum: Any, num_losses: int, scalars: Mapping[str, Sum]
    ) -> None:
        return

    def add_times(self, batch_ms: list[float], waited_ms: float, data_wait_ms: float) -> None:
        return

    def add_span(self, kind: int, start_s: float, end_s: float, detail: int = 0) -> None:
        return

    def report(self, progress: rank_pb2.LoopProgress, learning_rate: float | None, *, is_last: bool = False) -> None:
        return

    def end_epoch(self, epoch: int, num_done: int, duration_s: float) -> None:
        return

    def report_metrics(self, epoch: int, metrics: Mapping[str, float]) -> None:
        return

    def report_saved(self, version: int, path: str, size_bytes: int, duration_s: float) -> None:
        return

    def report_not_saved(self, version: int, reason: str) -> None:
        return

    def leave(self, error: BaseException | None) -> None:
        return

    def next_group(self, generation: int, reason: str) -> NextGroup | None:
        return None

"""Interface between a user-owned loop and a coordinator: the loop's reports, and operators' requests."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from elche.v1 import rank_pb2
from elche_worker.user.scalars import Sum


@dataclass(slots=True)
class OperatorRequests:
    """Pending requests of operators. The session's thread writes them; `changed` guards all fields."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    cancelled: str = ""
    """Reason for which the loop is to end; empty while it goes on."""
    wants_checkpoint: bool = False
    """True from a request for a checkpoint until `take_requests` has returned it."""
    is_paused: bool = False
    """True from a request to pause until one to go on."""

    def take_requests(self) -> tuple[float, float, float]:
        """Returns (end, checkpoint, pause) as 0.0 or 1.0, as ranks exchange them. Clears a request for a checkpoint."""
        with self.changed:
            wants_checkpoint, self.wants_checkpoint = self.wants_checkpoint, False
            return float(bool(self.cancelled)), float(wants_checkpoint), float(self.is_paused)


@dataclass(frozen=True, slots=True)
class NextGroup:
    """The group that this rank is to form with others, after one has died."""

    generation: int
    position: int
    """This rank's position in the group, from 0."""
    world_size: int
    store: Any
    """The `torch.distributed.Store` for the group's rendezvous."""


class Attachment:
    """A loop's connection to a coordinator. This one, of a loop without a coordinator, drops reports and has no
    requests; `CoordinatorAttachment` has a coordinator.
    """

    is_attached = False
    """True if there is a coordinator, so that values must be computed for it."""

    def __init__(self) -> None:
        self.operator = OperatorRequests()
        self.lost = ""
        """Why the coordinator does not know this rank any more; empty while it does."""

    def add_batches(
        self, num_batches: int, num_samples: int, loss_sum: Any, num_losses: int, scalars: Mapping[str, Sum]
    ) -> None:
        """Adds the batches of one step, and the sum of the losses that are known."""

    def add_times(self, batch_ms: list[float], waited_ms: float, data_wait_ms: float) -> None:
        """Adds times in ms: of each batch, spent averaging, and spent waiting for data."""

    def add_span(self, kind: int, start_s: float, end_s: float, detail: int = 0) -> None:
        """Adds a span to the timeline, if one is recorded."""

    def report(self, progress: rank_pb2.LoopProgress, learning_rate: float | None, *, is_last: bool = False) -> None:
        """Reports this rank's progress, and on rank 0 the loop's, at most once per interval."""

    def end_epoch(self, epoch: int, num_done: int, duration_s: float) -> None:
        """Reports that this rank has ended an epoch, of which all ranks together have trained `num_done` samples. Reads
        the losses from the device.
        """

    def report_metrics(self, epoch: int, metrics: Mapping[str, float]) -> None:
        """Reports the metrics of an evaluation."""

    def report_saved(self, version: int, path: str, size_bytes: int, duration_s: float) -> None:
        """Reports a complete checkpoint. From any thread."""

    def report_not_saved(self, version: int, reason: str) -> None:
        """Reports that a checkpoint cannot be written. From any thread."""

    def leave(self, error: BaseException | None, *, is_caught: bool = False) -> None:
        """Reports that the loop has ended, with `error` if it raised one. If `is_caught`, the script has gone on."""

    def next_group(self, generation: int, reason: str) -> NextGroup | None:
        """Reports that this rank has left the group; returns the next one, or None if there is to be none."""
        return None

"""The events of a job for clients: the shared declarations, with fields that only the client has."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from elche import reports, views
from elche.reports import (
    Checkpoint,
    EpochReport,
    EvaluationReport,
    MembershipReport,
    RankResult,
    StallReport,
    UserEvent,
)
from elche.views import JobState, RankView

__all__ = [
    "EVENT_NAMES",
    "Checkpoint",
    "EpochReport",
    "EvaluationReport",
    "Event",
    "Fault",
    "HostView",
    "JobResult",
    "JobState",
    "JobView",
    "LinkView",
    "LogLine",
    "MembershipReport",
    "RankResult",
    "RankView",
    "RoundReport",
    "SlotView",
    "StallReport",
    "UserEvent",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView(views.JobView):
    """One job at one moment. `num_epochs` and `dataset_size` are 0 before the ranks have loaded the file."""

    state: JobState = JobState.UNKNOWN
    submitted_at: datetime | None = None
    resume: str = ""
    """Folder of checkpoints from which it began, or would begin again; empty: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundReport(reports.RoundReport):
    """One committed round. Tuples are in rank order."""

    recorded: bytes = b""
    """The round's recording: an `elche.v1.JobSpec` message with only this round in `replay`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult(reports.JobResult):
    """The result of a job."""

    state: JobState


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotView:
    """One device that can hold one rank."""

    device: str
    model: str = ""
    """Such as "NVIDIA H200"; empty when unknown."""
    job_id: str = ""
    """The job on it; empty: it is free."""
    rank: int = 0
    memory_bytes: int = 0
    """Memory in bytes of the device, or its share of it; 0 if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostView:
    """One host at one moment."""

    host: str
    """Name of the host; not unique."""
    agent_id: str
    slots: tuple[SlotView, ...]
    is_drained: bool = False
    """True if it gets no more ranks."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels for jobs' conditions."""
    problem: str = ""
    """Why it can start no ranks now; empty: it can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkView:
    """The link between two hosts, measured over one TCP connection."""

    host: str
    other: str
    error: str = ""
    """The reason why it could not be measured; empty if it was."""
    round_trip_s: float = 0.0
    to_bytes_per_s: float = 0.0
    """Bandwidth from `host` to `other`."""
    from_bytes_per_s: float = 0.0


class Fault(StrEnum):
    """A fault that is made on purpose."""

    RANK = "rank"
    """SIGKILL to the processes of a rank."""
    STOP = "stop"
    """SIGSTOP to them, and SIGCONT some seconds later: a host that swaps, or was suspended."""
    NETWORK = "network"
    """The coordinator's connections with a rank and its worker are cut. Both connect again."""
    AGENT = "agent"
    """SIGKILL to the worker of a rank, with all ranks on it. Something must start it again."""
    COORDINATOR = "coordinator"
    """SIGKILL to the coordinator. Something must start it again, or stand by."""
    DISK = "disk"
    """The coordinator's database takes no writes for some seconds, as on a full disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """One line of a rank's log, unchanged; or the reason why there is no log of this rank."""

    rank: int
    text: str = ""
    error: str = ""
    at: datetime | None = None
    """Time at which it was written, to a second; None if unknown."""


Event = (
    JobView
    | RoundReport
    | EpochReport
    | EvaluationReport
    | StallReport
    | MembershipReport
    | Checkpoint
    | UserEvent
    | JobResult
)
EVENT_NAMES: dict[type[Event], str] = {
    JobView: "view",
    RoundReport: "round",
    EpochReport: "epoch",
    EvaluationReport: "evaluation",
    StallReport: "stall",
    MembershipReport: "membership",
    Checkpoint: "checkpoint",
    UserEvent: "user_event",
    JobResult: "result",
}
"""For each event, its field of `WatchJobResponse`, and its name in lines of JSON."""

"""What has happened. Events go into `Coordinator.handle`; the hottest come first."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from elche.settings import AgreedSettings
from elche_coordinator.core.messages.ids import AgentId, GenerationId, Incarnation, JobId, Rank, RoundId, Version
from elche_coordinator.core.messages.spec import Build, EpochWork, HeaderRow, JobSpec, Slot, TensorSum


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEvent:
    """Something that one incarnation of a rank did."""

    job_id: JobId
    rank: Rank
    incarnation: Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauges:
    """A rank's device and loop at one moment, for people; None or 0: not known."""

    learning_rate: float | None = None
    gradient_norm: float | None = None
    memory_used_bytes: int = 0
    memory_reserved_bytes: int = 0
    memory_peak_bytes: int = 0
    memory_total_bytes: int = 0
    gpu_utilization: float | None = None
    gpu_temperature_celsius: float | None = None
    gpu_power_watts: float | None = None
    prefetch_batches: int = 0
    throttled_ms: float = 0.0
    parameter_norm: float | None = None
    memory_process_bytes: int | None = None
    gpu_slowdowns: tuple[str, ...] = ()
    gpu_corrected_ecc_errors: int | None = None
    gpu_uncorrected_ecc_errors: int | None = None
    gpu_xid_errors: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchesTrained(RankEvent):
    """Progress between rounds. Counters are cumulative for the incarnation."""

    local_step: int
    num_processed: int
    batch_ms: tuple[float, ...] = ()
    """Time of each of the newest batches, the wait for its data included, oldest first."""
    loss_sum: float = 0.0
    loss_count: int = 0
    data_wait_ms: float = 0.0
    """Since the session began."""
    gauges: Gauges | None = None
    waited_ms: float = 0.0
    """Since the session began: time that steps of a loop of the user's own have waited instead of computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReserveRecalled(RankEvent):
    """The rank has given back what was in reserve and not begun."""

    num_samples: int
    """Samples of its leases that it keeps, counted since its incarnation began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundEntered(RankEvent):
    """The rank has taken its snapshot."""

    generation: GenerationId
    round: RoundId


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultReceived(RankEvent):
    """The rank has received the round's result, with the whole header or its digest."""

    generation: GenerationId
    round: RoundId
    header: tuple[HeaderRow, ...]
    """Empty where the digest stands for it."""
    collective_ms: float
    """From entry to result."""
    stalled_ms: float = 0.0
    """Time that the round kept the rank from training."""
    sent_bytes: int = 0
    divergence: float | None = None
    digest: int | None = None
    newer_batches: int = 0
    """Batches that the rank had made after its snapshot when the result was applied to its model."""
    callback_errors: int = 0
    """How often the job's callbacks have raised on the rank."""
    work: tuple[EpochWork, ...] = ()
    header_digest: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeaderTold(RankEvent):
    """The header of a round of which the rank has sent the digest, since its generation is given up."""

    generation: GenerationId
    round: RoundId
    header: tuple[HeaderRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundFailed(RankEvent):
    """The rank will not receive the round's result: it gave the averaging up."""

    generation: GenerationId
    round: RoundId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReady(RankEvent):
    """The rank has loaded the user's file."""

    settings: AgreedSettings
    device: str
    build: Build = field(default_factory=Build)
    tensors: tuple[str, ...] = ()
    """The model in words; empty when that is too much."""
    batch_size: int | None = None
    """Samples in a batch of this rank; None: as the job's."""
    resumed: str = ""
    """The training's state in the checkpoint that the rank has loaded, as JSON; empty without one."""
    links_address: str = ""
    """Where others can try whether they reach it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFormed(RankEvent):
    """The rank is connected to the generation's process group."""

    generation: GenerationId


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationAbandoned(RankEvent):
    """Nothing of the generation runs on the rank any more. How its rounds ended there was said before this."""

    generation: GenerationId
    reason: str = ""
    """Why, when nobody had asked: its group could not be formed, or a collective failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PingSent(RankEvent):
    """The question whether the rank's process runs has left; it may have waited for a record to become durable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PingAnswered(RankEvent):
    """The rank's process runs, and can be reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveAsked(RankEvent):
    """The rank's process is to end, and would have its work committed before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinksProbed(RankEvent):
    """The rank has tried whether it can reach the others."""

    ranks: tuple[Rank, ...]
    """Those that it can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationDone(RankEvent):
    """The evaluation that was asked for, or the rank's part of it."""

    epoch: int
    sums: dict[str, tuple[float, int]]
    """Name to (sum, count)."""
    duration_ms: float
    tensors: dict[str, TensorSum] = field(default_factory=dict)
    """What is summed over all parts, by name."""
    is_made: bool = False
    """True if these are the metrics that were made of the summed tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved(RankEvent):
    """The checkpoint that was asked for is complete."""

    version: Version
    path: str
    size_bytes: int
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFailed(RankEvent):
    """The checkpoint that was asked for cannot be written; those before it are as they were."""

    version: Version
    reason: str
    is_late: bool = False
    """True if the rank had gone on before it knew of it: another round is to become one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochMetricsTaken(RankEvent):
    """The job's own callback for a finished epoch has returned."""

    epoch: int
    callback_errors: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class UserEventRecorded(RankEvent):
    """User code has recorded an event of its own, for people."""

    text: str
    num_dropped: int = 0
    """Earlier events of the rank that were not sent, because they were too many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalStateSaved(RankEvent):
    """The job's final state is on disk."""

    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BestKept(RankEvent):
    """The best model is beside the final state, or in its place."""

    error: str = ""
    """Why it is not, and the final state is as it was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopProgressed(RankEvent):
    """How far a loop of the user's own is; only rank 0 reports it."""

    num_steps: int
    epoch: int
    num_epochs: int
    """0: not known."""
    epoch_size: int
    """Samples; 0: not known."""
    epoch_done: int
    """Samples of all ranks."""
    batch_size: int
    anchor: int
    averaging_ms: float
    """Since the loop began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopEpochEnded(RankEvent):
    """A rank of a loop has ended an epoch."""

    work: EpochWork
    duration_s: float
    num_done: int = 0
    """Samples of the epoch that all ranks have trained, those that are gone too; 0: not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOpened(RankEvent):
    """The rank's stream began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopLeft(RankEvent):
    """A rank of a loop has ended normally."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailed(RankEvent):
    """User code raised, or the job is not valid."""

    error: str
    traceback: str = ""
    batch: int | None = None
    invalid: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLost(RankEvent):
    """The rank's stream ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStarted(RankEvent):
    """The agent started the process."""

    agent_id: AgentId
    log_path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExited(RankEvent):
    """The process has ended, as its agent reports; a negative code is a signal's number."""

    agent_id: AgentId
    exit_code: int
    log_tail: str = ""
    group_position: int = 0
    """Of a replica group: the position of the process that ended first. The agent has ended the others."""
    log_path: str = ""
    """Of that process, where it is not the rank's own."""
    was_stopped: bool = False
    """True if somebody had stopped it (SIGSTOP) when it was to be ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StacksTold(RankEvent):
    """The agent has read the stacks of the threads of a rank's process."""

    agent_id: AgentId
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentJoined:
    """A host offers its devices."""

    agent_id: AgentId
    host: str
    slots: tuple[Slot, ...]
    labels: dict[str, str] = field(default_factory=dict)
    folder: str = ""
    """Identifies its work folder, which another agent may have had before; empty: not known."""
    jobs: tuple[JobId, ...] = ()
    """Whose logs or model it can deliver, as far as it has told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLost:
    """A host is gone, and its processes with it."""

    agent_id: AgentId


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSubmitted:
    """A client asked for a job."""

    job_id: JobId
    spec: JobSpec
    submitted_at: float
    """Wall-clock time, seconds since 1970, for people only."""
    key: str = ""
    """The client's own name for this submission, with whose it is (`Caller.own_key`): one that is sent again makes no
    second job. Empty: it has none.
    """
    past_attempts: int = 0
    """How often it was begun under coordinators before this one. Then `spec.resume` is what it goes back to."""
    last_incarnation: Incarnation = Incarnation(0)  # noqa: RUF009
    """The highest that was used then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopAttached:
    """A loop of the user's own wants to appear as a job. Its processes run already."""

    job_id: JobId
    spec: JobSpec
    ranks: tuple[tuple[str, str], ...]
    """(host, device) of each."""
    policy: str
    """How its steps are split among ranks, in words."""
    submitted_at: float
    """Wall-clock time, seconds since 1970, for people only."""
    can_regroup: bool = False
    """True if its ranks can go on without one that has died."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCancelled:
    """A client asked for a job's end."""

    job_id: JobId


@dataclass(frozen=True, slots=True, kw_only=True)
class JobBroken:
    """A command or a record of the job could not be carried out: the job fails, the others go on."""

    job_id: JobId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRequested:
    """A client asked for a checkpoint."""

    job_id: JobId


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseRequested:
    """A client wants a job to stop after the round that is open, or to go on."""

    job_id: JobId
    is_paused: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleRequested:
    """A client wants a job to have more or fewer ranks."""

    job_id: JobId
    num_ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotsAsked:
    """Another job waits for slots that this one has, and has a better right to them (`Coordinator.asked`)."""

    job_id: JobId
    num_ranks: int
    """How many of its ranks are to leave."""
    by: JobId
    """Which job waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRequested:
    """A client wants no more ranks on a host, or some again. Those that it has go on."""

    agent_id: AgentId
    is_drained: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotasSet:
    """The coordinator was started with these quotas. An event, so that a tape is repeated with those of its time."""

    quotas: Mapping[str, int]
    """By project, how many slots it may have at once (`core.jobs.shares`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobsForgotten:
    """There are more jobs than are kept (`retention`): of these, those that have ended leave nothing."""

    job_ids: tuple[JobId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlinePassed:
    """The time of `next_deadline_s()` has come."""


WorkEvent = (
    BatchesTrained
    | ReserveRecalled
    | RoundEntered
    | ResultReceived
    | HeaderTold
    | RoundFailed
    | RankReady
    | GroupFormed
    | GenerationAbandoned
    | LinksProbed
    | LeaveAsked
    | EvaluationDone
    | CheckpointSaved
    | CheckpointFailed
    | EpochMetricsTaken
    | FinalStateSaved
    | BestKept
    | LoopProgressed
    | LoopEpochEnded
    | LoopLeft
    | SessionOpened
)
"""What ranks report of their work."""
JobEvent = WorkEvent | UserEventRecorded | RankFailed | SessionLost | RankStarted | StacksTold | PingSent | PingAnswered
"""What ranks and their agents report of a job, but for the end of a process, which frees its slots."""
AnyRankEvent = JobEvent | RankExited
Event = (
    AnyRankEvent
    | AgentJoined
    | AgentLost
    | JobSubmitted
    | LoopAttached
    | JobCancelled
    | JobBroken
    | CheckpointRequested
    | PauseRequested
    | ScaleRequested
    | SlotsAsked
    | DrainRequested
    | QuotasSet
    | JobsForgotten
    | DeadlinePassed
)

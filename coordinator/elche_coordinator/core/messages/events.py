"""Events: the input of `Coordinator.handle`. The most frequent ones come first here."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from elche.settings import AgreedSettings
from elche_coordinator.core.messages.ids import AgentId, GenerationId, Incarnation, JobId, Rank, RoundId, Version
from elche_coordinator.core.messages.spec import Build, EpochWork, HeaderRow, JobSpec, SampleRead, Slot, TensorSum


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEvent:
    """An event of one incarnation of a rank."""

    job_id: JobId
    rank: Rank
    incarnation: Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauges:
    """Measurements of a rank's device and loop at one moment, for people; None or 0: unknown."""

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
    """Batches trained."""
    num_processed: int
    """Samples trained, in the order of its leases."""
    batch_ms: tuple[float, ...] = ()
    """Times in ms of the newest batches, including the waits for their data, oldest first."""
    loss_sum: float = 0.0
    """Sum of `loss_count` losses since the last report."""
    loss_count: int = 0
    data_wait_ms: float = 0.0
    """Time in ms in which the rank has waited for data since its session began."""
    gauges: Gauges | None = None
    waited_ms: float = 0.0
    """Time in ms since the session began in which steps of a user-owned loop have waited instead of computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReserveRecalled(RankEvent):
    """The rank has given back its reserve."""

    num_samples: int
    """Position up to which it keeps its leases, in samples since its incarnation began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundEntered(RankEvent):
    """The rank has entered a round: it has taken its snapshot."""

    generation: GenerationId
    round: RoundId


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultReceived(RankEvent):
    """The rank has received the round's result, with the whole header or its digest."""

    generation: GenerationId
    round: RoundId
    header: tuple[HeaderRow, ...]
    """The rows; empty if the digest was sent instead."""
    collective_ms: float
    """Time from entry to result."""
    stalled_ms: float = 0.0
    """Time for which the round kept the rank from training."""
    sent_bytes: int = 0
    """Payload that the rank has sent for the round."""
    divergence: float | None = None
    """L2 distance of its values from the result, relative to the result's norm; None if not measured."""
    digest: int | None = None
    """Digest of the result; None after rounds for which none is due."""
    newer_batches: int = 0
    """Batches that the rank had made after its snapshot when it applied the result."""
    callback_errors: int = 0
    """Number of errors of the job's callbacks on the rank."""
    work: tuple[EpochWork, ...] = ()
    header_digest: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeaderReported(RankEvent):
    """The header's rows of a round. A rank that has sent only their digest sends them when its generation is abandoned,
    since the member that sends the rows may be lost.
    """

    generation: GenerationId
    round: RoundId
    header: tuple[HeaderRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundFailed(RankEvent):
    """The rank will not receive the round's result: its collective failed or was aborted."""

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
    """Descriptions of the model's tensors; empty if there are too many."""
    batch_size: int | None = None
    """Samples in this rank's batches; None: the job's batch size."""
    resumed: str = ""
    """The training's state in the checkpoint that the rank has loaded, as JSON; empty without one."""
    links_address: str = ""
    """HOST:PORT at which others can test if they reach it."""
    samples: tuple[SampleRead, ...] = ()
    """Some samples of its data set, to be compared with those of other ranks, which may have read fewer."""
    are_samples_random: bool = False
    """True if samples come out different each time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFormed(RankEvent):
    """The rank is connected to the generation's process group."""

    generation: GenerationId


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationAbandoned(RankEvent):
    """The rank has abandoned the generation. It has reported the outcome of its rounds before this."""

    generation: GenerationId
    reason: str = ""
    """The reason, if it was not ordered: its group could not be formed, or a collective failed."""
    keeps_headers: bool = False
    """As in the `SendAbandon` that it answers: an answer that is repeated is not taken for that to a second one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PingSent(RankEvent):
    """A ping was sent to the rank. Its time to answer begins now: the command may have waited until earlier changes
    were durable.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class PingAnswered(RankEvent):
    """The rank has answered a ping."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveRequested(RankEvent):
    """The rank's process must end, and asks to have its work committed first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStopped(RankEvent):
    """The rank's process was told to stop while no coordinator answered, and has ended (protocol P19.7)."""

    round: RoundId
    """The round whose result it has left as a draft of a checkpoint; 0: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinksProbed(RankEvent):
    """The rank has tested its links to the others."""

    ranks: tuple[Rank, ...]
    """The ranks that it can reach."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationDone(RankEvent):
    """The outcome of an ordered evaluation, or of the rank's part of it."""

    epoch: int
    sums: dict[str, tuple[float, int]]
    """Name to (sum, count)."""
    duration_ms: float
    tensors: dict[str, TensorSum] = field(default_factory=dict)
    """Tensors to sum over all parts, by name."""
    is_made: bool = False
    """True if these are metrics made of the summed tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved(RankEvent):
    """An ordered checkpoint is complete."""

    version: Version
    path: str
    size_bytes: int
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFailed(RankEvent):
    """An ordered checkpoint cannot be written; earlier ones are unchanged."""

    version: Version
    reason: str
    is_late: bool = False
    """True if the order came too late, when the result was gone: another round must become a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochMetricsTaken(RankEvent):
    """The job's callback for a finished epoch has returned."""

    epoch: int
    callback_errors: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class UserEventRecorded(RankEvent):
    """User code has recorded an event."""

    text: str
    num_dropped: int = 0
    """Number of earlier events of the rank that were dropped by the rate limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalStateSaved(RankEvent):
    """The job's final state is on disk."""

    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BestKept(RankEvent):
    """The best model is stored beside the final state, or instead of it."""

    error: str = ""
    """The reason if it could not be stored; the final state is then unchanged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopProgressed(RankEvent):
    """The position of a user-owned loop; only rank 0 reports it."""

    num_steps: int
    epoch: int
    num_epochs: int
    """0: not known."""
    epoch_size: int
    """Samples of an epoch; 0: unknown."""
    epoch_done: int
    """Samples of the epoch that all ranks together have trained."""
    batch_size: int
    anchor: int
    averaging_ms: float
    """Time in ms of averaging since the loop began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopEpochEnded(RankEvent):
    """A rank of a loop has ended an epoch."""

    work: EpochWork
    duration_s: float
    num_done: int = 0
    """Samples of the epoch that all ranks have trained, including lost ones; 0: unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOpened(RankEvent):
    """The rank's stream began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopBegan(RankEvent):
    """A rank of a submitted loop has set up its trainer."""

    policy: str
    """Description of how its steps are split among ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopLeft(RankEvent):
    """A rank of a loop has ended regularly."""


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
    """The process has ended, as its agent reports; a negative code is the number of a signal."""

    agent_id: AgentId
    exit_code: int
    log_tail: str = ""
    group_position: int = 0
    """Position of a replica group's process that ended first; the agent has ended the others."""
    log_path: str = ""
    """Log of that process, if it is not the rank's main log."""
    was_stopped: bool = False
    """True if the process was stopped (SIGSTOP) when the agent tried to end it."""
    not_started: bool = False
    """True if it was never started, since its host can start none (`HostFitnessChanged`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StacksReported(RankEvent):
    """The agent reports the stacks of the threads of a rank's process."""

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
    """Id of its work folder, which another agent may have used before; empty: unknown."""
    jobs: tuple[JobId, ...] = ()
    """Jobs whose logs or model it can deliver."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLost:
    """A host is lost, with its processes."""

    agent_id: AgentId


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSubmitted:
    """A client submitted a job."""

    job_id: JobId
    spec: JobSpec
    submitted_at: float
    """Wall-clock time, seconds since 1970, for people only."""
    key: str = ""
    """Idempotency key: the client's name for this submission, with its owner (`Caller.own_key`). A repeated submission
    makes no second job. Empty: none.
    """
    past_attempts: int = 0
    """Attempts under earlier coordinators; if there were any, it resumes from `spec.resume`."""
    last_incarnation: Incarnation = Incarnation(0)  # noqa: RUF009
    """The highest incarnation used then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopAttached:
    """A user-owned loop, whose processes run already, attaches as a job."""

    job_id: JobId
    spec: JobSpec
    ranks: tuple[tuple[str, str], ...]
    """(host, device) of each rank."""
    policy: str
    """Description of how its steps are split among ranks."""
    submitted_at: float
    """Wall-clock time, seconds since 1970, for people only."""
    can_regroup: bool = False
    """True if its ranks go on without one that has died."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCancelled:
    """A client cancelled a job."""

    job_id: JobId


@dataclass(frozen=True, slots=True, kw_only=True)
class JobBroken:
    """A command, a record or the state of the job could not be processed: the job fails, others go on."""

    job_id: JobId
    reason: str
    may_go_back: bool = False
    """True if a new attempt, from its newest checkpoint, would be sound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRequested:
    """A client asked for a checkpoint."""

    job_id: JobId


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseRequested:
    """A client pauses a job, after its open round, or resumes it."""

    job_id: JobId
    is_paused: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleRequested:
    """A client changes a job's number of ranks."""

    job_id: JobId
    num_ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotsRequested:
    """Another job, with precedence, waits for slots of this one (`Coordinator.asked`)."""

    job_id: JobId
    num_ranks: int
    """Number of its ranks that should leave."""
    by: JobId
    """Which job waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRequested:
    """A client drains a host, whose ranks then leave, or makes it available again."""

    agent_id: AgentId
    is_drained: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFitnessChanged:
    """A host can start no ranks, as its agent reports, such as with a full disk; or it can again."""

    agent_id: AgentId
    problem: str
    """Why it can start none; empty: it can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotasSet:
    """The coordinator was started with these quotas. An event, so that a tape is replayed with the quotas of
    its time.
    """

    quotas: Mapping[str, int]
    """Most slots that each project may have at once (`core.jobs.shares`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobsForgotten:
    """More jobs are known than are kept (`retention`): the core drops those named here that have ended."""

    job_ids: tuple[JobId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlinePassed:
    """The time of `next_deadline_s()` has passed."""


WorkEvent = (
    BatchesTrained
    | ReserveRecalled
    | RoundEntered
    | ResultReceived
    | HeaderReported
    | RoundFailed
    | RankReady
    | GroupFormed
    | GenerationAbandoned
    | LinksProbed
    | LeaveRequested
    | RankStopped
    | EvaluationDone
    | CheckpointSaved
    | CheckpointFailed
    | EpochMetricsTaken
    | FinalStateSaved
    | BestKept
    | LoopProgressed
    | LoopEpochEnded
    | LoopBegan
    | LoopLeft
    | SessionOpened
)
"""Ranks' reports of their work."""
JobEvent = (
    WorkEvent | UserEventRecorded | RankFailed | SessionLost | RankStarted | StacksReported | PingSent | PingAnswered
)
"""Reports of ranks and their agents on a job, except the end of a process, which frees its slots."""
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
    | SlotsRequested
    | DrainRequested
    | HostFitnessChanged
    | QuotasSet
    | JobsForgotten
    | DeadlinePassed
)

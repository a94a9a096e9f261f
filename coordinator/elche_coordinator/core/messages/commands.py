"""Commands: the output of `Coordinator.handle`, to be carried out in order. The most frequent ones come first here."""

from dataclasses import dataclass

from elche_coordinator.core.messages.ids import (
    AgentId,
    Attempt,
    GenerationId,
    Incarnation,
    JobId,
    Rank,
    RoundId,
    Version,
)
from elche_coordinator.core.messages.reports import EpochReport, Report
from elche_coordinator.core.messages.spec import JobSpec, Lease, Peer, TensorSum


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCommand:
    """A command to one incarnation of a rank."""

    job_id: JobId
    rank: Rank
    incarnation: Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class SendSyncNow(RankCommand):
    """Enter a round after a local step. Sent again, it moves the target of a rank that has not entered the round."""

    round: RoundId
    generation: GenerationId
    after_step: int
    count: int = 1
    """Consecutive rounds that this grants: the first after `after_step`, each later one a batch after the one
    before.
    """
    stop_after: bool = False
    """No batch may be made beyond the last granted round."""
    checkpoint_round: RoundId | None = None
    """The granted round for which the rank keeps what a checkpoint needs."""
    newer_batches: int | None = None
    """Apply the result exactly this many batches after the snapshot, as recorded; None: when it arrives."""
    every: int = 1
    """Batches between the rounds that `count_away` grants, and from the last announced one to the first of them."""
    count_away: int = 0
    """Rounds after these that are entered while the coordinator is away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendLease(RankCommand):
    """Train this slice of the epoch's permutation."""

    lease: Lease
    is_reserve: bool = False
    """True if the rank must not begin it before `SendPermit`, except while the coordinator is away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendPermit(RankCommand):
    """Permit training the rank's leases up to this position, in samples since its incarnation began."""

    num_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SendRecall(RankCommand):
    """Give back the part of the reserve that was not begun; the answer is `ReserveRecalled`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendThrottle(RankCommand):
    """Train no batch beyond this local step. A later command with a higher step raises the limit."""

    limit_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluate:
    """Part of an evaluation."""

    epoch: int
    offset: int = 0
    size: int = 0
    """Samples; 0: the rank calls the job's `evaluate`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendMakeMetrics(RankCommand):
    """Make metrics of an evaluation's summed tensors; the answer is an `EvaluationDone`."""

    epoch: int
    tensors: dict[str, TensorSum]
    """Sums over all parts, by name."""
    names: tuple[str, ...]
    """Names of metrics that the evaluation has already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteCheckpoint:
    """Write the state that the rank has captured of the round as a checkpoint."""

    name: str
    training: str
    """The training's state at this version, as JSON."""
    keep: tuple[str, ...]
    """Names of the checkpoints to keep once this one is complete; others are removed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendOutcome(RankCommand):
    """The round is committed."""

    round: RoundId
    version: Version
    global_step: int
    evaluate: Evaluate | None = None
    checkpoint: WriteCheckpoint | None = None
    save_final: bool = False
    """True if the rank writes the result as the job's final state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendEpochMetrics(RankCommand):
    """A finished epoch, for the job's callback."""

    report: EpochReport
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class SendFormGroup(RankCommand):
    """Build the generation's process group."""

    attempt: Attempt
    generation: GenerationId
    position: int
    world_size: int
    backend: str
    sends_digest: bool = False
    """True if it sends the digest of a round's header instead of the rows, which another member sends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendAbandon(RankCommand):
    """Enter no more rounds of the generation, abort its collective, and answer `GenerationAbandoned`."""

    generation: GenerationId
    keeps_headers: bool = False
    """True if it need not send the rows of headers whose digest alone it had sent (`HeaderReported`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendPing(RankCommand):
    """Answer `PingAnswered` at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendProbe(RankCommand):
    """Test if these ranks can be reached, and answer `LinksProbed`."""

    peers: tuple[Peer, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SendSaveCheckpoint(RankCommand):
    """Have a user-owned loop make a checkpoint after one of its next steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendPauseLoop(RankCommand):
    """Have a user-owned loop stop after one of its next steps, or go on."""

    is_paused: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SendKeepBest(RankCommand):
    """Store the best model beside the final state that the rank has written."""

    checkpoint: str
    """Its checkpoint; empty: the final state is the best."""
    restores: bool
    """True if it replaces the final state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendShutdown(RankCommand):
    """Exit: the job's outcome is decided, or the rank is not needed any more."""

    reason: str
    failed: bool = False
    """True when the job has failed."""
    outcome: str = ""
    """The job's outcome if it is decided: an `Outcome`, or `ENDED_EARLY`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRank(RankCommand):
    """Tell the agent to start a process in one of its slots."""

    agent_id: AgentId
    slot: int
    spec: JobSpec
    more_slots: tuple[int, ...] = ()
    """Slots of a replica group's other processes, by position from 1."""
    warms_up: bool = False
    """True if the rank trains a batch without effect before it is ready, since others train already."""
    loop_slots: tuple[int, ...] = ()
    """The slots of all ranks of a submitted loop, by rank; empty for other jobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRank(RankCommand):
    """Tell the agent to end a process: ask, then kill after the grace time."""

    agent_id: AgentId
    grace_s: float
    waits_while_stopped: bool = False
    """True if a process that was stopped (SIGSTOP) is not killed until it continues."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskStacks(RankCommand):
    """Ask the agent for the stacks of a process's threads."""

    agent_id: AgentId


@dataclass(frozen=True, slots=True, kw_only=True)
class Publish:
    """Send a report to the job's watchers."""

    job_id: JobId
    report: Report


SessionCommand = (
    SendSyncNow
    | SendLease
    | SendPermit
    | SendRecall
    | SendThrottle
    | SendOutcome
    | SendEpochMetrics
    | SendFormGroup
    | SendAbandon
    | SendPing
    | SendProbe
    | SendSaveCheckpoint
    | SendPauseLoop
    | SendKeepBest
    | SendMakeMetrics
    | SendShutdown
)
"""Commands that are sent to a rank in its session."""
AgentCommand = StartRank | StopRank | AskStacks
"""Commands that are sent to the agent of a rank."""
Command = SessionCommand | AgentCommand | Publish

"""Acts: the commands of a replica group's leader to the group's other processes, sent as JSON.

The leader sends an act before it does the same with its own replica; the others do it in `follower`.
"""

import json
from dataclasses import asdict, dataclass
from typing import Any, get_args

from elche_worker.collectives.header import Row
from elche_worker.data.lease_loader import LeasedPart


@dataclass(frozen=True, slots=True)
class TakeLease:
    """Fetch a slice of an epoch's permutation, after those before it."""

    lease: LeasedPart


@dataclass(frozen=True, slots=True)
class JoinGeneration:
    """Begin to connect to the processes at the same position in the other replica groups."""

    attempt: int
    generation: int
    position: int
    """The group's position among the groups of the generation, from 0; the same in all of its processes."""
    world_size: int
    backend: str


@dataclass(frozen=True, slots=True)
class FinishBuild:
    """Wait until this process is connected in a generation, or not, and exchange the outcome in the group."""

    generation: int


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """Train this process's part of the next batch."""

    samples: int
    """Samples that the job has trained so far, for the learning rate."""
    factor: float
    """Factor of the learning rate that the job's callbacks have set."""


@dataclass(frozen=True, slots=True)
class EnterRound:
    """Enter a round with this row of its header."""

    row: Row
    may_be_checkpoint: bool = False
    """True if the round's result may become a checkpoint that this group writes."""
    keeps_result: bool = False
    """True if the result must be kept beside newer batches, because it may be evaluated, or left as a draft: set while
    the coordinator is away, which could not announce either.
    """


@dataclass(frozen=True, slots=True)
class EndRound:
    """Abort the round's collective, which waits for a lost rank."""


@dataclass(frozen=True, slots=True)
class ApplyResult:
    """Put the round's result into the model."""


@dataclass(frozen=True, slots=True)
class ResolveCheckpoint:
    """The round is committed: write the checkpoint captured of it, or discard it."""

    round: int
    version: int
    is_written: bool


@dataclass(frozen=True, slots=True)
class UseResult:
    """Evaluate, show or save the round's result before training goes on."""

    round: int
    version: int
    evaluates: bool
    epoch: int
    """The epoch that is evaluated, from 0."""
    offset: int
    """First sample of this rank's part of the evaluation's data set."""
    size: int
    """Samples of that part; 0: the rank evaluates alone, by the job's `evaluate`."""
    calls_back: bool
    """Call the job's `checkpoint_fn` with it, then write the checkpoint."""
    saves_final: bool


Act = (
    TrainBatch
    | TakeLease
    | EnterRound
    | EndRound
    | ApplyResult
    | ResolveCheckpoint
    | UseResult
    | JoinGeneration
    | FinishBuild
)
KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(Act)}


def encode(act: Act) -> bytes:
    """Encodes the act's kind and fields as JSON."""
    return json.dumps([type(act).__name__, asdict(act)]).encode()


def decode(raw: bytes) -> Act:
    """Decodes an act of `encode`."""
    kind, values = json.loads(raw)
    match kind:
        case "TakeLease":
            return TakeLease(LeasedPart(**values["lease"]))
        case "EnterRound":
            return EnterRound(**values | {"row": Row(**values["row"])})
    act: Act = KINDS[kind](**values)
    return act

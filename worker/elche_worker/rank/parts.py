"""Parts from which a replica is built, and its report of a round."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from elche.extent import Extent
from elche_worker.collectives.reduction import AverageResult
from elche_worker.data.lease_loader import LeaseLoader
from elche_worker.data.sample_figures import Looked
from elche_worker.model.checkpoint import Loaded
from elche_worker.model.layout import Layout
from elche_worker.model.own_state import OwnState
from elche_worker.model.step import Built
from elche_worker.rank.replica_group import ReplicaGroup
from elche_worker.telemetry.meter import RoundWork
from elche_worker.telemetry.timeline import SpanRecorder

if TYPE_CHECKING:
    from elche_worker.rank.pieces import Pieces


@dataclass(frozen=True, slots=True)
class EnteredRound:
    """The round that was entered last, and this process's contribution."""

    round: int
    local_step: int
    """Batches that its snapshot contains."""
    cut: int
    """Samples that its snapshot contains, since the incarnation began."""
    work: RoundWork
    state: dict[str, Any] | None = None
    """State captured with the snapshot for a checkpoint of the result; None if the result will not become one."""


@dataclass(frozen=True, slots=True)
class ResultExtent:
    """The training that the result in the flat buffers contains."""

    local_step: int
    """Batches of this rank."""
    cut: int
    """Samples of this rank since its incarnation began."""
    samples: int
    """Samples of all ranks since the job began, including those before its checkpoint."""


@dataclass(frozen=True, slots=True)
class AppliedResult:
    """A round's result after it was brought into the model."""

    averaged: AverageResult
    digest: int | None
    """Digest of the values that must be equal on all ranks; None after rounds for which none is due."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts with which a rank trains, built from the user's file."""

    built: Built
    layout: Layout
    dataset: Any
    loader: LeaseLoader
    extent: Extent
    group: ReplicaGroup
    pieces: "Pieces | None" = None
    """Writes checkpoints of a model that is sharded over the group's processes."""
    batch_size: int
    """Samples in this rank's batches."""
    backs_off: bool = False
    """True if batches are split into more parts when memory runs out."""
    looked: Looked = field(default_factory=Looked)
    """Facts that reading samples of the data set has shown."""
    eval_dataset: Any = None
    own_state: OwnState = field(default_factory=OwnState)
    loaded: Loaded | None = None
    """The checkpoint to resume from."""
    no_checkpoint: str = ""
    """Why there is none, if the job resumes from one."""
    timeline: SpanRecorder | None = None
    """Records spans of the rank's work."""

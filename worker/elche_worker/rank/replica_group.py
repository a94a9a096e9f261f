"""A replica group: the processes that share one model and together are one rank.

All differences between a rank of one process and one of several are between `ReplicaGroup` and its subclass
`DistributedGroup` (in `distributed_group`).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from elche_worker.collectives.reduction import AverageResult
from elche_worker.data.lease_loader import LoadedBatch
from elche_worker.model.layout import Layout
from elche_worker.rank.acts import Act
from elche_worker.telemetry.meter import RoundWork
from elche_worker.user.schedule import LearningRates

if TYPE_CHECKING:
    from elche_worker.rank.pieces import Pieces

T = TypeVar("T")
MEMBER_SEED = 7919
"""Distance between the random seeds of two processes of a group."""


class ReplicaGroup:
    """The processes of one rank; this one, of a rank of one process. All methods but `send` and `abandon` are
    collective: every process calls them in the same order.
    """

    position = 0
    """This process's position. 0 is the leader, which has the session with the coordinator."""
    size = 1

    @property
    def is_leader(self) -> bool:
        """True if this process is at position 0."""
        return self.position == 0

    def send(self, act: Act) -> None:
        """On the leader: sends the others an act that it is about to carry out itself."""

    def abandon(self, generation: int) -> None:
        """On the leader: has the others abort the generation's round at once. Called on the session's thread, because
        the loops of all processes may be blocked until the round ends.
        """

    def exchange(self, value: Any) -> list[Any]:
        """Every process's value (what JSON can hold), in order of position."""
        return [value]

    def agree(self, holds: bool) -> bool:
        """True if `holds` is true in every process. Called on the thread that averages, beside other calls."""
        return holds

    def train(self, run: Callable[..., T], data: Any, batch: LoadedBatch) -> T:
        """Runs a method of `TrainStep` with this process's part of a batch; returns what it returns."""
        return run(data, batch.size)

    def share_learning_rates(self, rates: LearningRates) -> None:
        """Copies the learning rates that the leader's callbacks have set to the other processes."""

    def share_buffers(self, layout: Layout) -> None:
        """Makes the buffers equal on all processes."""

    def combine(
        self, averaged: AverageResult, digest: int | None, work: RoundWork, norm: float | None
    ) -> tuple[AverageResult, int | None]:
        """Combines distance, bytes and digest over the group's processes, and adds all losses to the leader's `work`.
        `norm`: the parameter norm of this process's part.
        """
        return averaged, digest

    def parameter_norm(self, own: float | None) -> float | None:
        """The parameter norm of the whole model. `own`: the present norm of this process's part."""
        return own

    def new_pieces(self) -> "Pieces | None":
        """The writer of checkpoints of a sharded model; None for a model that one process holds."""
        return None

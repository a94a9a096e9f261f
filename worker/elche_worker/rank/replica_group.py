"""A replica group: the processes that share one model and together are one rank.

All differences between a rank of one process and one of several are behind `ReplicaGroup`: `SingleProcess` implements
the former, `DistributedGroup` (in `distributed_group`) the latter.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

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


class ReplicaGroup(Protocol):
    """The processes of one rank. All methods but `send` and `abandon` are collective: every process calls them in the
    same order.
    """

    position: int
    """This process's position. 0 is the leader, which has the session with the coordinator."""
    size: int

    @property
    def is_leader(self) -> bool:
        """True if this process is at position 0."""
        ...

    def send(self, act: Act) -> None:
        """On the leader: sends the others an act that it is about to carry out itself."""
        ...

    def abandon(self, generation: int) -> None:
        """On the leader: has the others abort the generation's round at once. Called on the session's thread, because
        the loops of all processes may be blocked until the round ends.
        """
        ...

    def exchange(self, value: Any) -> list[Any]:
        """Every process's value (what JSON can hold), in order of position."""
        ...

    def agree(self, holds: bool) -> bool:
        """True if `holds` is true in every process. Called on the thread that averages, concurrently with
        other calls.
        """
        ...

    def train(self, run: Callable[..., T], data: Any, batch: LoadedBatch) -> T:
        """Runs a method of `TrainStep` with this process's part of a batch; returns what it returns."""
        ...

    def share_learning_rates(self, rates: LearningRates) -> None:
        """Copies the learning rates that the leader's callbacks have set to the other processes."""
        ...

    def share_buffers(self, layout: Layout) -> None:
        """Makes the buffers equal on all processes."""
        ...

    def combine(
        self, averaged: AverageResult, digest: int | None, work: RoundWork, norm: float | None
    ) -> tuple[AverageResult, int | None]:
        """Combines distance, bytes and digest over the group's processes, and adds all losses to the leader's `work`.
        `norm`: the parameter norm of this process's part.
        """
        ...

    def parameter_norm(self, own: float | None) -> float | None:
        """The parameter norm of the whole model. `own`: the present norm of this process's part."""
        ...

    def new_pieces(self) -> "Pieces | None":
        """The writer of checkpoints of a sharded model; None for a model that one process holds."""
        ...


class SingleProcess:
    """A rank of one process."""

    position, size, is_leader = 0, 1, True

    def send(self, act: Act) -> None:
        return

    def abandon(self, generation: int) -> None:
        return

    def exchange(self, value: Any) -> list[Any]:
        return [value]

    def agree(self, holds: bool) -> bool:
        return holds

    def train(self, run: Callable[..., T], data: Any, batch: LoadedBatch) -> T:
        return run(data, batch.size)

    def share_learning_rates(self, rates: LearningRates) -> None:
        return

    def share_buffers(self, layout: Layout) -> None:
        return

    def combine(
        self, averaged: AverageResult, digest: int | None, work: RoundWork, norm: float | None
    ) -> tuple[AverageResult, int | None]:
        return averaged, digest

    def parameter_norm(self, own: float | None) -> float | None:
        return own

    def new_pieces(self) -> "Pieces | None":
        return None

"""Checkpoints of synthetic ranks, and their reports of work."""

from dataclasses import dataclass

from elche_coordinator.core.messages.spec import EpochWork, Lease
from elche_coordinator.simulator.collective import Parameters

JOB_FOLDER = "simulated"
FOLDER = f"{JOB_FOLDER}/checkpoints"


@dataclass(frozen=True, slots=True)
class Saved:
    """A complete checkpoint."""

    name: str
    parameters: Parameters
    training: str


def work_of(pieces: list[Lease]) -> tuple[EpochWork, ...]:
    """The reports on these slices, epoch by epoch; the loss of a batch is its epoch."""
    epochs = sorted({piece.epoch for piece in pieces})
    sizes = {epoch: [piece.size for piece in pieces if piece.epoch == epoch] for epoch in epochs}
    return tuple(
        EpochWork(epoch=epoch, num_batches=len(sizes[epoch]), num_samples=sum(sizes[epoch]), loss_sum=float(epoch))
        for epoch in epochs
    )

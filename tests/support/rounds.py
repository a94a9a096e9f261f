"""Rounds of a simulated job, in every way to make them."""

import pytest

from elche.policies import POLICIES
from elche_coordinator.core.messages.events import ResultReceived
from elche_coordinator.core.messages.ids import Rank
from support.watched import WatchedSimulation

BATCH_SIZE = 10
LONG_ROUNDS = [name for name, traits in POLICIES.items() if traits.may_overlap]
"""Policies whose rounds are of several batches."""
WAYS = [
    (name, averaging)
    for name in POLICIES
    for averaging in ("blocking", "overlapped")[: 2 if name in LONG_ROUNDS else 1]
]
BROKEN = frozenset({1, 3, 4, 7})
"""What the coordinator's own averaging may give up: also the first round, and two in a row."""

OFTEN = {"dataset_size": 900, "anchor": 2, "max_anchor": 3}
"""Short rounds, so that there are many."""

every_way = pytest.mark.parametrize(("policy", "averaging"), WAYS, ids=["-".join(way) for way in WAYS])


def numbered(*values: float) -> dict[Rank, float]:
    """The values by rank, from 0."""
    return {Rank(rank): value for rank, value in enumerate(values)}


def headers(simulation: WatchedSimulation) -> dict[int, list]:
    """Of every committed round."""
    return {event.round: list(event.header) for event in simulation.events(ResultReceived)}


def until_round_is_open(simulation: WatchedSimulation, num_committed: int) -> None:
    """Lets time pass until so many rounds are committed and a rank has entered the next one, and not all have."""

    def is_entered() -> bool:
        training = simulation.job.run.training
        if training is None or training.version < num_committed or not simulation.generation.rounds:
            return False
        return 0 < len(simulation.generation.rounds[0].entered) < len(simulation.ranks)

    simulation.run_until(is_entered)


def is_result_of(event: object, rank: int) -> bool:
    return isinstance(event, ResultReceived) and event.rank == rank


def books(simulation: WatchedSimulation) -> object:
    """What only a commit may change."""
    job = simulation.job
    if job.run.training is None:
        return None
    ledger = job.run.training.ledger
    parts = {epoch: list(book.committed) for epoch, book in ledger.open_books().items() if book.committed.size}
    cuts = {rank: ledger.bounds(rank)[0] for rank in job.ranks}
    bases = {rank: (record.base_step, record.compute_ms) for rank, record in job.ranks.items()}
    return job.run.training.version, job.run.training.global_step, ledger.epoch, parts, cuts, bases

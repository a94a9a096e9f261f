"""Every rule can break: a healthy state is corrupted in one way, and the check says which rule it was."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace

import pytest

from elche.settings import AgreedSettings
from elche_coordinator.core.invariants import Broken, check_invariants
from elche_coordinator.core.messages.events import ResultReceived
from elche_coordinator.core.messages.ids import AgentId, Epoch, GenerationId, JobId, LeaseId, Rank
from elche_coordinator.core.messages.reports import JobResult, Outcome
from elche_coordinator.core.messages.spec import Lease
from elche_coordinator.core.records.fleet import Place
from elche_coordinator.core.records.machine import JobPhase, RankPhase
from elche_coordinator.core.work.intervals import IntervalSet
from elche_coordinator.simulator.collective import Parameters
from support.watched import LONG_ROUNDS, WatchedSimulation, ranks


@pytest.fixture
def healthy() -> WatchedSimulation:
    """Two ranks in the middle of an epoch."""
    settings = AgreedSettings(dataset_size=2_000, batch_size=10, epochs=2, policy="cadence", **LONG_ROUNDS)
    simulation = WatchedSimulation(settings=settings, ranks=ranks(5, 11.5))
    simulation.run_until(lambda: len(simulation.rounds) >= 4)
    until_s = simulation.clock.now_s + 0.06
    simulation.run_until(lambda: simulation.clock.now_s >= until_s)
    check_invariants(simulation.core)
    return simulation


def book(simulation):
    return simulation.training.ledger.book(Epoch(0))


def leases_of(simulation, rank=0):
    return simulation.training.ledger.rank_leases[Rank(rank)]


def open_round(simulation):
    return simulation.generation.rounds[0]


def received_by(simulation, *members: int) -> None:
    opened = open_round(simulation)
    for rank in members:
        opened.results[Rank(rank)] = simulation.events(ResultReceived)[-1]


def free_twice(simulation):
    book(simulation).free.add(0, 10)


def lost_sample(simulation):
    book(simulation).free.take(1)


def lost_tail(simulation):
    start, end = list(book(simulation).free)[-1]
    book(simulation).free = IntervalSet([(start, end - 10)])


def leased_twice(simulation):
    start, _ = next(iter(book(simulation).free))
    leases_of(simulation).add(Lease(id=LeaseId(999), epoch=Epoch(0), offset=start, size=10))


def processed_beyond_leases(simulation):
    leases_of(simulation).processed = leases_of(simulation).end + 1


def committed_beyond_processed(simulation):
    leases_of(simulation).processed = leases_of(simulation).committed - 1


def work_of_a_closed_epoch(simulation):
    ledger = simulation.training.ledger
    ledger.grant(Rank(0), Epoch(0), 2_000)
    ledger._books.pop(Epoch(0))
    ledger.epoch = Epoch(1)


def rounds_out_of_order(simulation):
    rounds = simulation.generation.rounds
    rounds.append(deepcopy(rounds[0]))


def two_rounds_at_once(simulation):
    rounds = simulation.generation.rounds
    rounds.append(deepcopy(rounds[0]))
    rounds[1].id += 1


def round_of_an_old_generation(simulation):
    open_round(simulation).generation = GenerationId(0)


def round_with_other_members(simulation):
    open_round(simulation).targets[Rank(9)] = 0


def received_and_not_entered(simulation):
    open_round(simulation).entered.clear()
    received_by(simulation, 0)


def received_by_all_and_open(simulation):
    open_round(simulation).entered = {Rank(0): None, Rank(1): None}
    received_by(simulation, 0, 1)


def target_beyond_leases(simulation):
    open_round(simulation).targets[Rank(0)] += 1_000


def ended_with_a_rank_alive(simulation):
    simulation.job.life.phase = JobPhase.ENDED


def result_before_the_end(simulation):
    simulation.job.result = JobResult(outcome=Outcome.SUCCEEDED)


def all_gone(simulation):
    simulation.core.fleet.taken.clear()
    for record in simulation.job.ranks.values():
        record.life.phase = RankPhase.EXITED


def ended_without_a_result(simulation):
    all_gone(simulation)
    simulation.job.life.phase = JobPhase.ENDED


def stops_with_nobody_left(simulation):
    all_gone(simulation)
    simulation.job.life.phase = JobPhase.STOPPING


def trains_after_its_end(simulation):
    simulation.training.saver = Rank(0)


def no_open_round(simulation):
    simulation.generation.rounds.clear()
    for rank, record in simulation.job.ranks.items():
        record.local_step = record.base_step + simulation.training.ledger.uncommitted_batches(rank)[1]


def slot_of_nobody(simulation):
    simulation.core.fleet.taken[Place(agent_id=AgentId("host"), slot=7)] = (JobId("job"), Rank(7))


def slot_not_taken(simulation):
    simulation.core.fleet.give_back(Place(agent_id=AgentId("host"), slot=1))


def slot_of_an_exited_rank(simulation):
    simulation.job.ranks[Rank(1)].life.phase = RankPhase.EXITED


CORRUPTIONS: list[tuple[Callable[[WatchedSimulation], None], str]] = [
    (free_twice, "position 0 is in two places or in none"),
    (lost_sample, "in two places or in none"),
    (lost_tail, r"positions from 1990 of 2000 are in no place"),
    (leased_twice, "in two places or in none"),
    (processed_beyond_leases, "rank 0: committed .* <= processed .* <= leased"),
    (committed_beyond_processed, "rank 0: committed .* <= processed .* <= leased"),
    (work_of_a_closed_epoch, "rank 0 has work of a closed epoch"),
    (rounds_out_of_order, "are not in order"),
    (two_rounds_at_once, "are open together"),
    (round_of_an_old_generation, "is of an old generation"),
    (round_with_other_members, "has other members"),
    (received_and_not_entered, "is received but not entered"),
    (received_by_all_and_open, "is received by all and open"),
    (target_beyond_leases, "rank 0's target .* > leased"),
    (ended_with_a_rank_alive, "has ended with a rank alive"),
    (result_before_the_end, "result?"),
    (ended_without_a_result, "result?"),
    (stops_with_nobody_left, "stops with nobody left"),
    (trains_after_its_end, "trains on though its last round is committed"),
    (no_open_round, "trains without an open round: it cannot progress"),
    (slot_of_nobody, "are not those of living ranks"),
    (slot_not_taken, "are not those of living ranks"),
    (slot_of_an_exited_rank, "are not those of living ranks"),
]


@pytest.mark.parametrize(("corrupt", "message"), CORRUPTIONS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_broken_rule_is_seen(healthy, corrupt, message):
    corrupt(healthy)
    with pytest.raises(Broken, match=message):
        check_invariants(healthy.core)


def test_a_synthetic_model_refuses_a_sample_that_it_has():
    piece = Lease(id=LeaseId(1), epoch=Epoch(0), offset=0, size=10)
    with pytest.raises(ValueError, match="overlaps"):
        Parameters().with_pieces([piece, replace(piece, offset=9)])

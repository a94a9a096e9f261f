"""The coordinator ends at any moment and starts again: it goes on where it was, and ranks train on (protocol P22)."""

from dataclasses import replace
from itertools import pairwise

import pytest

from elche_coordinator.core.messages.commands import SendRecall, SendSyncNow
from elche_coordinator.core.messages.events import PauseRequested, ReserveRecalled, RoundEntered
from elche_coordinator.core.messages.reports import Outcome
from elche_coordinator.simulator.simulation import JOB, RankModel
from support.disasters import crashes, deaths
from support.stories import UNEQUAL, in_mid_training
from support.watched import AT_RANDOM, WatchedSimulation, ranks

by_policy = pytest.mark.parametrize(
    ("policy", "averaging"),
    [("cadence", "blocking"), ("cadence", "overlapped"), ("async", "blocking"), ("sync", "blocking")],
)


def succeeds(simulation: WatchedSimulation) -> None:
    """The job comes to its end."""
    assert simulation.run().outcome is Outcome.SUCCEEDED


by_ride_out = pytest.mark.parametrize("ride_out_s", [0.0, 10.0])


@by_ride_out
@by_policy
@pytest.mark.parametrize("seed", range(1))
def test_crashes_at_random(simulate, policy, averaging, seed, ride_out_s):
    simulation = simulate(
        ranks(25.0, 30.0, 57.5), policy=policy, averaging=averaging, seed=seed, crashes=True, dataset_size=6000,
        epochs=2, checkpoint_every_epochs=1, has_evaluation=True, wants_metrics=True, ride_out_s=ride_out_s,
    )  # fmt: skip
    simulation.start()
    crashes(simulation, seed, every_s=0.5)
    succeeds(simulation)
    assert {record.incarnation for record in simulation.job.ranks.values()} == {1, 2, 3}


@by_ride_out
@by_policy
@pytest.mark.parametrize("seed", range(1))
def test_crashes_and_deaths_at_random(simulate, policy, averaging, seed, ride_out_s):
    simulation = simulate(
        ranks(25.0, 30.0, 57.5, 40.0), policy=policy, averaging=averaging, build_ms=15.0, sync_ms=10.0, seed=seed,
        crashes=True, dataset_size=6000, epochs=2, checkpoint_every_epochs=1, has_evaluation=True, eval_size=40,
        ride_out_s=ride_out_s, **AT_RANDOM,
    )  # fmt: skip
    simulation.start()
    deaths(simulation, seed, every_s=0.7)
    crashes(simulation, seed + 100, every_s=1.0)
    succeeds(simulation)


@pytest.mark.parametrize("averaging", ["blocking", "overlapped"])
@pytest.mark.parametrize("policy", ["cadence", "async", "sync"])
def test_outage_five_rounds(simulate, policy, averaging):
    """Ranks make the rounds that were granted, on work in reserve; all commit in order when the coordinator is back."""
    simulation = simulate(
        ranks(*UNEQUAL), policy=policy, averaging=averaging, ride_out_s=10.0, crashes=True, max_anchor=10,
        divergence_threshold=0.0, dataset_size=8_000 if policy == "sync" else 14_000,
    )  # fmt: skip
    in_mid_training(simulation, 60 if policy == "sync" else 8)
    samples, began_s = simulation.training.ledger.total_committed(), simulation.clock.now_s
    rate = samples / began_s
    simulation.crash(8.0)
    simulation.run_until(lambda: simulation.clock.now_s > began_s + 8.5)
    made = simulation.training.ledger.total_committed() - samples
    is_apart = (policy, averaging) == ("sync", "overlapped")  # alone nobody makes two batches between rounds
    assert made > (0.6 if is_apart else 0.9) * 7.5 * rate, "they trained on"
    entered = [event.round for event in simulation.events(RoundEntered) if event.rank == 0]
    assert entered == list(range(1, len(entered) + 1))
    succeeds(simulation)


def test_beyond_the_grant_ranks_wait_and_nothing_is_lost(simulate):
    simulation = simulate(ranks(*UNEQUAL), dataset_size=14_000, ride_out_s=2.0, crashes=True)
    in_mid_training(simulation, 8)
    simulation.crash(20.0)
    began_s, step = simulation.clock.now_s, simulation.processes[0].local_step
    simulation.run_until(lambda: simulation.clock.now_s > began_s + 19.0)
    assert 2.0 < (simulation.processes[0].local_step - step) * 0.025 < 5.0
    succeeds(simulation)


def test_a_reserve_is_given_back_before_the_epoch_ends(simulate):
    """No rank keeps work to itself that others could do: an epoch takes no longer than without a reserve."""
    times_s = []
    for ride_out_s in (0.0, 10.0):
        simulation = simulate(ranks(*UNEQUAL, jitter=0.02), dataset_size=20_000, epochs=2, ride_out_s=ride_out_s)
        succeeds(simulation)
        times_s.append(simulation.clock.now_s)
    assert simulation.sent(SendRecall)
    assert times_s[1] < 1.005 * times_s[0]


@pytest.mark.parametrize("slower_ms", [80.0, 300.0])
def test_ranks_have_grants_also_while_their_speed_changes(simulate, slower_ms):
    """What a slower rank has too much in reserve is wanted back, and rounds are granted anew at once."""
    slowing = replace(ranks(50.0)[0], changes=((20.0, slower_ms),))
    simulation = simulate([*ranks(25.0), slowing], dataset_size=60_000, ride_out_s=10.0, latency_ms=1.0)
    simulation.run_until(lambda: simulation.clock.now_s > 60.0)
    assert bool(simulation.sent(SendRecall)) is (slower_ms > 100), "twice as much as is wanted does no harm"
    for rank in (0, 1):
        told = [(at_s, command.count_away > 0) for at_s, command in simulation.sent_at(SendSyncNow, rank=rank)]
        without_s = [after - at_s for (at_s, is_granted), (after, _) in pairwise(told) if not is_granted and at_s > 10]
        assert sum(without_s) < 0.1, "the coordinator might end then"


def test_outage_and_death(simulate):
    """A rank dies while the coordinator is away: nobody regroups before it is back; what the others have commits."""
    simulation = simulate(ranks(25.0, 30.0, 57.5), dataset_size=18_000, ride_out_s=10.0, crashes=True, build_ms=15.0)
    in_mid_training(simulation, 8)
    simulation.crash(6.0)
    generation = simulation.generation.id
    simulation.clock.after(2.0, lambda: simulation.kill(2))
    began_s = simulation.clock.now_s
    simulation.run_until(lambda: simulation.clock.now_s > began_s + 5.9)
    assert simulation.generation.id == generation
    succeeds(simulation)
    assert simulation.generation.id > generation


def test_a_pause_during_an_outage_holds_when_it_is_over(simulate):
    simulation = simulate(ranks(*UNEQUAL), dataset_size=18_000, ride_out_s=10.0, crashes=True)
    in_mid_training(simulation, 8)
    simulation.handle(PauseRequested(job_id=JOB, is_paused=True))
    simulation.crash(3.0)
    with pytest.raises(TimeoutError, match="nothing more happens"):
        simulation.run_until(lambda: False)
    assert simulation.clock.now_s < 20.0
    simulation.handle(PauseRequested(job_id=JOB, is_paused=False))
    succeeds(simulation)


@pytest.mark.parametrize("seed", range(4))
def test_a_session_breaks_as_another_generation_takes_over(simulate, seed):
    """None takes over before the rank has said which of the granted rounds it has made; it is not left out."""
    simulation = simulate(
        ranks(25.0, 30.0, 57.5),
        dataset_size=16_000,
        ride_out_s=10.0,
        latency_ms=20.0,
        build_ms=50.0,
        start_ms=500.0,
        seed=seed,
    )
    in_mid_training(simulation, 8)
    simulation.kill(0)
    simulation.run_until(lambda: simulation.generation.is_closing and bool(simulation.generation.rounds[0].results))
    before, rank = simulation.generation.id, next(iter(simulation.generation.rounds[0].results))
    simulation.cut_off(rank, 1.5)
    simulation.run_until(lambda: simulation.generation.id > before)
    succeeds(simulation)
    assert simulation.job.roster.num_lost == 1, "the rank was not left out"


def test_a_reserve_that_is_wanted_back_was_begun_meanwhile(simulate):
    """The rank keeps what it has begun while its session was broken, and gives back the rest."""
    slower = [RankModel(batch_ms=25.0, changes=((8.0, 75.0),)), RankModel(batch_ms=57.5)]
    simulation = simulate(slower, dataset_size=12_000, ride_out_s=10.0, latency_ms=20.0)
    in_mid_training(simulation, 8)
    simulation.run_until(lambda: bool(simulation.sent(SendRecall)))
    (command, *_) = simulation.sent(SendRecall)
    position = simulation.training.ledger.rank_leases[command.rank].permitted
    simulation.cut_off(command.rank, 0.5)
    succeeds(simulation)
    kept = next(event for event in simulation.events(ReserveRecalled) if event.rank == command.rank)
    assert kept.num_samples > position

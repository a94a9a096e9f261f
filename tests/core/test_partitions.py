"""Ranks that cannot reach each other: the most that can go on without the rest, and those come back."""

import re

import pytest
from core.test_lost_ranks import POLICIES, by_policy, succeeds
from core.test_scaling import joins, submit

from elche_coordinator.core.jobs.links import _apart
from elche_coordinator.core.jobs.membership import MAX_ABANDONED
from elche_coordinator.core.messages.commands import SendFormGroup, SendProbe, StartRank, StopRank
from elche_coordinator.core.messages.events import AgentLost, GenerationAbandoned
from elche_coordinator.core.messages.ids import AgentId, GenerationId, Rank
from elche_coordinator.core.messages.reports import MembershipReport
from support.disasters import deaths
from support.stories import in_mid_training
from support.watched import AT_RANDOM, WatchedSimulation, ranks

FOUR = (25.0, 30.0, 57.5, 40.0)


def left_out(simulation: WatchedSimulation) -> list[str]:
    texts = [report.text for report in simulation.reports if isinstance(report, MembershipReport)]
    return [text for text in texts if "is left out" in text]


@pytest.mark.parametrize(("policy", "averaging"), [("cadence", "overlapped"), ("sync", "blocking")])
@pytest.mark.parametrize(
    ("pairs", "apart"),
    [([(1, 3)], [3]), ([(0, 1), (0, 2), (0, 3)], [0]), ([(0, 2), (0, 3), (1, 2), (1, 3)], [3, 2])],
    ids=["two of four", "one from all", "two from two"],
)
def test_the_largest_part_that_is_connected_goes_on(simulate, policy, averaging, pairs, apart):
    simulation = simulate(ranks(*FOUR), policy=policy, averaging=averaging, dataset_size=12_000, build_ms=10.0)
    in_mid_training(simulation)
    simulation.part(*pairs)
    simulation.run_until(lambda: simulation.sent(SendProbe), limit_s=5_000)
    asked_s = simulation.clock.now_s
    simulation.run_until(lambda: len(simulation.sent(StopRank)) == len(apart), limit_s=5_000)
    assert [command.rank for command in simulation.sent(StopRank)] == apart
    simulation.run_until(lambda: simulation.generation.id == 2, limit_s=5_000)
    assert simulation.clock.now_s - asked_s < 4.0
    simulation.run_until(lambda: len(simulation.training.members) < 4, limit_s=5_000)
    simulation.clock.after(12.0, simulation.part)
    succeeds(simulation)


def test_it_says_who_cannot_reach_whom(simulate):
    simulation = simulate(ranks(*FOUR), dataset_size=20_000)
    in_mid_training(simulation)
    simulation.part((1, 3))
    simulation.run_until(lambda: left_out(simulation), limit_s=100.0)
    (said,) = left_out(simulation)
    assert said == (
        "rank 3 on host (cpu) is left out: it and rank 1 on host cannot reach each other, and others wait for it"
    )


def test_packets_that_are_lost_in_one_direction_only(simulate):
    """No connection comes about either way, but the one who is asked first may have had one just before."""
    simulation = simulate(ranks(*FOUR), dataset_size=20_000)
    in_mid_training(simulation)
    simulation.part((1, 3))
    simulation.collective.mistaken.add(1)
    simulation.run_until(lambda: left_out(simulation), limit_s=5_000)
    assert left_out(simulation)[0].startswith("rank 3 ")


def test_a_link_that_is_well_again_in_time_costs_nothing_but_time(simulate):
    simulation = simulate(ranks(*FOUR), dataset_size=20_000)
    in_mid_training(simulation)
    simulation.part((1, 3))
    simulation.run_until(lambda: simulation.sent(SendProbe), limit_s=5_000)
    simulation.part()
    succeeds(simulation)
    assert left_out(simulation) == []


def test_who_could_not_reach_another_is_not_left_out_of_an_averaging_that_has_ended(simulate):
    simulation = simulate(ranks(*FOUR), dataset_size=20_000)
    in_mid_training(simulation)
    simulation.part((1, 3))
    simulation.run_until(lambda: simulation.sent(SendProbe), limit_s=5_000)
    asked_s = simulation.clock.now_s
    simulation.run_until(lambda: simulation.clock.now_s > asked_s + 0.5, limit_s=5_000)
    simulation.part()
    succeeds(simulation)
    assert left_out(simulation) == []


def test_an_averaging_that_takes_its_time_leaves_nobody_out(simulate):
    simulation = simulate(ranks(*FOUR), dataset_size=4000, sync_ms=30_000.0)
    succeeds(simulation)
    assert left_out(simulation) == []
    assert len(simulation.sent(SendProbe)) < 40 * len(simulation.rounds)


@by_policy
@pytest.mark.parametrize("seed", range(2))
def test_deaths_and_broken_links_at_random(simulate, policy, averaging, seed):
    simulation = simulate(
        ranks(*FOUR), policy=policy, averaging=averaging, dataset_size=8000, seed=seed, build_ms=15.0, **AT_RANDOM
    )
    in_mid_training(simulation)
    deaths(simulation, seed, every_s=3.0)
    for at_s in (1.0, 9.0, 70.0):
        pair = (seed % 3, 3)
        simulation.clock.after(at_s, lambda pair=pair: simulation.part(pair))
        simulation.clock.after(at_s + 4.0 + seed, simulation.part)
    succeeds(simulation)


@pytest.mark.parametrize("parted_s", [20.0, 50.0])
def test_ranks_that_cannot_meet_after_going_back(simulate, parted_s):
    """A job that has trained does not fail of a network that is broken for a while."""
    simulation = simulate(ranks(25.0, 30.0), dataset_size=8000)
    in_mid_training(simulation)
    simulation.part((0, 1))
    for rank in (0, 1):
        simulation.kill(rank)
    simulation.clock.after(parted_s, simulation.part)
    result = simulation.run(limit_s=simulation.clock.now_s + 3_000)
    assert result.outcome == "succeeded", result.error
    simulation.assert_exactly_once()


def test_ranks_that_have_trained_together_and_cannot_meet_any_more_go_back(simulate):
    """A third one has died, so that they form a new group, which five times does not stand."""
    simulation = simulate(ranks(25.0, 30.0, 40.0), dataset_size=8000, num_hosts=3)
    in_mid_training(simulation)
    simulation.part((0, 1), (0, 2), (1, 2))
    simulation.kill(2)
    simulation.run_until(lambda: simulation.job.attempt == 2, limit_s=1_000)
    simulation.part()
    result = simulation.run(limit_s=simulation.clock.now_s + 3_000)
    assert result.outcome == "succeeded", result.error
    simulation.assert_exactly_once()


@pytest.mark.parametrize("options", [{}, {"backend": "gloo", "num_hosts": 2}])
def test_ranks_that_have_never_met_fail_the_job(simulate, options):
    """On several hosts where the job says how they average; else they would do so through the coordinator."""
    simulation = simulate(ranks(25.0, 30.0), dataset_size=8000, **options)
    simulation.part((0, 1))
    error = simulation.run(limit_s=1_000).error
    assert re.fullmatch(r"the ranks could not meet \(rank 1: it and rank 0 on \S+ cannot reach each other\)", error)
    assert len(simulation.sent(SendFormGroup)) == 2


def test_ranks_that_reach_each_other_and_cannot_meet_try_again_and_not_for_ever(simulate):
    simulation = simulate(ranks(25.0, 30.0), dataset_size=8000)
    simulation.collective.mistaken = {0, 1}
    simulation.part((0, 1))
    assert simulation.run(limit_s=1_000).error == "the ranks could not meet"
    assert len(simulation.sent(SendFormGroup)) == 2 * MAX_ABANDONED


@pytest.mark.parametrize("known_s", [0.0, 0.1, 3.0])
@pytest.mark.parametrize("backend", ["auto", "gloo"])
def test_a_rank_that_dies_as_the_first_group_is_built_is_replaced(simulate, backend, known_s):
    """The other one may find the group broken before its worker has told of the death."""
    simulation = simulate(ranks(25.0, 30.0), dataset_size=8000, backend=backend, build_ms=50)
    simulation.collective.death_seen_s = 0.01
    simulation.run_until(lambda: simulation.sent(SendFormGroup))
    died = simulation.processes[Rank(1)]

    def die() -> None:
        died.is_alive = False
        simulation.clock.after(known_s, lambda: died.exit(-9))

    simulation.clock.after(0.02, die)
    succeeds(simulation)
    assert [command.rank for command in simulation.sent(StartRank)] == [0, 1, 1]


def test_ranks_whose_first_group_fails_once_are_asked_again(simulate):
    """Such as by a restart of the coordinator with the keys by which they were meeting: it failed the job."""
    simulation = simulate(ranks(25.0, 30.0), build_ms=200.0)
    simulation.run_until(lambda: len(simulation.sent(SendFormGroup)) == 2)
    address = simulation.job.ranks[1].address
    simulation.handle(GenerationAbandoned(**address, generation=GenerationId(1), reason="the store was lost"))
    succeeds(simulation)
    assert simulation.generation.id == 2


@pytest.mark.parametrize("policy", ["cadence", "sync"])
def test_ranks_of_two_hosts_that_have_never_met_average_through_the_coordinator(simulate, policy):
    """One is behind a NAT, say. It is found before the group's own time is over."""
    simulation = simulate(ranks(25.0, 30.0, 40.0), dataset_size=8000, policy=policy, num_hosts=2)
    simulation.part((0, 1), (1, 2))
    simulation.run_until(lambda: simulation.job.run.generation is not None, limit_s=5_000)
    assert simulation.clock.now_s < 10.0
    backend = simulation.generation.backend
    assert (backend.backend, "cannot reach each other" in backend.reason) == ("cpu", True)
    succeeds(simulation)


def with_late_host(simulation: WatchedSimulation, num_ranks: int) -> None:
    """A job trains on one host with two slots; then another one comes with as many more as the job wants."""
    submit(simulation, num_ranks=num_ranks, min_ranks=1, num_slots=2)
    in_mid_training(simulation)
    joins(simulation, "late", num_ranks - 2)


@pytest.mark.parametrize(
    ("policy", "averaging", "unreached_s"),
    [(*POLICIES[0], 0.01), (*POLICIES[1], 30.0), (*POLICIES[2], 30.0), (*POLICIES[3], 0.01)],
)
def test_a_host_that_comes_later_and_reaches_nobody_averages_through_the_coordinator(
    simulate, policy, averaging, unreached_s
):
    """The first ranks were on one host: nobody could know. They train on meanwhile, and nobody is lost."""
    simulation = simulate(ranks(25.0, 30.0, 40.0), policy=policy, averaging=averaging, dataset_size=20_000)
    simulation.part((0, 2), (1, 2))
    simulation.collective.unreached_s = unreached_s
    with_late_host(simulation, 3)
    late_s, rounds = simulation.clock.now_s, len(simulation.rounds)
    simulation.run_until(lambda: len(simulation.generation.members) == 3, limit_s=100.0)
    assert simulation.clock.now_s - late_s < 15.0
    assert simulation.generation.backend.backend == "cpu"
    assert len(simulation.rounds) > rounds + 5, "the others have gone on"
    assert left_out(simulation) == []
    simulation.kill(2)
    simulation.handle(AgentLost(agent_id=AgentId("late")))
    simulation.run_until(lambda: len(simulation.generation.members) == 2, limit_s=5_000)
    assert simulation.generation.backend.backend == "gloo", "on one host they need no coordinator"
    joins(simulation, "later", 1)
    succeeds(simulation)
    assert simulation.generation.backend.backend == "cpu"


def test_a_host_that_comes_later_and_fails_to_meet_once_is_tried_again(simulate):
    """Its process was killed as the group was built, say: that says nothing of the way to it."""
    simulation = simulate(ranks(25.0, 30.0, 40.0), dataset_size=80_000)
    simulation.part((0, 2), (1, 2))
    simulation.collective.unreached_s = 0.01
    with_late_host(simulation, 3)
    simulation.run_until(lambda: simulation.sent(SendProbe), limit_s=5_000)
    simulation.part()
    succeeds(simulation)
    assert simulation.generation.backend.backend == "gloo"
    assert len(simulation.generation.members) == 3
    assert [command.rank for command in simulation.sent(StartRank)] == [0, 1, 2, 2], "it was started again"


def test_hosts_that_have_met_do_not_average_through_the_coordinator_later(simulate):
    """The way between them is broken: it may come back, and is as quick as before then."""
    simulation = simulate(ranks(25.0, 30.0), dataset_size=80_000, num_hosts=2)
    in_mid_training(simulation)
    simulation.part((0, 1))
    simulation.run_until(lambda: left_out(simulation), limit_s=5_000)
    simulation.clock.after(40.0, simulation.part)
    succeeds(simulation)
    assert simulation.generation.backend.backend == "gloo"
    assert len(simulation.generation.members) == 2


def test_of_as_well_connected_ones_the_lowest_go_on():
    everybody = {rank: {other for other in range(6) if other != rank} for rank in range(6)}
    assert _apart(everybody) == []
    assert _apart({0: {1}, 1: {0}, 2: {3}, 3: {2}}) == [3, 2]
    assert _apart({0: set(), 1: set()}) == [1]
    assert _apart({0: {1, 3}, 1: {0, 2}, 2: {1, 3}, 3: {0, 2}}) == [3, 2], "with 3 a link of 0 and of 2 is gone"

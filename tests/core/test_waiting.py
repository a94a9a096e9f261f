"""Below its least number of ranks a job waits, says for how many, and goes on when they are there."""

import pytest
from core.test_lost_ranks import by_policy, succeeds
from core.test_pausing import pass_time
from core.test_scaling import FOUR, joins, num_training, scale, submit

from elche.views import JobState
from elche_coordinator.core.describe import describe_training
from elche_coordinator.core.messages.events import AgentLost, DrainRequested, PauseRequested
from elche_coordinator.core.messages.ids import AgentId
from elche_coordinator.core.messages.reports import MembershipReport
from elche_coordinator.core.records.machine import JobPhase
from elche_coordinator.simulator.simulation import JOB
from support.disasters import deaths
from support.stories import in_mid_training
from support.watched import AT_RANDOM, WatchedSimulation, ranks

LONG_S = 500.0


def two_hosts(simulation: WatchedSimulation) -> None:
    """Two ranks on each; the job trains with three or more."""
    joins(simulation, "b", 2)
    submit(simulation, num_ranks=4, min_ranks=3, num_slots=2)
    in_mid_training(simulation)


def loses(simulation: WatchedSimulation, host: str) -> None:
    places = {record.rank for record in simulation.job.ranks.values() if record.host == host}
    for rank in places:
        simulation.processes[rank].is_alive = False
    simulation.handle(AgentLost(agent_id=AgentId(host)))


def stands(simulation: WatchedSimulation) -> None:
    """Nothing is trained for a long time."""
    pass_time(simulation, 5.0)
    before = [process.local_step for process in simulation.processes.values()]
    pass_time(simulation, LONG_S)
    assert [process.local_step for process in simulation.processes.values()] == before
    assert simulation.generation.rounds == []


def said(simulation: WatchedSimulation) -> list[str]:
    return [report.text for report in simulation.reports if isinstance(report, MembershipReport)]


@by_policy
def test_a_host_is_lost_and_too_few_are_left(simulate, policy, averaging):
    simulation = simulate(ranks(*FOUR), policy=policy, averaging=averaging, dataset_size=20_000, build_ms=10.0)
    two_hosts(simulation)
    loses(simulation, "b")
    stands(simulation)
    view = describe_training(simulation.job, 0.0)
    assert (view.state, view.reason) == (
        JobState.WAITING,
        "waits for 1 more rank: it has 2, and trains with 3 or more",
    )
    assert "the job waits for 1 more rank: it has 2, and trains with 3 or more" in said(simulation)
    joins(simulation, "c", 1)
    simulation.run_until(lambda: num_training(simulation) == 3)
    assert describe_training(simulation.job, 0.0).state == JobState.TRAINING
    assert said(simulation)[-1] == "the job has 3 ranks and goes on"
    succeeds(simulation)


def test_who_asks_for_a_pause_too_has_both_end(simulate):
    simulation = simulate(ranks(*FOUR), dataset_size=20_000)
    two_hosts(simulation)
    loses(simulation, "b")
    simulation.handle(PauseRequested(job_id=JOB, is_paused=True))
    assert describe_training(simulation.job, 0.0).state == JobState.PAUSED
    joins(simulation, "c", 2)
    stands(simulation)
    simulation.handle(PauseRequested(job_id=JOB, is_paused=False))
    succeeds(simulation)


def test_a_smaller_number_lets_it_go_on(simulate):
    simulation = simulate(ranks(*FOUR), dataset_size=20_000)
    two_hosts(simulation)
    loses(simulation, "b")
    stands(simulation)
    scale(simulation, 2)
    succeeds(simulation)


def test_all_that_are_left_are_to_leave(simulate):
    """It takes a round to make the checkpoint to which the job goes back."""
    simulation = simulate(ranks(*FOUR), dataset_size=20_000)
    two_hosts(simulation)
    loses(simulation, "b")
    stands(simulation)
    simulation.handle(DrainRequested(agent_id=AgentId("host"), is_drained=True))
    simulation.run_until(lambda: simulation.job.phase is JobPhase.QUEUED)
    joins(simulation, "c", 3)
    simulation.run_until(lambda: simulation.job.phase is JobPhase.TRAINING)
    assert simulation.job.attempt == 2
    succeeds_anew(simulation)


def succeeds_anew(simulation: WatchedSimulation) -> None:
    result = simulation.run(limit_s=simulation.clock.now_s + 3_000)
    assert result.outcome == "succeeded", result.error
    simulation.assert_exactly_once()


@by_policy
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.long(reason="another seed")) for seed in (1, 2))]
)
def test_deaths_at_random_below_and_above(simulate, policy, averaging, seed):
    simulation = simulate(
        ranks(*FOUR), policy=policy, averaging=averaging, dataset_size=8000, seed=seed, build_ms=15.0, **AT_RANDOM
    )
    submit(simulation, num_ranks=4, min_ranks=3, num_slots=4)
    deaths(simulation, seed, every_s=0.8)
    succeeds_anew(simulation)

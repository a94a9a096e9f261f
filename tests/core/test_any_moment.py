"""Whatever goes wrong, at whatever moment: the job ends, once, with a word about it, and leaves nothing behind."""

from random import Random

import pytest

from elche.policies import POLICIES
from elche_coordinator.core.life.job import STOP_GRACE_S
from elche_coordinator.core.messages.commands import SendShutdown
from elche_coordinator.core.messages.events import AgentLost, JobCancelled, RankFailed, SessionLost
from elche_coordinator.core.messages.ids import AgentId, JobId
from elche_coordinator.core.messages.reports import Outcome
from elche_coordinator.simulator.simulation import RankModel
from support.watched import WatchedSimulation

TROUBLES = ["killed", "cancelled", "raises", "session lost", "host lost"]
PATIENCE_S = STOP_GRACE_S + 1.0


def cause(trouble: str, simulation: WatchedSimulation, rank: int) -> None:
    """Makes it happen now."""
    process = simulation.processes[rank]
    if trouble == "killed":
        simulation.kill(rank)
    elif trouble == "cancelled":
        simulation.handle(JobCancelled(job_id=JobId("job")))
    elif trouble == "raises":
        simulation.handle(RankFailed(**process.address, error="it raised"))
    elif trouble == "session lost":
        simulation.handle(SessionLost(**process.address))
    else:
        for other in simulation.processes.values():
            other.is_alive = False
        simulation.handle(AgentLost(agent_id=AgentId("host")))


@pytest.mark.parametrize("trouble", TROUBLES)
@pytest.mark.parametrize("seed", range(12))
def test_a_job_in_trouble_ends(simulate, trouble, seed):
    random = Random(seed)
    models = [
        RankModel(batch_ms=random.choice([1, 5, 25, 200]), jitter_fraction=0.2) for _ in range(random.randint(1, 4))
    ]
    simulation = simulate(
        models,
        dataset_size=random.randint(1, 1_500),
        epochs=random.randint(1, 3),
        policy=random.choice(list(POLICIES)),
        averaging=random.choice(["blocking", "overlapped"]),
        has_evaluation=random.random() < 0.5,
        latency_ms=random.choice([0.1, 5.0, 60.0]),
        send_twice=random.random() < 0.3,
        seed=seed,
        on_rank_loss="fail",
    )
    simulation.run_until(lambda: len(simulation.processes) == len(models))
    at_event = simulation.num_events + int(random.random() ** 2 * 400)
    simulation.run_until(lambda: simulation.job.result is not None or simulation.num_events >= at_event)
    if simulation.job.result is not None:
        return
    at_s = simulation.clock.now_s
    has_outcome = not simulation.job.life.accepts("outcome decided")
    cause(trouble, simulation, random.randrange(len(models)))
    result = simulation.run(limit_s=at_s + PATIENCE_S + 1.0)
    assert has_outcome or result.outcome is (Outcome.CANCELLED if trouble == "cancelled" else Outcome.FAILED)
    assert result.outcome is Outcome.SUCCEEDED or result.error
    left = simulation.sent(SendShutdown)
    assert len({command.rank for command in left}) == len(left), "each is told once"
    assert {command.outcome for command in left} <= {result.outcome}, "for their audit files"


@pytest.mark.parametrize("seed", range(25))
def test_any_job_ends_with_every_sample_once(simulate, seed):
    random = Random(1_000 + seed)
    models = [
        RankModel(
            batch_ms=random.choice([0.3, 1, 5, 25, 57.5, 200]),
            jitter_fraction=random.choice([0.0, 0.1, 0.5]),
            changes=((random.uniform(0, 3), random.choice([1, 25, 200])),) if random.random() < 0.4 else (),
        )
        for _ in range(random.randint(1, 6))
    ]
    simulation = simulate(
        models,
        dataset_size=random.choice([1, random.randint(1, 60), random.randint(1, 1_000)]),
        batch_size=random.choice([1, 3, 10]),
        epochs=random.choice([1, 2, 6]),
        policy=random.choice(["cadence", *POLICIES]),
        averaging=random.choice(["blocking", "overlapped"]),
        anchor=random.choice([1, 5, 10, 50]),
        max_anchor=random.choice([1, 10, 200]),
        speed_hint=random.choice([None, (0, 2.3)]),
        has_evaluation=random.random() < 0.5,
        latency_ms=random.choice([0.01, 0.5, 80]),
        persist_ms=random.choice([0, 1, 30]),
        sync_ms=random.choice([0.0, 5.0, 100.0]),
        evaluation_ms=random.choice([0.0, 20.0, 3_000.0]),
        send_twice=random.random() < 0.3,
        seed=seed,
    )
    assert simulation.run().outcome is Outcome.SUCCEEDED

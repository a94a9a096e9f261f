"""The coordinator ends at any moment and starts again: it goes on where it was, and ranks train on (protocol P22)."""

from random import Random

import pytest
from core.test_lost_ranks import chaos, succeeds

from support.watched import WatchedSimulation, ranks

by_policy = pytest.mark.parametrize(
    ("policy", "averaging"),
    [("cadence", "blocking"), ("cadence", "overlapped"), ("async", "blocking"), ("sync", "blocking")],
)


def crashes(simulation: WatchedSimulation, seed: int, *, every_s: float) -> None:
    """Ends the coordinator now and then, for up to a second."""
    random = Random(seed)

    def strike() -> None:
        if simulation.job.result is None:
            simulation.crash(random.uniform(0, 1.0), snapshot_age=random.choice([1, 3, 50, 10_000]))
            simulation.clock.after(1.0 + random.expovariate(1 / every_s), strike)

    simulation.clock.after(random.expovariate(1 / every_s), strike)


@by_policy
@pytest.mark.parametrize("seed", range(5))
def test_crashes_at_random(simulate, policy, averaging, seed):
    simulation = simulate(
        ranks(25.0, 30.0, 57.5), policy=policy, averaging=averaging, seed=seed, crashes=True, dataset_size=3000,
        epochs=2, checkpoint_every_epochs=1, has_evaluation=True, wants_metrics=True,
    )  # fmt: skip
    simulation.start()
    crashes(simulation, seed, every_s=0.5)
    succeeds(simulation)
    assert {record.incarnation for record in simulation.job.ranks.values()} == {1, 2, 3}


@by_policy
@pytest.mark.parametrize("seed", range(5))
def test_crashes_and_deaths_at_random(simulate, policy, averaging, seed):
    simulation = simulate(
        ranks(25.0, 30.0, 57.5, 40.0), policy=policy, averaging=averaging, build_ms=15.0, sync_ms=10.0, seed=seed,
        crashes=True, dataset_size=3000, epochs=2, checkpoint_every_epochs=1, has_evaluation=True, eval_size=40,
    )  # fmt: skip
    chaos(simulation, seed, every_s=0.7)
    crashes(simulation, seed + 100, every_s=1.0)
    succeeds(simulation)

"""What is counted of a job only grows, whatever dies and is made again."""

from dataclasses import fields

import pytest

from elche_coordinator.core.messages.reports import Outcome
from elche_coordinator.core.results.counts import Counts
from support.disasters import deaths
from support.stories import UNEQUAL, in_mid_training
from support.watched import WatchedSimulation, ranks


def never_falls(simulation: WatchedSimulation) -> None:
    """Runs it to its end; after each event each count is as high as before, at least."""
    before = Counts()

    def is_over() -> bool:
        nonlocal before
        if "job" in simulation.core.jobs:
            now = simulation.job.counts
            fallen = [one.name for one in fields(Counts) if getattr(now, one.name) < getattr(before, one.name)]
            assert not fallen, (before, now)
            assert now.made_samples >= now.samples
            before = now
        return simulation.job.result is not None

    simulation.run_until(is_over)
    assert simulation.job.result.outcome is Outcome.SUCCEEDED


@pytest.mark.parametrize("policy", ["cadence", "async", "sync"])
def test_counts_never_fall_while_ranks_die(simulate, policy):
    simulation = simulate(ranks(25.0, 30.0, 57.5), policy=policy, dataset_size=6000, build_ms=15.0, sync_ms=10.0)
    deaths(simulation, 1, every_s=0.7)
    never_falls(simulation)
    counts = simulation.job.counts
    assert counts.samples >= 6000
    assert counts.made_samples > counts.samples, "what died with a rank was trained, too"


def test_what_is_made_again_after_going_back_counts_again(simulate):
    simulation = simulate(ranks(*UNEQUAL), dataset_size=6000)
    in_mid_training(simulation)
    before = simulation.job.counts
    assert before.samples > 0
    for rank in range(2):
        simulation.kill(rank)
    never_falls(simulation)
    assert simulation.job.attempt == 2
    assert simulation.job.counts.samples == 6000 + before.samples
    assert simulation.job.counts.rounds > before.rounds


def test_what_a_checkpoint_has_does_not_count(simulate):
    """A coordinator that knows nothing of the attempt before begins at 0, and not with all that was made then."""
    before = simulate(ranks(*UNEQUAL), dataset_size=6000, epochs=2, checkpoint_every_epochs=1)
    before.run_until(lambda: before.job.run.has_saved)
    resumed = before.saved[before.training.checkpoints.kept[-1].version]
    simulation = simulate(ranks(*UNEQUAL), dataset_size=6000, epochs=2, resumed=resumed)
    never_falls(simulation)
    assert 0 < simulation.job.counts.samples <= 6000
    assert simulation.job.counts.rounds < simulation.training.version

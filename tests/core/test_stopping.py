"""What a coordinator that is to stop has saved first: one of another version goes on from checkpoints alone."""

from elche_coordinator.core.messages.events import CheckpointFailed, CheckpointRequested, PauseRequested
from elche_coordinator.core.messages.reports import Outcome
from elche_coordinator.core.records.machine import JobPhase
from elche_coordinator.lifecycle.stopping import being_saved, unsaved
from elche_coordinator.simulator.simulation import JOB
from support.rounds import every_way
from support.stories import UNEQUAL, at_phase, in_mid_training
from support.watched import WatchedSimulation, ranks


def save(simulation: WatchedSimulation) -> None:
    """What the shell does when it is told to stop."""
    assert unsaved(simulation.core) == [JOB]
    simulation.handle(CheckpointRequested(job_id=JOB))
    assert being_saved(simulation.core) == [JOB]


@every_way
def test_nothing_that_was_committed_is_lost_with_a_coordinator_that_was_told_to_stop(simulate, policy, averaging):
    simulation = simulate(ranks(*UNEQUAL), policy=policy, averaging=averaging, dataset_size=6000)
    in_mid_training(simulation)
    version = simulation.training.version
    save(simulation)
    simulation.run_until(lambda: not being_saved(simulation.core))
    (kept,) = simulation.training.checkpoints.kept
    assert simulation.saved[kept.version].name == kept.name
    assert version < kept.version <= simulation.training.version <= kept.version + (16 if policy == "sync" else 1)
    assert simulation.run().outcome is Outcome.SUCCEEDED


def test_what_is_saved_is_not_saved_again(simulate):
    simulation = simulate(ranks(*UNEQUAL), dataset_size=6000)
    assert unsaved(simulation.core) == []
    simulation.start()
    assert unsaved(simulation.core) == [], "it has trained nothing"
    in_mid_training(simulation)
    save(simulation)
    num_rounds = len(simulation.rounds)
    simulation.run_until(lambda: not simulation.training.checkpoints.is_idle)
    assert unsaved(simulation.core) == [], "it is being written"
    simulation.run_until(lambda: not being_saved(simulation.core))
    simulation.run_until(lambda: len(simulation.rounds) > num_rounds + 3)
    assert unsaved(simulation.core) == [JOB]


def test_a_job_that_writes_its_model_is_waited_for(simulate):
    simulation = simulate(ranks(*UNEQUAL), dataset_size=1000)
    at_phase(simulation, JobPhase.FINISHING)
    assert unsaved(simulation.core) == []
    assert being_saved(simulation.core) == [JOB]
    assert simulation.run().outcome is Outcome.SUCCEEDED
    assert being_saved(simulation.core) == []


def test_a_checkpoint_that_cannot_be_written_is_not_waited_for(simulate):
    simulation = simulate(ranks(*UNEQUAL), dataset_size=6000, checkpoint_ms=1e9)
    in_mid_training(simulation)
    save(simulation)
    simulation.run_until(lambda: not simulation.training.checkpoints.is_idle)
    ((version, (rank, _)),) = simulation.training.checkpoints._writing.items()
    assert being_saved(simulation.core) == [JOB]
    simulation.handle(CheckpointFailed(**simulation.processes[rank].address, version=version, reason="no space"))
    assert being_saved(simulation.core) == []


def test_a_job_that_would_fail_is_saved_too(simulate):
    """It can be resumed by hand."""
    simulation = simulate(ranks(*UNEQUAL), dataset_size=6000, on_rank_loss="fail")
    in_mid_training(simulation)
    save(simulation)
    assert simulation.run().outcome is Outcome.SUCCEEDED


def test_nobody_waits_for_a_job_that_is_paused(simulate):
    """It announces no round that could become a checkpoint."""
    simulation = simulate(ranks(*UNEQUAL), dataset_size=6000)
    in_mid_training(simulation)
    simulation.handle(PauseRequested(job_id=JOB, is_paused=True))
    simulation.run_until(lambda: not simulation.generation.rounds)
    assert unsaved(simulation.core) == []
    simulation.handle(CheckpointRequested(job_id=JOB))
    assert being_saved(simulation.core) == []
    simulation.handle(PauseRequested(job_id=JOB, is_paused=False))
    assert simulation.run().outcome is Outcome.SUCCEEDED

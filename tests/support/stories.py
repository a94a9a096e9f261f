"""Places in a simulated job's life from which tests go on."""

from elche_coordinator.core.messages.events import JobSubmitted
from elche_coordinator.core.messages.ids import JobId
from elche_coordinator.core.messages.spec import JobSpec
from elche_coordinator.core.records.machine import JobPhase
from support.watched import WatchedSimulation

UNEQUAL = (25.0, 57.5)


def at_phase(simulation: WatchedSimulation, phase: JobPhase) -> None:
    """Lets time pass until the job is there."""
    simulation.run_until(lambda: simulation.job.phase is phase)


def in_mid_training(simulation: WatchedSimulation, num_rounds: int = 4) -> None:
    """Lets time pass until some rounds are committed and every rank trains towards the next."""
    simulation.run_until(lambda: len(simulation.rounds) >= num_rounds)
    until_s = simulation.clock.now_s + 0.3
    simulation.run_until(lambda: simulation.clock.now_s >= until_s)
    assert simulation.job.phase is JobPhase.TRAINING


def submitted(name: str, num_ranks: int) -> JobSubmitted:
    spec = JobSpec(name=name, source_hash="", file_name="", num_ranks=num_ranks)
    return JobSubmitted(job_id=JobId(name), spec=spec, submitted_at=0.0)

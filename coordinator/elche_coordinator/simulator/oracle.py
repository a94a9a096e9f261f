"""Compares the work of a simulated job's ranks with an oracle that trains whenever it does not evaluate."""

from elche_coordinator.core.messages.reports import JobResult
from elche_coordinator.simulator.simulation import Simulation


def run_to_fraction(simulation: Simulation) -> tuple[JobResult, float]:
    """Runs the job to its end. Returns its result, and the ranks' work as a fraction of the oracle's: the time in which
    they trained, of the time from the first commit to the last without their evaluations. Both are sums
    over the ranks, weighted by speed.
    """
    began_s, ended_s = 0.0, 0.0
    evaluated_s: dict[int, float] = {}

    def is_over() -> bool:
        nonlocal began_s, ended_s, evaluated_s
        training = simulation.job.run.training
        if training is not None and training.started is not None:
            began_s = began_s or training.started.at_s
            if training.is_complete and not ended_s:
                ended_s = simulation.clock.now_s
                evaluated_s = {rank: one.evaluated_s for rank, one in simulation.processes.items()}
        return simulation.job.result is not None

    simulation.run_until(is_over)
    assert simulation.job.result is not None
    trained, possible = 0.0, 0.0
    for rank, process in simulation.processes.items():
        trained += process.trained_s / simulation.ranks[rank].batch_ms
        possible += (ended_s - began_s - evaluated_s[rank]) / simulation.ranks[rank].batch_ms
    return simulation.job.result, trained / possible

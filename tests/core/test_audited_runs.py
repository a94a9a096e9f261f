"""Random runs leave what `elche audit` needs, and it proves each: whatever befalls a job, nothing is refuted."""

from pathlib import Path
from random import Random

import pytest

import elche_audit
from elche_coordinator.core.messages.events import JobCancelled
from elche_coordinator.simulator.simulation import JOB
from support.audited import audited, write_records
from support.disasters import LIMIT_S, WITH_BURSTS, WITH_DISKS, WITH_HOSTS, WITH_NAPS, WITH_STARTS, random_run

LEFT_WITH_A_RESULT = [30_000_068, 30_000_131, 30_000_208, 30_000_466]
"""A rank has a result that the others have not, has entered the next round, and is left out."""
TRAINED_AGAIN_ALIKE = [30_000_218]
"""An attempt trains the same positions in the same generation as one before it, in rounds that were not committed."""
JOINED_A_RESUMED_RUN = [40_000_427]
"""The first file of the attempt is that of a rank that has loaded no checkpoint."""
SEEDS = [*LEFT_WITH_A_RESULT, *TRAINED_AGAIN_ALIKE, *JOINED_A_RESUMED_RUN]
SEEDS += [
    first + number for first in (WITH_HOSTS, WITH_STARTS, WITH_DISKS, WITH_BURSTS, WITH_NAPS) for number in range(5)
]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_run_is_proven(tmp_path: Path, seed: int) -> None:
    simulation = random_run(seed).simulation
    audited(simulation, tmp_path)
    result = simulation.run(limit_s=LIMIT_S)
    write_records(simulation, result, tmp_path)
    verdict = elche_audit.judge(tmp_path)
    assert elche_audit.exit_code(verdict) == 0, "\n".join(elche_audit.lines(verdict))
    assert tuple(verdict.epoch_samples[: len(result.committed_samples)]) == result.committed_samples


@pytest.mark.parametrize("seed", [30_000_007, 30_000_036, 30_000_440, 40_000_074, *range(30_000_040, 30_000_045)])
def test_a_random_run_that_is_cancelled_is_proven(tmp_path: Path, seed: int) -> None:
    """The first two have lost all ranks, and wait to begin again. The third has trained the same three times, and
    the fourth is cancelled when it was to end early.
    """
    simulation = random_run(seed).simulation
    audited(simulation, tmp_path)

    def cancel() -> None:
        if simulation.job.result is None:
            simulation.handle(JobCancelled(job_id=JOB))

    simulation.clock.at(Random(f"cancel {seed}").uniform(0.3, 20), cancel)
    write_records(simulation, simulation.run(limit_s=LIMIT_S), tmp_path)
    verdict = elche_audit.judge(tmp_path)
    assert elche_audit.exit_code(verdict) == 0, "\n".join(elche_audit.lines(verdict))
    for name in ("run.json", "cadence.binpb", "record.json"):
        (tmp_path / name).unlink()
    assert not elche_audit.judge(tmp_path).violations, "a submitted job leaves no records"


@pytest.mark.parametrize("seed", range(30_000_050, 30_000_055))
def test_a_random_run_of_which_all_is_lost_at_once_is_not_refuted(tmp_path: Path, seed: int) -> None:
    simulation = random_run(seed).simulation
    audited(simulation, tmp_path)
    lost_s = Random(f"cut {seed}").uniform(0.5, 20)
    simulation.run_until(lambda: simulation.clock.now_s > lost_s or simulation.job.result is not None, limit_s=LIMIT_S)
    assert not elche_audit.judge(tmp_path).violations

"""Loops whose ranks do not make the same calls, or set up several trainers in turn: nothing waits forever."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from elche_client.events import JobResult, JobState
from support import own_launchers
from support.real_processes import Cluster, Command, Mark

pytestmark = pytest.mark.slow(reason="every run starts PyTorch in two processes")

JOBS = Path(__file__).parent / "jobs"
PARTING = JOBS / "parting_loop.py"
FOLDS = JOBS / "folds.py"
WHAT_TO_DO = "every rank has to make the same calls"


def run_of(mark: Mark, folder: Path, script: Path, **env: str) -> tuple[int, str]:
    """The exit code and all that was said. Nobody but the ranks themselves ends them, unless they hang."""
    environment = mark.environment({"OMP_NUM_THREADS": "1", **env})
    done = subprocess.run(
        [sys.executable, own_launchers.__file__, "2", str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        cwd=folder,
        timeout=400,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("does", "is_given", "told"),
    [
        (
            "break",
            "1",
            "rank 0 calls step() after 3 steps and 4 batches (epoch 0), rank 1 begins epoch(1) after 3 steps",
        ),
        (
            "step",
            "1",
            "rank 0 calls step() after 3 steps and 4 batches (epoch 0), rank 1 calls step() after 3 steps and 3",
        ),
        ("mean", "0", "rank 0 calls step() after 3 steps (epoch 0), rank 1 calls mean() after 3 steps (epoch 0)"),
        ("break in a group of its own", "1", "rank 1 begins epoch(1) after 3 steps"),
    ],
)
def test_ranks_that_part_are_told_with_their_steps(
    mark: Mark, tmp_path: Path, does: str, is_given: str, told: str
) -> None:
    code, text = run_of(mark, tmp_path, PARTING, LOOP_DOES=does, LOOP_IS_GIVEN=is_given)
    assert code == 1, text
    assert text.count(told) >= 1, text
    assert WHAT_TO_DO in text


@pytest.mark.gate
@pytest.mark.parametrize(
    ("does", "is_given", "told"),
    [
        ("exit", "0", ("rank 0", "3 steps", "rank 1", "its loop")),
        ("one more epoch", "1", ("rank 0 ends epochs() after 8 ", "rank 1 begins epoch(2)")),
        ("break", "0", ("rank 0 calls step()", "rank 1 ends epochs() after 6 steps")),
    ],
)
def test_a_rank_that_ends_before_others_fails_the_job_by_name(
    mark: Mark, cluster: Cluster, tmp_path: Path, does: str, is_given: str, told: tuple[str, ...]
) -> None:
    before = {job.job_id for job in cluster.client.jobs()}
    env = {"ELCHE_COORDINATOR": cluster.coordinator.address, "LOOP_DOES": does, "LOOP_IS_GIVEN": is_given}
    _, text = run_of(mark, tmp_path, PARTING, **env)
    (job,) = (one for one in cluster.client.jobs() if one.job_id not in before)
    *_, result = cluster.client.job(job.job_id).watch()
    assert isinstance(result, JobResult)
    assert result.state is JobState.FAILED, text
    assert not [word for word in (*told, WHAT_TO_DO) if word not in result.error], result.error


def test_a_script_that_ends_with_models_that_have_parted_does_not_exit_with_0(mark: Mark, tmp_path: Path) -> None:
    """It has left its loop, whose end would have compared them."""
    code, text = run_of(mark, tmp_path, PARTING, LOOP_DOES="other model", LOOP_IS_GIVEN="1")
    assert code == 1, text
    assert "elche: the ranks' models differ: weight of rank 1 is not that of rank 0" in text
    assert "Traceback" not in text


@pytest.mark.parametrize("fails", ["-1", "1"])
def test_trainers_are_set_up_in_turn(mark: Mark, tmp_path: Path, fails: str) -> None:
    code, text = run_of(mark, tmp_path, FOLDS, LOOP_FAILS=fails)
    assert code == 0, text
    for fold in range(3):
        what = "this fold has failed" if str(fold) == fails else "8 steps"
        assert text.count(f"fold {fold}: {what}") == 2, text


def test_an_exception_that_one_rank_alone_has_caught_is_told_to_the_others(mark: Mark, tmp_path: Path) -> None:
    """They waited in their loop, and it in the next one's Trainer.setup."""
    code, text = run_of(mark, tmp_path, FOLDS, LOOP_FAILS="1", LOOP_FAILS_ON="1")
    assert code == 1, text
    assert "rank 1 goes on after ValueError: this fold has failed, after 2 steps and 2 batches (epoch 0);" in text


def test_a_rank_that_sets_up_more_trainers_than_others_is_told(mark: Mark, tmp_path: Path) -> None:
    code, text = run_of(mark, tmp_path, FOLDS, LOOP_MORE="1")
    assert code == 1, text
    assert text.count("fold 2: 8 steps") == 2
    assert "Trainer.setup, number 4 in this script" in text
    assert "as many trainers as the others" in text


@pytest.mark.long(reason="its halves are tested alone: test_lost_peers.py, test_loops.py")
def test_elche_run_tells_a_rank_that_waits_of_one_that_has_exited(elche: Callable[..., Command]) -> None:
    """Rank 0 waited without end."""
    done = elche("run", str(JOBS / "quiet_exit.py"), "--ranks", "2", "--device", "cpu", env={"OMP_NUM_THREADS": "1"})
    assert done.code == 1, done.err
    assert "number 2 in this script: rank 1 has exited without it; every rank" in done.err


def test_elche_run_follows_one_trainer_after_the_other(elche: Callable[..., Command], tmp_path: Path) -> None:
    """Also after one that an exception has ended, which the script has caught: the run failed with it."""
    env = {"OMP_NUM_THREADS": "1", "LOOP_READS": "1", "LOOP_FAILS": "0"}
    done = elche("run", str(FOLDS), "--ranks", "2", "--device", "cpu", "--json", env=env)
    assert done.code == 0, done.err
    assert done.err.count("read 0 characters") == 2, "input() of a rank waited forever"
    for fold, what in enumerate(("this fold has failed", "8 steps", "8 steps")):
        assert done.err.count(f"fold {fold}: {what}") == 2, done.err
    assert done.err.count("succeeded") + done.out.count('"succeeded"') >= 2, "one that is over at once may not be seen"
    more = elche("run", str(FOLDS), "--ranks", "2", "--device", "cpu", env={"OMP_NUM_THREADS": "1", "LOOP_MORE": "1"})
    assert more.code == 1
    assert "as many trainers as the others" in more.err

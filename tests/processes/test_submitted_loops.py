"""Scripts with their own loop, submitted: an agent starts their ranks, and they are one job."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from elche_client.client import JobHandle
from elche_client.events import EpochReport, JobResult, JobState, JobView
from support.real_processes import Cluster, Command, eventually

pytestmark = pytest.mark.slow(reason="every run starts PyTorch in two processes")

JobFile = Callable[..., Path]
STEPS_OF_EPOCH = 20  # of jobs/own_loop.py


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    folder = tmp_path / "notes"
    folder.mkdir()
    return folder


def environment(notes: Path, **more: str) -> dict[str, str]:
    return {"LOOP_NOTES": str(notes), **more}


def test_a_submitted_loop_is_one_job_with_logs_and_epochs_and_equal_ranks(
    cluster: Cluster, elche: Callable[..., Command], job_file: JobFile, notes: Path
) -> None:
    path, before = job_file("own_loop.py"), {job.job_id for job in cluster.client.jobs()}
    env = [word for name in environment(notes).items() for word in ("--env", "=".join(name))]
    done = elche("submit", str(path), "--ranks", "2", *env, "--coordinator", cluster.address)
    assert done.code == 0, done.err
    job = cluster.client.job(done.out.strip())
    events = list(job.watch())
    result = end_of(job)
    assert (result.state, result.error) == (JobState.SUCCEEDED, "")
    assert [one.epoch for one in events if isinstance(one, EpochReport)] == [0, 1, 2]
    assert {one.job_id for one in cluster.client.jobs()} - before == {job.id}, "one job, and not one more"
    lines = elche("logs", job.id, "--coordinator", cluster.address).out.splitlines()
    told = [json.loads(line[line.index("{") :]) for line in lines if '{"rank"' in line]
    assert sorted(one["rank"] for one in told) == [0, 1]
    assert told[0]["digest"] == told[1]["digest"]
    counted = [
        int(index)
        for note in notes.glob("rank-*")
        for line in note.read_text().splitlines()
        for index in line.split()[1:]
    ]
    assert sorted(counted) == sorted(3 * list(range(200)))


def test_a_rank_that_raises_ends_the_others_with_its_line(cluster: Cluster, job_file: JobFile, notes: Path) -> None:
    path = job_file("own_loop.py")
    raising = cluster.client.submit(path, num_ranks=2, environment=environment(notes, LOOP_FAIL_AT="5"))
    result = end_of(raising)
    assert (result.state, result.error) == (JobState.FAILED, "ValueError: on purpose, on rank 1 at batch 5")
    assert "own_loop.py" in result.traceback
    cluster.mark.assert_none_left("elche rank")


@pytest.mark.gate
def test_a_rank_runs_its_script_in_a_new_python(cluster: Cluster, job_file: JobFile, notes: Path) -> None:
    """In the other tests it goes on in its fork (`support/fork_server.py`)."""
    is_forked = "import sys\n(NOTES / 'is-forked').write_text(str('support.fork_server' in sys.modules))"
    env = environment(notes, LOOP_EPOCHS="1", TEST_EXECUTES="1")
    result = end_of(cluster.client.submit(job_file("own_loop.py", is_forked), num_ranks=1, environment=env))
    assert (result.state, result.error) == (JobState.SUCCEEDED, "")
    assert (notes / "is-forked").read_text() == "False"


@pytest.mark.long(reason="checkpoints of loops are tested with those that their user has started")
def test_a_submitted_loop_is_resumed_from_the_checkpoint_that_was_asked_for(
    cluster: Cluster, elche: Callable[..., Command], job_file: JobFile, notes: Path
) -> None:
    path = job_file("own_loop.py")
    job = cluster.client.submit(path, num_ranks=2, environment=environment(notes, LOOP_EPOCHS="100"))
    eventually(lambda: state_of(cluster, job.id) == "training", "it trains")
    assert elche("checkpoint", job.id, "--coordinator", cluster.address).code == 0
    eventually(lambda: view_of(cluster, job.id).checkpoints, "it is written")
    cluster.client.cancel(job.id)
    num_steps = end_of(job).checkpoints[-1].global_step
    refused = elche("resume", job.id, "--epochs", "50", "--coordinator", cluster.address)
    assert (refused.code, refused.complaint) == (
        2,
        f"elche: job {job.id} has its own training loop: set epochs in the script",
    )
    num_before = len((notes / "rank-0").read_text().splitlines())
    done = elche("resume", job.id, "--coordinator", cluster.address)
    assert done.code == 0, done.err
    assert end_of(cluster.client.job(cluster.client.jobs()[-1].job_id)).state is JobState.SUCCEEDED
    num_made = len((notes / "rank-0").read_text().splitlines()) - num_before
    assert num_made == 100 * STEPS_OF_EPOCH - num_steps, "the steps that the checkpoint lacks, and no others"


def end_of(job: JobHandle) -> JobResult:
    result = list(job.watch())[-1]
    assert isinstance(result, JobResult)
    return result


def state_of(cluster: Cluster, job_id: str) -> str:
    return view_of(cluster, job_id).state


def view_of(cluster: Cluster, job_id: str) -> JobView:
    return next(one for one in cluster.client.jobs() if one.job_id == job_id)

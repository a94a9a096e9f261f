"""Disks that are full for a while: of the coordinator's store, and of a rank's log."""

import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from processes.test_lost_ranks import Story, begin, succeeds

from elche.errors import JobFailed
from elche_client.events import JobView, MembershipReport, RoundReport
from support.real_processes import Cluster, Command, eventually

__all__ = ["begin"]

JobFile = Callable[..., Path]
CHATTY = """
import dataclasses, time

def says_much(model, batch):
    print("a batch " * 100, flush=True)
    time.sleep(0.005)
    inputs, targets, _ = batch
    return torch.nn.functional.mse_loss(model(inputs), targets)

job = dataclasses.replace(job, train_step=says_much, epochs=10_000)
"""


@contextmanager
def full_disk(pid: int) -> Iterator[None]:
    """No file of the process can grow: writing fails as it does on a full disk, but for the error's number."""
    _, most = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (1, most))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (most, most))


def test_the_store_cannot_be_written_for_a_while(
    cluster: Cluster, begin: Callable[..., Story], elche: Callable[..., Command]
) -> None:
    """Nothing is told that is not durable; ranks wait, and nothing is lost."""
    story = begin()
    eventually(lambda: len(story.of(RoundReport)) > 3, "rounds are committed")
    with full_disk(cluster.coordinator.process.pid):
        eventually(lambda: is_quiet(story), "no round is told")
        said = elche("jobs", "--coordinator", cluster.coordinator.address).out
        assert "all jobs wait: the coordinator cannot write its records (disk I/O error; " in said
        # Of a quota SQLite says no more than that.
        assert f"{cluster.coordinator.data} cannot be written (File too large): make room there" in said
    told = len(story.of(RoundReport))
    eventually(lambda: len(story.of(RoundReport)) > told, "they are told again")
    assert "all jobs wait" not in elche("jobs", "--coordinator", cluster.coordinator.address).out
    story.hurry()
    succeeds(story, survivors=())
    assert [len(story.pids(rank)) for rank in range(3)] == [1, 1, 1]
    assert story.of(MembershipReport) == []
    # Its log could not be written either; what was in memory of it was written afterwards.
    assert all("records cannot be written" in line for line in cluster.coordinator.new_errors())


def is_quiet(story: Story) -> bool:
    """Whether nothing is told for two seconds."""
    told = len(story.of(RoundReport))
    time.sleep(2.0)
    return len(story.of(RoundReport)) == told


def test_a_rank_that_cannot_write_its_log_trains_on(cluster: Cluster, job_file: JobFile) -> None:
    job = cluster.client.submit(job_file("linear.py", CHATTY), num_ranks=1)

    def view() -> JobView:
        return next(one for one in cluster.client.jobs() if one.job_id == job.id)

    eventually(lambda: view().num_rounds > 0, "it trains")
    [pid] = cluster.mark.living(f"elche rank 0 of {job.id}")
    log = Path(view().ranks[0].log_path)
    with full_disk(pid):
        size, epoch = log.stat().st_size, view().epoch
        eventually(lambda: view().epoch > epoch + 2, "it trains on")
        assert log.stat().st_size <= size + 10_000  # one line may have been on its way
    eventually(lambda: log.stat().st_size > size + 10_000, "its log goes on")
    job.cancel()
    with pytest.raises(JobFailed, match="cancelled"):
        job.result()

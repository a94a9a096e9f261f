"""Ranks that are stopped or hang while others train: left out, not waited for, and there again as soon as they can."""

import os
import re
import signal
import time
from collections.abc import Callable

import pytest
from processes.test_lost_ranks import Story, begin, succeeds

from elche_client.events import MembershipReport
from support.real_processes import Cluster, eventually

__all__ = ["begin"]

pytestmark = pytest.mark.slow(reason="ranks are stopped, left out and started again")


def is_left_out(story: Story) -> bool:
    return bool(story.of(MembershipReport))


def trains(story: Story, *ranks: int, num_batches: int = 20) -> None:
    """Waits until each of the ranks has made more batches."""
    before = {rank: len(story.notes(rank)) for rank in ranks}
    eventually(lambda: all(len(story.notes(rank)) > n + num_batches for rank, n in before.items()), f"{ranks} train")


def test_a_stopped_rank_is_left_out_and_is_a_newcomer_when_it_continues(begin: Callable[..., Story]) -> None:
    story = begin()
    trains(story, 0, 1, 2)
    (pid,) = story.pids(1)
    os.kill(pid, signal.SIGSTOP)
    try:
        eventually(lambda: is_left_out(story), "it is left out")
        (report,) = story.of(MembershipReport)
        text = r"rank 1 on \S+ \(cpu\) is left out: it has not answered for \d+\.\d s, and others wait for it"
        assert re.fullmatch(text, report.text)
        assert (report.rank, report.num_ranks, report.is_back) == (1, 2, False)
        trains(story, 0, 2, num_batches=60)
        assert story.pids(1) == [pid], "it is not ended as long as somebody has stopped it"
    finally:
        os.kill(pid, signal.SIGCONT)
    story.await_return(1)
    succeeds(story, survivors=(0, 2))
    assert len(story.pids(1)) == 2
    assert [one.is_back for one in story.of(MembershipReport)] == [False, True]


HANGS = """
import threading

def train_step(model, batch, step=train_step):
    if IS_FIRST and RANK == 2 and num_trained == 40:
        threading.Event().wait()
    return step(model, batch)

import dataclasses
job = dataclasses.replace(job, train_step=train_step)
"""


@pytest.mark.gate
def test_a_step_that_never_returns_is_ended_and_its_stack_is_in_the_log(begin: Callable[..., Story]) -> None:
    epochs = 40
    story = begin(HANGS, "BATCH_S = 0.02", output_dir=None, epochs=epochs)
    eventually(lambda: is_left_out(story), "it is left out")
    text = story.of(MembershipReport)[0].text
    assert re.match(r"rank 2 on \S+ \(cpu\) is left out: it has made no batch for \d+\.\d s, and others wait", text)
    story.await_return(2)
    succeeds(story, epochs=epochs, survivors=(0, 1))
    log = "\n".join(line.text for line in story.job.logs(rank=2))
    assert "the rank is ended because it hangs" in log
    assert "in train_step" in log


@pytest.mark.gate
def test_a_stopped_daemon_costs_no_rank(cluster: Cluster, begin: Callable[..., Story]) -> None:
    """Ranks live as long as their own sessions do; and a coordinator that wakes has not read what they have said."""
    story = begin()
    trains(story, 0, 1, 2)
    for daemon in (cluster.agent.process, cluster.coordinator.process):
        os.kill(daemon.pid, signal.SIGSTOP)
        time.sleep(4.0)  # longer than any rank may be silent here
        os.kill(daemon.pid, signal.SIGCONT)
        trains(story, 0, 1, 2)
    story.hurry()
    succeeds(story, survivors=(0, 1, 2))
    assert story.of(MembershipReport) == []

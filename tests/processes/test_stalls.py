"""Ranks that hang in jobs that leave nobody out: shown, with what their threads do. How soon is in core/test_stalls."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from elche_client.events import JobView, StallReport
from support.real_processes import LIMIT_S, Cluster, eventually

JobFile = Callable[..., Path]

HANGS = """
import dataclasses, os, threading, time

def hang_at_batch_40(model, batch, step=train_step, count=[0]):
    count[0] += 1
    time.sleep(0.025)
    if count[0] == 40 and os.environ["ELCHE_RANK"] == "1":
        threading.Event().wait()
    return step(model, batch)

job = dataclasses.replace(job, train_step=hang_at_batch_40, epochs=1000)
"""


@pytest.mark.gate
def test_a_train_step_that_never_returns_is_shown_with_its_stack(cluster: Cluster, job_file: JobFile) -> None:
    """It was shown as "training" for 12 minutes, at its old speed, without a word. A timeline failed the job."""
    job = cluster.client.submit(job_file("linear.py", HANGS), num_ranks=2, on_rank_loss="fail", timeline=True)
    watch = job.watch()

    def stall() -> StallReport | None:
        event = next(watch)
        return event if isinstance(event, StallReport) else None

    first = eventually(stall, "the rank is told to be stalled", LIMIT_S)
    assert (first.rank, first.is_over, first.stacks) == (1, False, "")
    assert 20 < first.usual_ms < 1000 * first.silent_s
    second = eventually(stall, "its stacks are told")
    assert "in hang_at_batch_40" in second.stacks
    assert "most recent call first" in second.stacks

    def view_of_stalled() -> JobView | None:
        event = next(watch)
        return event if isinstance(event, JobView) and event.ranks[1].state == "stalled" else None

    view = eventually(view_of_stalled, "a view shows the rank as stalled")
    assert view.ranks[1].stalled_s > 0
    assert (view.samples_per_s, view.eta_s) == (0.0, None)
    assert "rank 1 on" in view.reason
    job.cancel()


@pytest.mark.parametrize("name", ["linear.py"])
@pytest.mark.long(reason="core/test_stalls and processes/test_hung_ranks stop some, too")
def test_a_process_that_is_stopped_is_said_to_be(cluster: Cluster, job_file: JobFile, name: str) -> None:
    path = job_file(name, "import dataclasses\njob = dataclasses.replace(job, evaluate=None)")
    job = cluster.client.submit(path, num_ranks=2, epochs=100_000, on_rank_loss="fail")
    watch = job.watch()

    def next_stall() -> StallReport | None:
        """Of rank 1. When it stopped inside a collective, the one that waits there with it is told too."""
        event = next(watch)
        return event if isinstance(event, StallReport) and event.rank == 1 else None

    eventually(lambda: isinstance(event := next(watch), JobView) and event.num_rounds > 2, "it trains")
    (pid,) = cluster.mark.living(f"elche rank 1 of {job.id}")
    os.kill(pid, signal.SIGSTOP)
    try:
        eventually(next_stall, "it is stalled")
        told = eventually(next_stall, "why")
        assert told.stacks == f"the process is stopped, by a signal or by a debugger; `kill -CONT {pid}` lets it go on"
    finally:
        os.kill(pid, signal.SIGCONT)
    assert eventually(next_stall, "it goes on").is_over
    job.cancel()

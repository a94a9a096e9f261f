"""Ranks that hang in jobs that leave nobody out: shown, with what their threads do. How soon is in core/test_stalls."""

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

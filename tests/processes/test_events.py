"""What user code wants to be seen, and what a rank measures, on their way to whoever looks."""

import json
import re
import urllib.request
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from elche_client.display import timeline
from elche_client.events import JobState, JobView, RoundReport, UserEvent
from support.real_processes import Cluster

SAYING = """
from dataclasses import replace

from elche_worker import record_event

SAID = []


def telling_step(model, batch):
    if not SAID:
        record_event(f"rank {os.environ['ELCHE_RANK']} begins\\nwith a line")
        SAID.append(1)
    time.sleep(0.02)
    return train_step(model, batch)


job = replace(job, train_step=telling_step)
"""


SKIPPING = """
from dataclasses import replace

from torch.utils.data import default_collate


def sometimes_none(samples):
    good = [one for one in samples if one[2] >= NUM_SAMPLES // 2]
    return default_collate(good) if len(good) == len(samples) else None


job = replace(job, collate_fn=sometimes_none, batch_size=2, epochs=1, evaluate=None)
"""


def test_batches_of_none_are_skipped_and_told_in_one_line(cluster: Cluster, job_file: Callable[..., Path]) -> None:
    """Three of four batches are None: the step is never called with it, and every sample counts."""
    job = cluster.client.submit(job_file("linear.py", SKIPPING), num_ranks=2, verify_rounds=True)
    said = [event.text for event in job.watch() if isinstance(event, UserEvent)]
    assert len(said) == 1
    assert re.fullmatch(
        r"skipped \d+ batches \(\d+ on all ranks\) in epoch 1: collate_fn or the data set gave None for them", said[0]
    )
    result = job.result()
    assert (result.state, result.committed_samples) == (JobState.SUCCEEDED, (500,))


def test_an_event_of_the_users_own_is_seen_by_watchers_page_and_timeline(
    cluster: Cluster, job_file: Callable[..., Path]
) -> None:
    job = cluster.client.submit(
        job_file("linear.py", SAYING), num_ranks=2, epochs=8, timeline=True, anchor=12, max_anchor=30
    )
    events, norms = [], []
    metrics_url = f"{cluster.coordinator.page_url}/metrics"
    for event in job.watch():
        events.append(event)
        if isinstance(event, JobView) and event.state is JobState.TRAINING:
            text = urllib.request.urlopen(metrics_url).read().decode()
            lines = [line for line in text.splitlines() if "elche_rank_parameter_norm{" in line and job.id in line]
            norms.extend(float(line.split()[-1]) for line in lines)
    said = {(event.rank, event.text) for event in events if isinstance(event, UserEvent)}
    assert said == {(rank, f"rank {rank} begins with a line") for rank in (0, 1)}
    page = json.load(urllib.request.urlopen(f"{cluster.coordinator.page_url}/api/jobs/{job.id}"))
    shown = [one["text"] for one in page["events"] if one["kind"] == "user"]
    assert sorted(shown) == [f"rank {rank}: rank {rank} begins with a line" for rank in (0, 1)]
    found = timeline.read(cluster.client.timeline(job.id).splitlines(), job.id)
    assert len([one for one in found.marks if one.name == "user event"]) == 2
    for rank in (0, 1):
        begun = [span.detail for span in found.spans if span.name == "epoch begins" and span.rank == rank]
        assert begun == sorted(set(begun))
        assert len(begun) >= 7
    rounds = [event for event in events if isinstance(event, RoundReport)]
    changes = [one.facts["to"] for one in found.marks if one.name == "anchor changed"]
    anchors = [report.anchor for report in rounds]
    assert changes == [now for before, now in pairwise(anchors) if now != before]
    assert all(sum(report.rank_samples) == report.samples for report in rounds)
    assert all(
        loss >= 0 for report in rounds for loss, n in zip(report.rank_losses, report.rank_batches, strict=True) if n
    )
    assert norms, "measured while it trains"
    assert all(0 < norm < 10 for norm in norms)

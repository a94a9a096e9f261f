"""A timeline of real ranks: every batch is in it, on one clock, and nothing is recorded when nobody asks."""

import json
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from elche.errors import InvalidJob
from elche_client.client import JobHandle
from elche_client.display import timeline
from support.real_processes import Cluster, Command

JobFile = Callable[..., Path]


@pytest.fixture(scope="module")
def recorded(shared_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> tuple[JobHandle, Cluster]:
    path = tmp_path_factory.mktemp("job") / "linear.py"
    path.write_text((Path(__file__).parent / "jobs" / "linear.py").read_text(encoding="utf-8"))
    settings = {"epochs": 6, "timeline": True, "checkpoint_every_epochs": 2}
    job = shared_cluster.client.submit(path, num_ranks=2, slow_factors={1: 2.0}, **settings)
    job.result()
    return job, shared_cluster


def test_every_batch_is_in_it(recorded: tuple[JobHandle, Cluster]) -> None:
    job, cluster = recorded
    found = timeline.read(cluster.client.timeline(job.id).splitlines(), job.id)
    batches = Counter(span.rank for span in found.spans if span.name == "batch")
    assert [batches[rank] for rank in (0, 1)] == [rank.batches for rank in job.result().ranks]
    assert found.num_dropped == 0
    names = {span.name for span in found.spans}
    assert {"batch", "average", "apply a result", "fetch", "write a checkpoint"} <= names
    rounds = {span.detail for span in found.spans if span.name == "average"}
    assert rounds == {moment.facts["round"] for moment in found.marks if moment.name == "round"}
    assert all(moment.facts["why"] for moment in found.marks if moment.name == "sync now")


def test_spans_of_one_rank_follow_each_other_and_clocks_agree(recorded: tuple[JobHandle, Cluster]) -> None:
    job, cluster = recorded
    found = timeline.read(cluster.client.timeline(job.id).splitlines(), job.id)
    for rank in (0, 1):
        ahead_s, wrong_s = found.clocks[rank]
        assert abs(ahead_s) <= wrong_s + 0.001, "one machine has one clock"
        loop = [span for span in found.spans if (span.rank, span.lane) == (rank, "loop")]
        for before, after in pairwise(loop):
            assert after.start_s >= before.end_s - 0.002, (before, after)


def test_the_command_writes_a_trace_and_a_page(
    recorded: tuple[JobHandle, Cluster], mark: object, elche: Callable[..., Command], tmp_path: Path
) -> None:
    job, cluster = recorded
    to = ("--coordinator", cluster.address)
    assert "spans of 2 ranks" in elche("timeline", job.id, *to).out
    assert len(json.loads((tmp_path / "trace.json").read_text())["traceEvents"]) > 100
    assert "open it in a browser" in elche("timeline", job.id, "--html", "-o", "page.html", *to).out
    assert job.id in (tmp_path / "page.html").read_text()
    assert "cannot be written" in elche("timeline", job.id, "-o", "no/such/folder", *to).complaint


def test_who_asked_for_none_is_told_how(
    cluster: Cluster, job_file: JobFile, elche: Callable[..., Command], tmp_path: Path
) -> None:
    job = cluster.client.submit(job_file(), num_ranks=1, epochs=1)
    job.result()
    with pytest.raises(InvalidJob, match="--timeline true"):
        cluster.client.timeline(job.id)
    assert "--timeline true" in elche("timeline", ".").complaint
    nobody = elche("timeline", "nobody", "--coordinator", cluster.address)
    assert "nobody is neither a folder here nor a job of" in nobody.complaint
    assert not (cluster.coordinator.data / "timelines" / f"{job.id}.jsonl").exists()

"""A job through its parts: submitted, watched and listed by clients of a coordinator with an agent."""

import json
import time
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import nn

from elche.errors import InvalidJob
from elche_client.client import JobHandle
from elche_client.events import EpochReport, EvaluationReport, Event, JobResult, JobState, JobView, RoundReport
from elche_worker.model.state import load_state
from elche_worker.user.loading import load_job
from support.real_processes import Cluster, Command, eventually

JobFile = Callable[..., Path]
NUM_SAMPLES, BATCH_SIZE, EPOCHS = 500, 16, 3  # of jobs/linear.py


class Told:
    """What a watch told, by kind."""

    def __init__(self, events: list[Event]) -> None:
        self.all = events
        self.views = [event for event in events if isinstance(event, JobView)]
        self.rounds = [event for event in events if isinstance(event, RoundReport)]
        self.epochs = [event for event in events if isinstance(event, EpochReport)]
        self.evaluations = [event for event in events if isinstance(event, EvaluationReport)]
        self.results = [event for event in events if isinstance(event, JobResult)]


def batches_noted(path: Path, rank: int) -> list[list[int]]:
    """The sample indices of each batch that a rank has trained, in order."""
    lines = path.with_suffix(f".rank-{rank}").read_text().splitlines()
    return [[int(index) for index in line.split()] for line in lines]


def assert_each_once(path: Path, epochs: list[EpochReport], num_ranks: int, indices: range) -> None:
    """Each epoch, cut from the ranks' notes by the reported numbers of batches, has every sample exactly once."""
    notes = [iter(batches_noted(path, rank)) for rank in range(num_ranks)]
    for report in epochs:
        seen = Counter(
            index
            for rank, count in enumerate(report.rank_batches)
            for batch in islice(notes[rank], count)
            for index in batch
        )
        assert seen == Counter(indices), f"epoch {report.epoch}"
    assert [list(rest) for rest in notes] == [[]] * num_ranks


def test_everything_about_one_job(cluster: Cluster, job_file: JobFile, elche: Callable[..., Command]) -> None:
    """One job, seen by everybody who may look at it: two watchers, the CLI, the notes of its ranks and its file."""
    path = job_file("linear.py")
    job = cluster.client.submit(path, num_ranks=2, slow_factors={1: 2.0}, name="everything", verify_rounds=True)
    told = Told(list(job.watch()))

    assert isinstance(told.all[0], JobView)
    assert isinstance(told.all[-1], JobResult)
    assert len(told.results) == 1
    (result,) = told.results
    assert result.state is JobState.SUCCEEDED, result
    assert [view.name for view in told.views] == ["everything"] * len(told.views)
    assert told.views[-1].state is JobState.SUCCEEDED
    assert [report.epoch for report in told.epochs] == [0, 1, 2]
    assert [report.epoch for report in told.evaluations] == [0, 1, 2]
    assert [report.version for report in told.rounds] == list(range(1, result.rounds + 1))
    assert sum(report.samples for report in told.rounds) == NUM_SAMPLES * EPOCHS

    assert result.epochs == EPOCHS
    assert result.dataset_size == NUM_SAMPLES
    assert result.committed_samples == (NUM_SAMPLES,) * EPOCHS
    assert result.dropped_samples == (0,) * EPOCHS
    assert sum(rank.batches for rank in result.ranks) == sum(sum(report.rank_batches) for report in told.epochs)
    assert all(rank.device == "cpu" and rank.batches > 0 and rank.ms_per_batch >= 2 for rank in result.ranks)
    assert result.samples_per_s > 0
    assert result.bound_samples_per_s > 0

    assert_each_once(path, told.epochs, 2, range(NUM_SAMPLES))
    for report in told.epochs:  # means over samples, over batches, and over the batches of each rank
        assert report.scalars["index"] == pytest.approx((NUM_SAMPLES - 1) / 2)
        assert report.scalars["seven"] == pytest.approx(7.0)
        assert report.scalars["rank"] == pytest.approx(report.rank_batches[1] / sum(report.rank_batches))
        assert (report.committed, report.dropped) == (NUM_SAMPLES, 0)

    user_job = load_job(path.read_text(), str(path))
    model = user_job.model()
    load_state(model, result.model)
    assert user_job.evaluate is not None
    with torch.no_grad():
        assert user_job.evaluate(model)["mse"] == pytest.approx(result.metrics["mse"], rel=1e-6)
    assert result.metrics == told.evaluations[-1].metrics
    assert result.metrics["mse"] < 0.5

    again = Told(list(job.watch()))
    assert again.results == [result]
    listed = {view.job_id: view for view in cluster.client.jobs()}[job.id]
    assert listed.state is JobState.SUCCEEDED
    shown = elche("jobs", "--coordinator", cluster.address)
    assert shown.code == 0
    assert job.id in shown.out
    watched = elche("watch", job.id, "--coordinator", cluster.address, "--json")
    assert watched.code == 0
    assert json.loads(watched.out)["committed_samples"] == [NUM_SAMPLES] * EPOCHS
    cluster.client.cancel(job.id)
    assert {view.job_id: view.state for view in cluster.client.jobs()}[job.id] is JobState.SUCCEEDED


def test_a_queued_job_can_be_cancelled(cluster: Cluster, job_file: JobFile) -> None:
    job = cluster.client.submit(job_file("linear.py"), num_ranks=17)
    job.cancel()
    assert list(job.watch())[-1].state is JobState.CANCELLED


def test_a_file_may_import_its_neighbours_from_anywhere(
    cluster: Cluster, job_file: JobFile, tmp_path: Path, elche: Callable[..., Command]
) -> None:
    (tmp_path / "neighbour.py").write_text("EPOCHS = 1\n")
    path = job_file(
        "linear.py", "import neighbour, dataclasses", "job = dataclasses.replace(job, epochs=neighbour.EPOCHS)"
    )
    relative = path.relative_to(tmp_path)
    done = elche("submit", str(relative), "--coordinator", cluster.address, "--ranks", "1", "--watch", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["committed_samples"] == [NUM_SAMPLES]


def test_the_same_file_trains_alone(job_file: JobFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELCHE_RANK", "0")
    path = job_file("linear.py")
    seen: list[dict[str, float]] = []
    job = load_job(path.read_text(), str(path))
    state = job.run(device="cpu", on_epoch=lambda epoch, metrics: seen.append(metrics))
    model = nn.Linear(8, 1)
    model.load_state_dict(state.params)
    assert job.evaluate is not None
    with torch.no_grad():
        assert job.evaluate(model)["mse"] == pytest.approx(seen[-1]["mse"])
    notes = [index for batch in batches_noted(path, 0) for index in batch]
    for epoch in range(EPOCHS):
        assert sorted(notes[epoch * NUM_SAMPLES : (epoch + 1) * NUM_SAMPLES]) == list(range(NUM_SAMPLES))


def test_a_job_is_paused_and_goes_on(
    cluster: Cluster, job_file: Callable[..., Path], elche: Callable[..., Command]
) -> None:
    job = cluster.client.submit(job_file(), num_ranks=2, epochs=40)
    to = ("--coordinator", cluster.address)
    with pytest.raises(InvalidJob, match="only a job that trains"):
        job.pause()
    eventually(lambda: view_of(job).num_rounds > 2, "rounds")
    assert elche("pause", job.id, *to).out.strip() == f"job {job.id} pauses after its open round"
    eventually(lambda: view_of(job).state is JobState.PAUSED, "it is paused")
    stood = eventually(lambda: stands(job), "its ranks stand")
    assert stands(job, 1.0) == stood
    for act in (job.checkpoint, job.resume):
        with pytest.raises(InvalidJob, match=f"is paused.*`elche pause {job.id} --off` lets it go on"):
            act()
    assert elche("pause", job.id, "--off", *to).out.strip() == f"job {job.id} goes on"
    assert job.result().committed_samples == (NUM_SAMPLES,) * 40
    assert elche("pause", job.id, *to).out.strip() == f"job {job.id} is succeeded: nothing was changed"


def view_of(job: JobHandle) -> JobView:
    return next(view for view in job.client.jobs() if view.job_id == job.id)


def stands(job: JobHandle, seconds: float = 0.5) -> list[int] | None:
    """Batches of each rank, when they stay as they are for so long."""
    before = [rank.num_batches for rank in view_of(job).ranks]
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        if [rank.num_batches for rank in view_of(job).ranks] != before:
            return None
        time.sleep(0.05)
    return before

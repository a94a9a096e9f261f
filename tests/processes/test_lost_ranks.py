"""Ranks that die while others train: the others go on, no sample is lost or counted twice, and the rank comes back."""

import json
import re
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file

import elche_audit
from elche.errors import Unreachable
from elche.permutation import permutation_slice
from elche.v1 import job_pb2
from elche_client import Client
from elche_client.client import JobHandle
from elche_client.events import (
    Checkpoint,
    EvaluationReport,
    Event,
    JobResult,
    JobState,
    MembershipReport,
    RoundReport,
)
from support.real_processes import Cluster, Command, Mark, agent, coordinator, eventually

pytestmark = pytest.mark.slow(reason="ranks are killed and started again")

JobFile = Callable[..., Path]
NUM_SAMPLES, SEED, EPOCHS = 960, 0, 16  # of jobs/dying.py
FEW = 8
OTHERS_GO_ON = "AWAITS = 12"
"""A line for jobs/dying.py: others that wait for a rank to come back wait forever. How long they train no batch is
measured by `benchmarks/chaos.py`: 0.07 to 0.5 s on two busy cores.
"""
REPLACE = "import dataclasses\njob = dataclasses.replace(job, {})"
EDITS = """
import dataclasses
import beside
note("runs", beside.VERSION)

def edited():
    note("has read them")
    while sum('"has read' in notes.read_text() for notes in FOLDER.glob("rank-[0-9]")) < 3:
        time.sleep(0.02)
    (FOLDER / "beside.py").write_text("VERSION = 2\\n")
    return dataset()

job = dataclasses.replace(job, dataset=edited)
"""
"""A module is edited when all have imported and read it, before any is ready."""


@dataclass
class Story:
    """A job of jobs/dying.py, what its ranks note and what watchers are told."""

    job: JobHandle
    folder: Path
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._watcher = Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def _watch(self) -> None:
        with suppress(Unreachable):  # the client is closed while a test fails
            self.events.extend(self.job.watch())

    def notes(self, rank: int) -> list[list[Any]]:
        path = self.folder / f"rank-{rank}"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def pids(self, rank: int, kind: str = "starts") -> list[int]:
        """The processes of the rank that have noted this, in order."""
        return list(dict.fromkeys(pid for what, pid, *_ in self.notes(rank) if what == kind))

    def is_back(self, *ranks: int) -> bool:
        """Whether another process than the first one trains in each of these ranks."""
        return all(set(self.pids(rank, "batch")) - set(self.pids(rank)[:1]) for rank in ranks)

    def await_return(self, *ranks: int) -> None:
        """Waits until these ranks train again; then has the job come to its end."""
        eventually(lambda: self.is_back(*ranks) or self.job_has_ended, f"ranks {ranks} train again")
        self.hurry()

    @property
    def job_has_ended(self) -> bool:
        return not self._watcher.is_alive()

    def hurry(self) -> None:
        (self.folder / "hurry").touch()

    def end(self) -> JobResult:
        self._watcher.join(400)
        result = self.events[-1]
        assert isinstance(result, JobResult)
        return result

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


def succeeds(
    story: Story,
    *,
    epochs: int = EPOCHS,
    survivors: tuple[int, ...] | None = None,
    is_told_all: bool = True,
) -> JobResult:
    """The job ends well: each sample of each epoch is committed once, and the final model is the sum of the rounds, if
    the story `is_told_all`: of the last rounds of a coordinator that is killed a watcher may hear nothing. Survivors,
    by default all of three ranks that have not noted their death, train on in the same process, unless one was so busy
    that it did not answer in time. The audit proves it by the files of all hosts.
    """
    result = story.end()
    assert result.state is JobState.SUCCEEDED, result
    assert result.committed_samples == (NUM_SAMPLES,) * epochs
    committed: Counter[tuple[int, int]] = Counter()
    expected = np.zeros(NUM_SAMPLES)
    for parts in map(parts_of, story.of(RoundReport)):
        num_samples = sum(one.size for part in parts for one in part.slices)
        for part in parts:
            weight = sum(one.size for one in part.slices) / max(1, num_samples)
            for one in part.slices:
                committed.update((one.epoch, one.offset + index) for index in range(one.size))
                expected[samples_of(one)] += weight
    assert set(committed.values()) == {1}, "a sample was committed twice"
    if is_told_all:
        assert len(committed) == NUM_SAMPLES * epochs
        np.testing.assert_allclose(load_file(result.model)["counts"], expected, atol=2e-3)
    folders = dict.fromkeys([Path(result.model).parent, *story.folder.glob(f"**/work/{story.job.id}")])
    verdict = elche_audit.judge(*folders)
    assert elche_audit.exit_code(verdict) == 0, "\n".join(elche_audit.lines(verdict))
    changes = [report.text for report in story.of(MembershipReport)]
    mute = {report.rank for report in story.of(MembershipReport) if "has not answered for" in report.text}
    for rank in set(survivors if survivors is not None else {0, 1, 2} - {dead(story)}) - mute:
        assert len(story.pids(rank)) == 1, f"rank {rank} was started again: {changes}"
    return result


def dead(story: Story) -> int:
    """The rank that has noted its death."""
    (rank,) = [rank for rank in range(3) if story.pids(rank, "dies")]
    return rank


def parts_of(report: RoundReport) -> list[job_pb2.RankPart]:
    message = job_pb2.JobSpec()
    message.ParseFromString(report.recorded)
    (recorded,) = message.replay
    return list(recorded.parts)


def samples_of(one: job_pb2.Slice) -> npt.NDArray[np.int64]:
    return permutation_slice(seed=SEED, epoch=one.epoch, length=NUM_SAMPLES, offset=one.offset, size=one.size)


@pytest.fixture
def begin(cluster: Cluster, job_file: JobFile, tmp_path: Path) -> Callable[..., Story]:
    """Submits jobs/dying.py with lines after it, to three ranks."""

    def begin(*lines: str, client: Client = cluster.client, **options: Any) -> Story:
        path = job_file("dying.py", *lines)
        return Story(client.submit(path, **{"num_ranks": 3, "verify_rounds": True, "audit": True, **options}), tmp_path)

    return begin


# One of three


@pytest.mark.parametrize(("policy", "averaging"), [("async", "overlapped"), ("sync", "blocking")])
def test_the_others_go_on_and_the_rank_comes_back(begin: Callable[..., Story], policy: str, averaging: str) -> None:
    """With a cadence they do in the other tests here, and by either backend in `test_dead_ranks.py`."""
    epochs, anchor = (FEW, None) if policy == "sync" else (EPOCHS, 4)
    how = {"policy": policy, "averaging": averaging, "anchor": anchor}
    story = begin("DIES_AT = {1: 30}", OTHERS_GO_ON, **how, epochs=epochs)
    story.await_return(1)
    succeeds(story, epochs=epochs)
    assert len(story.pids(1)) == 2
    assert len(story.pids(1, "batch")) == 2
    lost, back = story.of(MembershipReport)
    assert (lost.rank, lost.is_back, lost.num_ranks) == (1, False, 2)
    assert re.match(r"rank 1 on \S+ \(cpu\) was killed by signal 9 ", lost.text)
    assert (back.rank, back.is_back, back.num_ranks) == (1, True, 3)


SLOW_FIRST = """
DIES_AT = {1: 30}

def warm_up():
    note("warms up")
    others_go_on(20)
"""


@pytest.mark.long(reason="a rank that comes back goes the same way")
def test_nobody_waits_for_the_first_batch_of_a_rank_that_comes_back(begin: Callable[..., Story]) -> None:
    story = begin(SLOW_FIRST, policy="sync", anchor=None, epochs=FEW)
    story.await_return(1)
    succeeds(story, epochs=FEW)
    assert len(story.pids(1, "warms up")) == 1


CALLBACKS = """
class Noting:
    def begin(self, job): note("begin")
    def log(self, step, values): note("log", step)
    def end(self): note("end")

def on_metrics(metrics):
    note("metrics", metrics.epoch)

import dataclasses
job = dataclasses.replace(job, metrics_fn=on_metrics, loggers=[Noting()])
DIES_AT = {0: 60}
"""


def test_rank_0_dies_and_another_one_calls_back(begin: Callable[..., Story]) -> None:
    story = begin(CALLBACKS)
    story.await_return(0)
    succeeds(story)
    for kind, epochs in (("metrics", range(EPOCHS)), ("log", range(1, EPOCHS + 1))):
        told = [(at_s, value) for rank in range(3) for what, _, at_s, *values in story.notes(rank) if what == kind
                for value in values]  # fmt: skip
        counted = Counter(value for _, value in told)
        assert set(counted) == set(epochs), f"{kind} of epochs that nobody was told"
        assert sum(counted.values()) <= len(epochs) + 2, "only what a dead rank has not acknowledged is told again"


# Moments


DIES_EVALUATING = """
def evaluate(model):
    die_once("evaluating")
    note("evaluated")
    return {"sum": float(model.counts.sum())}
"""


SHARED = """
from elche_worker import this_rank


def eval_step(model, batch):
    if this_rank().version:  # else it is the rehearsal before training
        if RANK == 1:
            die_once("evaluating")
        note("evaluated", batch.tolist())
    return {"index": batch.float().mean()}
"""


def test_a_rank_dies_in_its_part_of_an_evaluation(begin: Callable[..., Story]) -> None:
    replaced = f"eval_dataset=lambda: list(range(90)), eval_step=eval_step, epochs={FEW}"
    story = begin(SHARED, REPLACE.format(replaced))
    story.await_return(1)
    succeeds(story, epochs=FEW)
    reports = story.of(EvaluationReport)
    assert [report.epoch for report in reports] == list(range(FEW))
    assert [report.metrics["index"] for report in reports] == pytest.approx([44.5] * FEW)


DIES_WRITING = """
def fsync(file, before=os.fsync):
    die_once("writing")
    before(file)

os.fsync = fsync
"""


def test_a_rank_dies_while_it_writes_a_checkpoint(begin: Callable[..., Story], tmp_path: Path) -> None:
    replaced = f"checkpoint_every_epochs=2, epochs={FEW}"
    story = begin(DIES_WRITING, REPLACE.format(replaced), output_dir=tmp_path / "out")
    eventually((story.folder / "died-writing").exists, "a rank dies")
    story.await_return(dead(story))
    result = succeeds(story, epochs=FEW)
    assert len(result.checkpoints) > 1
    assert len(story.of(Checkpoint)) > 1
    assert all((Path(one.path) / "manifest.json").exists() for one in result.checkpoints)


def test_a_rank_dies_while_it_evaluates_the_last_model(begin: Callable[..., Story]) -> None:
    story = begin(DIES_EVALUATING, REPLACE.format("evaluate=evaluate, epochs=1"))
    succeeds(story, epochs=1)
    (report,) = story.of(EvaluationReport)
    assert report.is_final


def test_a_rank_dies_while_it_writes_the_last_model(begin: Callable[..., Story]) -> None:
    story = begin(DIES_WRITING, REPLACE.format("epochs=1"))
    succeeds(story, epochs=1)
    assert (story.folder / "died-writing").exists()


# Who does not come back


STUCK = "has lost the processes that it works with"
"""Said of a rank whose collective has not returned when it was given up, as gloo's may not while peers come and go: it
ends, and is started again.
"""
DIES_AGAIN = """
DIES_AT = {1: 10}
if not IS_FIRST and RANK == 1:
    os._exit(3)
"""


def test_a_rank_that_dies_whenever_it_starts_keeps_nobody(begin: Callable[..., Story]) -> None:
    story = begin(DIES_AGAIN, REPLACE.format(f"epochs={FEW}"))
    eventually(lambda: len(story.pids(1)) >= 3 or story.job_has_ended, "it is started again")
    story.hurry()
    succeeds(story, epochs=FEW, survivors=())
    assert len(story.pids(1, "batch")) == 1
    lost = [event for event in story.of(MembershipReport) if not event.is_back]
    own = [event.text for event in lost if event.rank == 1]
    assert len(own) in (len(story.pids(1)) - 1, len(story.pids(1))), "the job may end before its last process does"
    assert "left with exit code 3" in own[-1]
    assert [event.text for event in lost if event.rank != 1 and STUCK not in event.text] == []


def test_a_device_that_falls_off_the_bus_costs_its_rank_only(begin: Callable[..., Story]) -> None:
    """Emulated: the driver's error, raised where a kernel would be waited for."""
    story = begin(
        "def die():\n    note('dies')\n    raise RuntimeError('CUDA error: unspecified launch failure')",
        "DIES_AT = {1: 20}",
    )
    story.await_return(1)
    succeeds(story)
    (lost, *_) = story.of(MembershipReport)
    assert "was killed by signal 6" in lost.text


def test_a_job_goes_back_to_its_start_with_its_only_rank(begin: Callable[..., Story]) -> None:
    story = begin("DIES_AT = {0: 5}", REPLACE.format("epochs=2"), num_ranks=1)
    story.await_return(0)
    assert story.job.result().committed_samples == (NUM_SAMPLES,) * 2
    (report,) = story.of(MembershipReport)
    assert re.match(r"rank 0 on \S+ \(cpu\) was killed by signal 9 .*; the job goes back to its start$", report.text)


# Several at once


def test_a_host_is_lost_and_another_takes_its_ranks(mark: Mark, begin: Callable[..., Story], tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("first", "second", "third")]
    for folder in folders:
        folder.mkdir()
    with coordinator(mark, tmp_path) as one, Client(one.address, token="") as client:
        with agent(mark, folders[0], one.address), agent(mark, folders[1], one.address) as lost:
            story = begin(client=client, num_ranks=4)
            eventually(lambda: all(len(story.notes(rank)) > 20 for rank in range(4)), "all train")
            lost.process.kill()
            eventually(
                lambda: sum(map(len, (mark.living(f"elche rank {rank} of") for rank in (2, 3)))) == 0, "they die"
            )
            before = [len(story.notes(rank)) for rank in (0, 1)]
            eventually(
                lambda: all(len(story.notes(rank)) > count + 10 for rank, count in zip((0, 1), before, strict=True)),
                "the others go on",
            )
            with agent(mark, folders[2], one.address):
                story.await_return(2, 3)
                succeeds(story, survivors=(0, 1))
                told = {event.rank: event.text for event in story.of(MembershipReport) if not event.is_back}
                for rank in (2, 3):
                    assert re.search(r"is lost: its host \S+ is gone|was killed", told[rank])
        assert one.new_errors() == []


# What people are told


HURRIES_WHEN_IT_IS_BACK = """
if RANK == 1 and not IS_FIRST:
    (FOLDER / "hurry").touch()
DIES_AT = {1: 30}
"""


def test_one_line_says_what_has_happened(cluster: Cluster, job_file: JobFile, elche: Callable[..., Command]) -> None:
    path = job_file("dying.py", HURRIES_WHEN_IT_IS_BACK, REPLACE.format(f"epochs={FEW}"))
    watched = elche("submit", str(path), "--ranks", "3", "--watch", "--coordinator", cluster.address)
    assert watched.code == 0, watched.err
    told = re.compile(r"rank 1 on \S+ \(cpu\) was killed by signal 9 ")
    job_id = cluster.client.jobs()[-1].job_id
    logged = [line for line in cluster.coordinator.log.read_text().splitlines() if f"job={job_id} " in line]
    for lines in (watched.out.splitlines() + watched.err.splitlines(), logged):
        assert len([line for line in lines if told.search(line)]) == 1, lines


def test_a_module_that_is_edited_while_the_job_trains_is_not_mixed_with_what_the_others_run(
    begin: Callable[..., Story], tmp_path: Path
) -> None:
    (tmp_path / "beside.py").write_text("VERSION = 1\n")
    story = begin(EDITS, "DIES_AT = {1: 5}")
    story.await_return(1)
    assert [note[-1] for note in story.notes(1) if note[0] == "runs"] == [1, 1]
    assert (tmp_path / "beside.py").read_text() == "VERSION = 2\n"
    succeeds(story)

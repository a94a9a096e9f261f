"""Loops of the user's own as real processes: alone, under torchrun, and seen by a coordinator."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from elche.errors import InvalidJob
from elche.processors import threads_per_rank
from elche_client.events import EpochReport, EvaluationReport, JobResult, JobState, JobView
from support import own_launchers, two_ranks
from support.real_processes import Cluster, Command, Mark, coordinator, eventually

pytestmark = pytest.mark.slow(reason="every run starts PyTorch in two processes or three")

JOBS = Path(__file__).parent / "jobs"
LOOP = JOBS / "own_loop.py"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
TWO_RANKS = [two_ranks.__file__]


@dataclass(frozen=True, slots=True)
class Run:
    """A script that runs, and the samples that its ranks count."""

    process: "subprocess.Popen[str]"
    folder: Path
    log: Path

    @property
    def text(self) -> str:
        return self.log.read_text()

    def ended(self, limit_s: float = 400.0) -> list[dict[str, Any]]:
        """What each rank said at its end."""
        code = self.process.wait(limit_s)
        assert code == 0, self.text
        found = [json.loads(line[line.index("{") :]) for line in self.text.splitlines() if '{"rank"' in line]
        return sorted(found, key=lambda one: one["rank"])

    def counted(self) -> dict[int, Counter[int]]:
        """Epoch to how often each sample was counted, in all runs in this folder."""
        counts: dict[int, Counter[int]] = {}
        for path in self.folder.glob("rank-*"):
            for line in path.read_text().splitlines():
                epoch, *indices = map(int, line.split())
                counts.setdefault(epoch, Counter()).update(indices)
        return counts

    def num_steps(self, rank: int = 0) -> int:
        path = self.folder / f"rank-{rank}"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def num_rests(self, rank: int) -> int:
        """How often it has waited since the job is paused."""
        path = self.folder / f"rests-{rank}"
        return len(path.read_text().splitlines()) if path.exists() else 0


@contextmanager
def running(mark: Mark, folder: Path, *launcher: str, script: Path = LOOP, **env: str) -> Iterator[Run]:
    folder.mkdir(exist_ok=True)
    log = folder / "log"
    environment = mark.environment({"LOOP_NOTES": str(folder), "OMP_NUM_THREADS": "1", **env})
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *launcher, str(script)], stdout=file, stderr=file, text=True, env=environment, cwd=folder
        )
    try:
        yield Run(process, folder, log)
    finally:
        process.kill()
        process.wait()


def every_sample_once(epochs: int) -> dict[int, Counter[int]]:
    return {epoch: Counter(range(200)) for epoch in range(epochs)}


@pytest.fixture
def alone_digest(mark: Mark, tmp_path: Path) -> float:
    with running(mark, tmp_path / "alone") as run:
        (told,) = run.ended()
        assert run.counted() == every_sample_once(3)
    return float(told["digest"])


def test_the_same_script_alone_and_under_torchrun(mark: Mark, tmp_path: Path, alone_digest: float) -> None:
    with running(mark, tmp_path / "two", *TORCHRUN) as run:
        first, second = run.ended()
        assert run.counted() == every_sample_once(3)
    assert first["digest"] == second["digest"] == pytest.approx(alone_digest, abs=1e-4)
    assert run.text.count("elche: 2 devices") == 1
    assert "Traceback" not in run.text


@pytest.mark.parametrize(
    "el_che", ["1", "shares", pytest.param("0", marks=pytest.mark.long(reason="El Che's loop goes the same way"))]
)
def test_a_loop_appears_as_a_job(mark: Mark, cluster: Cluster, tmp_path: Path, el_che: str) -> None:
    watched = tmp_path / "watched"
    env = {"ELCHE_COORDINATOR": cluster.coordinator.address, "LOOP_EL_CHE": el_che, "LOOP_AWAITS": str(watched)}
    before = {job.job_id for job in cluster.client.jobs()}
    with running(mark, tmp_path / "loop", *TWO_RANKS, **env) as run:
        job = eventually(
            lambda: [one for one in cluster.client.jobs() if one.job_id not in before], "the job is there"
        )[0]
        assert job.name == "own_loop"
        watching = cluster.client.job(job.job_id).watch()
        first = next(watching)
        watched.touch()
        events = [first, *watching]
        run.ended()
        assert run.counted() == every_sample_once(3)
    epochs = [event for event in events if isinstance(event, EpochReport)]
    assert [event.epoch for event in epochs] == [0, 1, 2]
    assert [event.committed for event in epochs] == [200] * 3
    assert all(event.scalars == {"seven": 7.0} for event in epochs)
    assert epochs[-1].loss < epochs[0].loss
    assert [event.epoch for event in events if isinstance(event, EvaluationReport)] == [0, 1, 2]
    result = cluster.client.job(job.job_id).result()
    assert result.state is JobState.SUCCEEDED
    assert result.committed_samples == (200, 200, 200)
    assert len(result.ranks) == 2
    assert result.metrics["mse"] > 0
    ended = next(one for one in cluster.client.jobs() if one.job_id == job.job_id)
    assert ended.state is JobState.SUCCEEDED
    with pytest.raises(InvalidJob, match="start the script again"):
        cluster.client.resume(job.job_id)


@contextmanager
def attached(cluster: Cluster, mark: Mark, folder: Path, **more: str) -> Iterator[tuple[Run, Any]]:
    """A loop of two ranks that has made some steps, and its job."""
    before = {job.job_id for job in cluster.client.jobs()}
    env = {"ELCHE_COORDINATOR": cluster.coordinator.address, "LOOP_SLEEP_S": "0.02", "LOOP_EPOCHS": "50", **more}
    with running(mark, folder, *TWO_RANKS, **env) as run:
        found = eventually(
            lambda: [one for one in cluster.client.jobs() if one.job_id not in before], "the job is there"
        )
        eventually(lambda: run.num_steps() > 5 or run.process.poll() is not None, "it trains")
        assert run.process.poll() is None, run.text
        yield run, cluster.client.job(found[0].job_id)


def view_of(cluster: Cluster, job: Any) -> JobView:
    return next(one for one in cluster.client.jobs() if one.job_id == job.id)


def end_of(job: Any) -> JobResult:
    """How it ended, however that was."""
    *_, result = job.watch()
    assert isinstance(result, JobResult)
    return result


def steps_while_resting(run: Run) -> int:
    """The steps of rank 0 until both ranks have waited five times more; they also do so now and then elsewhere."""
    steps, rests = run.num_steps(), [run.num_rests(rank) for rank in range(2)]
    eventually(lambda: all(run.num_rests(rank) > rests[rank] + 5 for rank in range(2)), "they wait")
    return run.num_steps() - steps


def test_a_loop_is_paused_and_cancelled(mark: Mark, cluster: Cluster, tmp_path: Path) -> None:
    with attached(cluster, mark, tmp_path / "loop", LOOP_RESTS="1") as (run, job):
        job.pause()
        eventually(lambda: view_of(cluster, job).state is JobState.PAUSED, "it is shown as paused")
        eventually(lambda: steps_while_resting(run) == 0, "both ranks wait")
        assert steps_while_resting(run) == 0
        steps = run.num_steps()
        job.pause(is_paused=False)
        eventually(lambda: run.num_steps() > steps + 3, "it goes on")
        job.cancel()
        assert run.process.wait(400) != 0
        assert end_of(job).state is JobState.CANCELLED
        assert "the loop is ended: cancelled by request" in run.text
        assert run.num_steps(0) == run.num_steps(1)
        assert 'own_loop.py", line' not in run.text


@pytest.mark.gate
def test_a_checkpoint_on_request_goes_on_exactly(mark: Mark, cluster: Cluster, tmp_path: Path) -> None:
    place = tmp_path / "checkpoints"
    env = {"ELCHE_CHECKPOINT_DIR": str(place), "LOOP_EL_CHE": "1"}
    with attached(cluster, mark, tmp_path / "loop", **env) as (run, job):
        job.checkpoint()
        saved = eventually(lambda: list(place.glob("step-*/manifest.json")), "the checkpoint is whole")[0].parent
        view = eventually(lambda: next(iter(view_of(cluster, job).checkpoints), None), "it is told to the coordinator")
        assert view.path == str(saved)
        for pid in mark.living("own_loop.py"):
            os.kill(pid, signal.SIGKILL)
        result = end_of(job)
        assert result.state is JobState.FAILED
        assert "disconnected without reporting an exit" in result.error
    position = json.loads((saved / "manifest.json").read_text())["training"]["loop"]
    for path in (tmp_path / "loop").glob("rank-*"):  # what came after the checkpoint was never made, for the model
        lines = path.read_text().splitlines()[: position["num_steps"]]
        path.write_text("\n".join(lines) + "\n")
    epochs = position["epoch"] + 3
    more = {"ELCHE_RESUME": str(place), "LOOP_EPOCHS": str(epochs), "LOOP_SLEEP_S": "0"}
    with running(mark, tmp_path / "loop", *TWO_RANKS, **more) as run:
        first, second = run.ended()
        assert run.counted() == every_sample_once(epochs)
    assert first["digest"] == second["digest"]
    with running(mark, tmp_path / "one", **more) as run:
        run.ended()
        left = run.counted()
    assert left[epochs - 1] == Counter(range(200))
    assert sum(left.get(position["epoch"], Counter()).values()) == 200 - position["done"]


@pytest.mark.long(reason="others begin with elche run, too")
def test_elche_run_starts_a_process_for_each_device(elche: Callable[..., Command], mark: Mark, tmp_path: Path) -> None:
    env = {"LOOP_NOTES": str(tmp_path), "LOOP_EL_CHE": "1", "OMP_NUM_THREADS": "1"}
    done = elche(
        "run", str(LOOP), "--ranks", "2", "--slow", "1=3", "--device", "cpu", "--out", "out", "--json", env=env
    )
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert result["committed_samples"] == [200, 200, 200]
    assert result["ranks"][0]["batches"] > 1.5 * result["ranks"][1]["batches"] > 0
    assert '"rank": 0' in (tmp_path / "out" / "rank-0.log").read_text()
    assert "goes on without it" not in (tmp_path / "out" / "rank-0.log").read_text()
    counted = Run(subprocess.Popen(["true"], text=True), tmp_path, tmp_path).counted()
    assert counted == every_sample_once(3)
    refused = elche("run", str(LOOP), "--epochs", "3")
    assert refused.code == 2
    assert "takes no --epochs: set them in the script" in refused.complaint


@pytest.mark.long(reason="a measurement of a moment")
def test_ranks_of_a_loop_share_the_processors_as_those_of_a_job_do(
    elche: Callable[..., Command], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    each = threads_per_rank(2)
    for env, expected in ((None, f"threads {each}\n"), ({"OMP_NUM_THREADS": "70"}, "threads 70\n")):
        out = f"out-{bool(env)}"
        done = elche("run", str(JOBS / "threads.py"), "--ranks", "2", "--device", "cpu", "--out", out, env=env)
        assert done.code == 0, done.err
        for rank in (0, 1):
            assert expected in (tmp_path / out / f"rank-{rank}.log").read_text()


@pytest.mark.gate
def test_a_loop_goes_on_without_its_coordinator(mark: Mark, tmp_path: Path) -> None:
    env = {"LOOP_EPOCHS": "4", "LOOP_SLEEP_S": "0.01"}
    with (
        coordinator(mark, tmp_path) as one,
        running(mark, tmp_path / "loop", *TWO_RANKS, ELCHE_COORDINATOR=one.address, **env) as run,
    ):
        eventually(lambda: run.num_steps() > 5, "it trains")
        one.process.kill()
        first, second = run.ended()
        assert run.counted() == every_sample_once(4)
    assert first["digest"] == second["digest"]
    assert run.text.count("this rank goes on, and tries again") == 2


def test_a_loop_that_starts_while_its_coordinator_is_started_again_waits_for_it(mark: Mark, tmp_path: Path) -> None:
    with coordinator(mark, tmp_path) as one:
        address = one.address
    with running(mark, tmp_path / "loop", ELCHE_COORDINATOR=address) as run:
        eventually(lambda: "no coordinator answers" in run.text, "it is refused")
        with coordinator(mark, tmp_path, listen=address):
            run.ended()
    assert run.text.count("no coordinator answers") == 1


def test_a_coordinator_that_is_not_there_is_one_clear_line(mark: Mark, tmp_path: Path) -> None:
    with running(mark, tmp_path / "loop", ELCHE_COORDINATOR="127.0.0.1:9") as run:
        assert run.process.wait(400) == 1
    assert "no coordinator answers at 127.0.0.1:9" in run.text


LONG = pytest.mark.long(reason="beside one in the gate that goes the same way")
COUNTING = Path(__file__).parents[2] / "benchmarks" / "counting_loop.py"


def counted_to_the_end(run: Run, num_left: int, epochs: int = 3) -> list[dict[str, Any]]:
    """What the ranks that are left said: each sample is in the model once per epoch."""
    told = run.ended()
    assert [one["rank"] for one in told] == list(range(num_left))
    assert all(one["counts"] == [float(epochs)] for one in told), told
    return told


@pytest.mark.parametrize(
    ("kill", "left", "more"),
    [
        pytest.param("0=7", [1, 2], {"LOOP_WORKERS": "1"}, marks=LONG),
        pytest.param("1=7", [0, 2], {}, marks=LONG),
        pytest.param("2=4", [0, 1], {"LOOP_EL_CHE": "3"}, marks=LONG),
        ("0=2 2=3", [1], {"LOOP_EL_CHE": "2"}),
    ],
)
def test_a_loop_goes_on_without_a_rank_that_was_killed(
    mark: Mark, cluster: Cluster, tmp_path: Path, kill: str, left: list[int], more: dict[str, str]
) -> None:
    before = {job.job_id for job in cluster.client.jobs()}
    env = {"ELCHE_COORDINATOR": cluster.coordinator.address, "LOOP_KILL": kill, **more}
    with running(mark, tmp_path / "loop", own_launchers.__file__, "3", script=COUNTING, **env) as run:
        told = counted_to_the_end(run, len(left))
        assert "nobody trains" not in run.text
    assert sorted(one["first"] for one in told) == left
    (job,) = (one for one in cluster.client.jobs() if one.job_id not in before)
    result = cluster.client.job(job.job_id).result()
    assert result.state is JobState.SUCCEEDED
    assert result.committed_samples == (240, 240, 240)


OWN_BATCHES = """
import os
import signal

import torch
from torch import nn

from elche_worker import Trainer

model = nn.Linear(1, 1)
trainer = Trainer.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(20):
    if step == 5 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    model(torch.full((4, 1), float(trainer.rank + step))).mean().backward()
    trainer.step()
"""


def test_a_loop_that_takes_its_batches_itself_says_what_nobody_trains_without_a_rank(
    mark: Mark, cluster: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "own_batches.py").write_text(OWN_BATCHES)
    env = {"ELCHE_COORDINATOR": cluster.coordinator.address}
    with running(mark, tmp_path, own_launchers.__file__, "2", script=tmp_path / "own_batches.py", **env) as run:
        assert run.process.wait(400) == 0, run.text
    assert "elche: 1 of 2 ranks go on\n" in run.text
    told = "so nobody trains what rank 1 would have taken: if each rank has a part of the data, about 50% of it is not"
    assert told in run.text


@LONG
def test_a_rank_that_is_killed_before_the_script_is_a_job_ends_the_run(
    elche: Callable[..., Command], tmp_path: Path
) -> None:
    path = tmp_path / "early.py"
    path.write_text(
        "import os, signal\nfrom elche_worker import Trainer\n"
        "if os.environ['RANK'] == '1':\n    os.kill(os.getpid(), signal.SIGKILL)\n" + COUNTING.read_text()
    )
    env = {"LOOP_NOTES": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = elche("run", str(path), "--ranks", "2", "--device", "cpu", env=env)
    assert done.code == 1
    assert "rank 1 was killed by SIGKILL" in done.err


@LONG
def test_a_loop_that_wants_it_ends_with_any_rank(elche: Callable[..., Command], tmp_path: Path) -> None:
    env = {"LOOP_NOTES": str(tmp_path), "LOOP_KILL": "1=7", "OMP_NUM_THREADS": "1", "LOOP_ON_LOSS": "fail"}
    done = elche("run", str(COUNTING), "--ranks", "3", "--device", "cpu", env=env)
    assert done.code == 1
    assert "rank 1 was killed by SIGKILL" in done.err
    assert "another rank of this loop has ended" in done.err


@pytest.mark.long(reason="torchrun starts PyTorch once more")
def test_under_torchrun_a_rank_that_was_killed_ends_all_soon(mark: Mark, tmp_path: Path) -> None:
    env = {"LOOP_KILL": "1=7", "LOOP_EPOCHS": "1000"}
    with running(mark, tmp_path / "loop", *TORCHRUN, script=COUNTING, **env) as run:
        steps = tmp_path / "loop" / "steps-1"
        eventually(lambda: steps.exists() and steps.read_text() == "7", "the rank dies at its next step")
        assert run.process.wait(400) != 0
    assert "Signal 9 (SIGKILL)" in run.text


ENDS_BEFORE = """
import os
import sys

from elche_worker import Trainer

if os.environ["RANK"] == "1":
    sys.exit()
import torch

model = torch.nn.Linear(1, 1)
Trainer.setup(model, torch.optim.SGD(model.parameters()))
"""


@pytest.mark.long(reason="torchrun starts PyTorch once more")
def test_under_torchrun_a_rank_that_has_ended_before_its_first_trainer_is_named(mark: Mark, tmp_path: Path) -> None:
    """The others waited for it for half an hour."""
    path = tmp_path / "ends_before.py"
    path.write_text(ENDS_BEFORE)
    with running(mark, tmp_path, *TORCHRUN, script=path, TEST_EXECUTES="1") as run:
        assert run.process.wait(400) != 0
    assert "rank 1 has ended after no trainer; every rank has to set up as many trainers as the others" in run.text

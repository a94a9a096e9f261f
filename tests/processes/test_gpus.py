"""Jobs whose ranks believe that they have a GPU each (`support.gpus`), and average over NCCL's strict stand-in."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from processes.test_hung_ranks import trains
from processes.test_lost_ranks import Story, begin, succeeds

from elche_client import Client
from elche_client.events import Checkpoint, EvaluationReport, JobState, MembershipReport, RoundReport
from support import own_launchers, two_ranks
from support.gpus import VARIABLE
from support.real_processes import Cluster, Mark, agent, command, coordinator, eventually

__all__ = ["begin"]

JOBS = Path(__file__).parent / "jobs"
JobFile = Callable[..., Path]
NUM_SAMPLES, EPOCHS = 500, 3  # of jobs/linear.py
ON_THE_DEVICE = (
    "import dataclasses",
    "def train_step_of_cuda(model, batch):",
    "    assert next(model.parameters()).is_cuda and batch[0].is_cuda",
    "    return train_step(model, batch)",
    "job = dataclasses.replace(job, evaluate=None, train_step=train_step_of_cuda)",
)
ONCE = (
    "from elche_worker.collectives.nccl import Communicator",
    "once, calls = NOTES.with_name('once'), []",
    "def ends_once(number):",
    "    calls.append(1)",
    "    if os.environ['ELCHE_RANK'] == '1' and len(calls) == number and not once.exists():",
    "        once.touch()",
    "        os.kill(os.getpid(), SIGNAL)",
)
"""Rank 1 gets a signal once, at the call of this number."""
IN_A_COLLECTIVE = (
    *ONCE,
    "run = Communicator.run",
    "Communicator.run = lambda self, begin: ends_once(4) or run(self, begin)",
)
IN_THE_MAKING = (
    *ONCE,
    "made = Communicator.__init__",
    "Communicator.__init__ = lambda self, *given: ends_once(1) or made(self, *given)",
)
"""Rank 0 waits in the making of its communicator, which nothing can abort."""

ON_THEIR_DEVICES = (
    "import dataclasses",
    "def train_step_there(model, batch):",
    "    assert next(model.parameters()).is_cuda == batch[0].is_cuda == (os.environ['ELCHE_RANK'] == '0')",
    "    return train_step(model, batch)",
    "job = dataclasses.replace(job, evaluate=None, train_step=train_step_there)",
)

COUNTED = (
    "import dataclasses",
    "def train_step_of_cuda(model, batch):",
    "    assert model.counts.is_cuda and batch.is_cuda",
    "    return train_step(model, batch)",
    "evaluate = lambda model: {'total': float(model.counts.sum())}",
    "job = dataclasses.replace(job, train_step=train_step_of_cuda, evaluate=evaluate)",
)


@pytest.fixture(scope="module")
def gpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A coordinator, and an agent with two GPUs."""
    mark, folder = Mark(), tmp_path_factory.mktemp("gpus")
    environment = {VARIABLE: "2", "TMPDIR": str(folder)}
    with (
        coordinator(mark, folder) as one,
        agent(mark, folder, one.address, devices="auto", env=environment) as other,
        Client(one.address, token="") as client,
    ):
        yield Cluster(one, other, client, mark)
    mark.assert_none_left()


def trained(gpus: Cluster, path: Path, backend: str, epochs: int = EPOCHS, **options: object) -> tuple[str, bytes]:
    """Trains on two unequal ranks, equal after every round, each sample once; how they averaged, and the model."""
    options |= {"backend": backend, "epochs": epochs, "slow_factors": {1: 2.0}}
    job = gpus.client.submit(path, num_ranks=2, verify_rounds=True, **options)  # type: ignore[arg-type]
    result = job.result()
    assert result.state is JobState.SUCCEEDED
    assert result.committed_samples == (NUM_SAMPLES,) * epochs
    backend = next(one.backend for one in gpus.client.jobs() if one.job_id == job.id)
    return backend, Path(result.model).read_bytes()


def test_an_agent_finds_its_gpus(gpus: Cluster) -> None:
    assert "offers cuda:0 NVIDIA Simulated, cuda:1 NVIDIA Simulated" in gpus.agent.log.read_text()


def test_ranks_with_gpus_make_the_same_model_over_gloo_and_nccl_bit_for_bit(gpus: Cluster, job_file: JobFile) -> None:
    """Under `sync` the rounds do not depend on time, so that nothing but the way differs."""
    path = job_file("linear.py", *ON_THE_DEVICE)
    ways, models = zip(
        *(trained(gpus, path, backend, 1, policy="sync", anchor=None) for backend in ("gloo", "auto")), strict=True
    )
    assert [way.split()[0] for way in ways] == ["gloo", "nccl"]
    assert len(set(models)) == 1


@pytest.mark.gate
@pytest.mark.parametrize("memory", ["auto", "host"])
def test_a_gpu_and_a_cpu_train_one_job_over_gloo(mark: Mark, tmp_path: Path, job_file: JobFile, memory: str) -> None:
    environment = {VARIABLE: "1", "TMPDIR": str(tmp_path)}
    with (
        coordinator(mark, tmp_path) as one,
        agent(mark, tmp_path, one.address, devices="cuda:0,cpu", env=environment) as other,
        Client(one.address, token="") as client,
    ):
        path = job_file("linear.py", "import os", *ON_THEIR_DEVICES)
        backend, _ = trained(Cluster(one, other, client, mark), path, "auto", memory=memory)
    assert backend == "gloo (rank 1 is on cpu)"


def test_ranks_of_one_run_share_a_gpu_that_is_named(mark: Mark, tmp_path: Path, job_file: JobFile) -> None:
    """On a real one such a run waited for a second slot forever."""
    given = [
        "--device",
        "cuda:0",
        "--ranks",
        "2",
        "--slow",
        "1=2",
        "--verify",
        "--json",
        "--out",
        str(tmp_path / "out"),
    ]
    path, environment = job_file("linear.py", *ON_THE_DEVICE), {VARIABLE: "1", "TMPDIR": str(tmp_path)}
    done = command(mark, "elche_client", "run", str(path), *given, cwd=tmp_path, env=environment)
    assert done.code == 0, done.err
    result = json.loads(done.out.splitlines()[-1])
    assert [one["device"] for one in result["ranks"]] == ["cuda:0 NVIDIA Simulated"] * 2
    assert result["committed_samples"] == [NUM_SAMPLES] * EPOCHS


@pytest.mark.gate
@pytest.mark.parametrize(
    ("where", "how", "averaging"),
    [(IN_A_COLLECTIVE, 9, "overlapped"), (IN_A_COLLECTIVE, 19, "blocking"), (IN_THE_MAKING, 9, "overlapped")],
)
def test_a_rank_that_dies_or_stops_is_replaced_and_the_other_trains_on(
    gpus: Cluster, job_file: JobFile, where: tuple[str, ...], how: int, averaging: str
) -> None:
    path = job_file("linear.py", *ON_THE_DEVICE, f"SIGNAL = {how}", *where)
    job = gpus.client.submit(path, num_ranks=2, backend="nccl", averaging=averaging, verify_rounds=True)
    *events, result = job.watch()
    assert result.state is JobState.SUCCEEDED
    assert result.committed_samples == (NUM_SAMPLES,) * EPOCHS
    assert {event.rank for event in events if isinstance(event, MembershipReport)} == {1}


def test_a_loop_of_the_users_own_shares_batches_over_nccl(tmp_path: Path) -> None:
    """`cpu:gloo,cuda:nccl` of `init_process_group`, with the store of the launcher, which lives."""
    text, of_host = (JOBS / "own_loop.py").read_text(encoding="utf-8"), "model(x), x.sum(1, keepdim=True)"
    assert of_host in text
    script = tmp_path / "own_loop.py"
    script.write_text(text.replace(of_host, "model(x.cuda()), x.cuda().sum(1, keepdim=True)"), encoding="utf-8")
    environment = {VARIABLE: "2", "TMPDIR": str(tmp_path), "LOOP_NOTES": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, two_ranks.__file__, str(script)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first, second = (json.loads(line) for line in done.stdout.splitlines())
    assert first["digest"] == second["digest"]
    assert "2 devices: Simulated" in done.stderr


@pytest.mark.gate
def test_a_loop_over_nccl_ends_with_one_line_when_a_rank_has_died(gpus: Cluster, tmp_path: Path) -> None:
    """The survivor waits in a collective that nothing but the end of its process ends."""
    text, raised = (JOBS / "own_loop.py").read_text(encoding="utf-8"), 'raise ValueError("on purpose")'
    assert raised in text
    script = tmp_path / "own_loop.py"
    script.write_text(
        text.replace(raised, "os.kill(os.getpid(), 9)").replace("model(x), x", "model(x.cuda()), x.cuda()")
    )
    given = {"LOOP_NOTES": str(tmp_path), "LOOP_FAIL_AT": "7", "LOOP_EPOCHS": "1000", "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, VARIABLE: "2", "TMPDIR": str(tmp_path), **given}
    done = subprocess.run(
        [sys.executable, own_launchers.__file__, "2", str(script)],
        env={**environment, "ELCHE_COORDINATOR": gpus.coordinator.address},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    (line,) = (line for line in done.stderr.splitlines() if "rank 0 exits" in line)
    assert "rank 1 on" in line
    assert "disconnected without reporting an exit" in line


def member_changes(story: Story) -> list[str]:
    return [report.text for report in story.of(MembershipReport)]


def test_ranks_come_and_go_over_nccl_and_the_coordinator_starts_again(
    mark: Mark, tmp_path: Path, begin: Callable[..., Story]
) -> None:
    """One job: a third rank joins, one is killed between rounds, the coordinator is killed and started again, the third
    rank is let go. Each sample counts once.
    """
    with ExitStack() as stack:
        one = stack.enter_context(coordinator(mark, tmp_path))
        environment = {VARIABLE: "3", "TMPDIR": str(tmp_path)}
        stack.enter_context(agent(mark, tmp_path, one.address, devices="auto", env=environment))
        client = stack.enter_context(Client(one.address, token="", reconnect_s=60))
        story = begin(
            *COUNTED, "BATCH_S = 0.1", client=client, num_ranks=2, backend="nccl", checkpoint_every_epochs=1, epochs=12
        )
        trains(story, 0, 1, num_batches=4)
        story.job.scale(3)
        trains(story, 2, num_batches=4)
        os.kill(story.pids(1)[0], signal.SIGKILL)
        eventually(lambda: story.is_back(1), "the rank that was killed trains again")
        one.process.kill()
        one.process.wait()
        (tmp_path / "again").mkdir()
        two = stack.enter_context(coordinator(mark, tmp_path / "again", data=one.data, listen=one.address))
        seen = len(story.of(RoundReport))
        eventually(lambda: len(story.of(RoundReport)) > seen + 1, "rounds after the restart")
        story.job.scale(2)
        eventually(lambda: any("rank 2 has left" in text for text in member_changes(story)), "it is let go")
        story.hurry()
        succeeds(story, epochs=12, survivors=(0, 2), is_told_all=False)
        assert len(story.pids(1)) >= 2
        assert story.of(Checkpoint)
        assert story.of(EvaluationReport)
        assert next(view.backend for view in client.jobs()).startswith("nccl")
        assert two.new_errors() == []

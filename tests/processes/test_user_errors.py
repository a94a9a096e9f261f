"""User code that goes wrong: the job fails with the user's own words, and nothing is left behind."""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from elche.errors import InvalidJob, JobFailed
from elche_client import Client
from elche_client.client import JobHandle
from elche_client.events import JobResult, JobState, RoundReport
from elche_worker.user.loading import load_job
from support.real_processes import Cluster, Command, Mark, agent, coordinator, eventually

pytestmark = pytest.mark.slow(reason="every test runs a whole command")

JobFile = Callable[..., Path]
REPLACE = "import dataclasses\njob = dataclasses.replace(job, {})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """Lines added to jobs/linear.py, and what must be said of them."""

    lines: str
    replaced: str
    said: tuple[str, ...]
    shown: str = ""
    """In the traceback."""
    invalid: bool = False


MISTAKES = {
    "model raises": Mistake(
        lines="def broken():\n    raise ValueError('no such backbone')",
        replaced="model=broken",
        said=("ValueError: no such backbone", "linear.py, line", "rank 0"),
        shown="raise ValueError('no such backbone')",
    ),
    "model closes what others have opened": Mistake(
        lines="def broken():\n    os.closerange(3, 4096)\n    return nn.Linear(8, 1)",
        replaced="model=broken",
        said=("rank 0", "left with exit code 1"),
        shown="this rank has failed: the job's code has closed file descriptors that others have opened",
    ),
    "dataset raises": Mistake(
        lines="def broken():\n    return open('/no/such/file')",
        replaced="dataset=broken",
        said=("FileNotFoundError", "/no/such/file", "linear.py, line", "rank 0"),
        shown="open('/no/such/file')",
    ),
    "getitem raises": Mistake(
        lines="class Broken(Points):\n    def __getitem__(self, i):\n        raise OSError(f'sample {i // 1000}')",
        replaced="dataset=Broken",
        said=("OSError: sample 0", "linear.py, line", "rank 0 at batch 0"),
        shown="raise OSError(f'sample {i // 1000}')",
    ),
    "collate_fn gives nothing": Mistake(
        lines="def broken(samples):\n    return None",
        replaced="collate_fn=broken",
        said=("nothing was trained in epoch 1: collate_fn or the data set gave None for every batch",),
        invalid=True,
    ),
    "evaluate raises": Mistake(
        lines="def broken(model):\n    return {'accuracy': 1 / 0}",
        replaced="evaluate=broken, epochs=1",
        said=("ZeroDivisionError", "linear.py, line", "rank 0"),
        shown="return {'accuracy': 1 / 0}",
    ),
    "eval_metrics raises": Mistake(
        lines="def broken(sums):\n    return {'f1': sums['none']}",
        replaced="evaluate=None, eval_dataset=Points, eval_metrics=broken, "
        "eval_step=lambda model, batch: {'counts': torch.ones(2)}",
        said=("KeyError: 'none'", "linear.py, line", "rank 0"),
        shown="return {'f1': sums['none']}",
    ),
    "loss of many values": Mistake(
        lines="def broken(model, batch):\n    return model(batch[0])",
        replaced="train_step=broken",
        said=("train_step() must return a scalar loss", "(16, 1)", "linear.py"),
        invalid=True,
    ),
    "evaluate returns a number": Mistake(
        lines="",
        replaced="evaluate=lambda model: 0.5, epochs=1",
        said=("evaluate() must return a dict", "float"),
        invalid=True,
    ),
    "sys.exit in train_step": Mistake(
        lines="import sys\ndef broken(model, batch):\n    sys.exit(3)",
        replaced="train_step=broken",
        said=("SystemExit: 3", "linear.py, line", "rank 0 at batch 0"),
        shown="sys.exit(3)",
    ),
    "os._exit in train_step": Mistake(
        lines="def broken(model, batch):\n    print('about to leave', flush=True)\n    os._exit(0)",
        replaced="train_step=broken",
        said=("rank 0", "exit code 0", "its log is"),
    ),
    "loss without a gradient": Mistake(
        lines="def broken(model, batch):\n    return model(batch[0]).detach().mean()",
        replaced="train_step=broken",
        said=("no gradient", "train_step()"),
        invalid=True,
    ),
    "backward in train_step": Mistake(
        lines="def broken(model, batch):\n    (loss := model(batch[0]).square().mean()).backward()\n    return loss",
        replaced="train_step=broken",
        said=("linear.py: train_step() has called backward()", "without calling backward() or step()"),
        invalid=True,
    ),
    "several lines": Mistake(
        lines="def broken(model, batch):\n    raise ValueError('first line\\nsecond line')",
        replaced="train_step=broken",
        said=("ValueError", "first line", "rank 0 at batch 0"),
    ),
    "lone surrogate": Mistake(
        lines="def broken(model, batch):\n    raise ValueError('\\udcff is not UTF-8')",
        replaced="train_step=broken",
        said=("ValueError", "linear.py, line", "rank 0 at batch 0"),
    ),
    "long message": Mistake(
        lines="def broken(model, batch):\n    raise ValueError('x' * 6_000_000)",
        replaced="train_step=broken",
        said=("ValueError", "linear.py, line", "rank 0 at batch 0"),
    ),
    "record_scalar of many values": Mistake(
        lines="def broken(model, batch):\n    record_scalar('x', torch.ones(3))\n    return model(batch[0]).mean()",
        replaced="train_step=broken",
        said=("linear.py, line", "rank 0 at batch 0"),
    ),
    "nan": Mistake(
        lines="def broken(model, batch):\n    return model(batch[0]).mean() * float('nan')",
        replaced="train_step=broken",
        said=("finite", "rank 0"),
    ),
}


@pytest.fixture(scope="module")
def mistaken_jobs(shared_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, JobHandle]]:
    """All mistakes as jobs of one rank, submitted together: they run side by side while the tests look at them."""
    folder = tmp_path_factory.mktemp("mistakes")
    text = (Path(__file__).parent / "jobs" / "linear.py").read_text(encoding="utf-8")
    handles = {}
    for number, (name, mistake) in enumerate(MISTAKES.items()):
        path = folder / str(number) / "linear.py"
        path.parent.mkdir()
        path.write_text("\n".join([text, mistake.lines, REPLACE.format(mistake.replaced), ""]), encoding="utf-8")
        handles[name] = shared_cluster.client.submit(path, num_ranks=1, name=name)
    yield handles
    shared_cluster.mark.assert_none_left("elche rank")


@pytest.mark.parametrize(
    "name",
    list(MISTAKES),
)
def test_a_mistake_is_told(mistaken_jobs: dict[str, JobHandle], name: str) -> None:
    mistake = MISTAKES[name]
    with pytest.raises(JobFailed) as raised:
        mistaken_jobs[name].result()
    error = raised.value
    for words in mistake.said:
        assert words in str(error), str(error)
    assert mistake.shown in error.traceback, error.traceback
    assert not mistake.shown or "elche_worker/" not in error.traceback, error.traceback
    assert error.invalid == mistake.invalid


def test_one_rank_raises_in_the_middle(cluster: Cluster, job_file: JobFile) -> None:
    """Rank 1 raises at its batch 7, between rounds; rank 0 leaves a round that will never be."""
    lines = """
def broken(model, batch, count=[0]):
    count[0] += 1
    if os.environ["ELCHE_RANK"] == "1" and count[0] == 8:
        raise RuntimeError("the eighth batch")
    return train_step(model, batch)
"""
    path = job_file("linear.py", lines, REPLACE.format("train_step=broken, epochs=100"))
    job = cluster.client.submit(path, num_ranks=2)
    with pytest.raises(JobFailed) as raised:
        job.result()
    assert "RuntimeError: the eighth batch" in str(raised.value)
    assert f"({path}, line " in str(raised.value)
    assert str(raised.value).endswith("on rank 1 at batch 7")
    assert 'raise RuntimeError("the eighth batch")' in raised.value.traceback
    assert not raised.value.invalid


def test_endless_user_code_ends_with_the_job(cluster: Cluster, job_file: JobFile) -> None:
    """Rank 0 spins in train_step, deaf to everything; cancelled, it is gone within the grace times."""
    lines = """
def endless(model, batch, count=[0]):
    count[0] += 1
    while count[0] > 5 and os.environ["ELCHE_RANK"] == "0":
        pass
    return train_step(model, batch)
"""
    job = cluster.client.submit(job_file("linear.py", lines, REPLACE.format("train_step=endless")), num_ranks=2)
    assert ends_after_round(job).state is JobState.CANCELLED


def test_user_code_that_never_lets_go(cluster: Cluster, job_file: JobFile) -> None:
    """A long call in C holds the interpreter: no thread of the rank runs, so its agent ends it."""
    lines = """
def stuck(model, batch, count=[0]):
    count[0] += 1
    if count[0] > 5:
        sum(__import__("itertools").repeat(1, 10**11))
    return train_step(model, batch)
"""
    job = cluster.client.submit(job_file("linear.py", lines, REPLACE.format("train_step=stuck")), num_ranks=1)
    assert ends_after_round(job).state is JobState.CANCELLED


def ends_after_round(job: JobHandle) -> JobResult:
    """Cancels the job once a round is committed; its result, which comes in time."""
    watch = job.watch()
    eventually(lambda: isinstance(next(watch), RoundReport), "a round")
    job.cancel()
    return eventually(lambda: event if isinstance(event := next(watch), JobResult) else None, "the result", 12.0)


def test_ranks_that_disagree(cluster: Cluster, job_file: JobFile) -> None:
    replaced = REPLACE.format("batch_size=8 + int(os.environ['ELCHE_RANK'])")
    job = cluster.client.submit(job_file("linear.py", replaced), num_ranks=2)
    with pytest.raises(JobFailed, match="ranks 0 and 1 differ in batch_size: 8 and 9") as raised:
        job.result()
    assert raised.value.invalid


def test_ranks_that_have_other_data_train_nothing(cluster: Cluster, job_file: JobFile) -> None:
    """As two hosts with two versions of the files: as many samples, of the same shapes."""
    replaced = REPLACE.format("dataset=lambda: Points(seed=1 + int(os.environ['ELCHE_RANK']))")
    path = job_file("linear.py", replaced)
    with pytest.raises(
        JobFailed, match=r"ranks have different data: sample \d+ of rank 1 on \S+ is not that of rank 0"
    ):
        cluster.client.submit(path, num_ranks=2).result()
    assert not list(path.parent.glob("linear.rank-*")), "a rank has trained"


def test_processes_of_user_code_end_with_their_rank(cluster: Cluster, job_file: JobFile) -> None:
    """A pool of workers for the data, say: daemons that Python would end at exit."""
    lines = """
import subprocess, sys

def with_workers():
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)  # a worker of the user"])
    return Points()
"""
    path = job_file("linear.py", lines, REPLACE.format("dataset=with_workers, epochs=1"))
    cluster.client.submit(path, num_ranks=1).result()
    cluster.mark.assert_none_left("a worker of the user", limit_s=400)


@pytest.mark.parametrize(
    ("replaced", "said"),
    [
        ("batch_size=0", "batch_size must be at least 1, not 0"),
        ("epochs=0", "epochs must be at least 1, not 0"),
        ("optimizer=None", "optimizer must be a function, not NoneType"),
        ("policy='weekly'", "policy must be one of cadence,"),
    ],
)
def test_wrong_values_in_the_job(job_file: JobFile, elche: Callable[..., Command], replaced: str, said: str) -> None:
    """Refused before anything is started: exit code 2, one line, no folder."""
    done = elche("run", str(job_file("linear.py", REPLACE.format(replaced))), "--ranks", "2")
    assert done.code == 2
    assert said in done.complaint


def test_a_model_instead_of_a_function(job_file: JobFile) -> None:
    path = job_file("linear.py", REPLACE.format("model=nn.Linear(8, 1)"))
    with pytest.raises(InvalidJob, match="model must be a function"):
        load_job(path.read_text(), str(path))


AS_A_SCRIPT = """
import argparse, atexit, functools, json

json.dumps = functools.partial(json.dumps, indent=1)
parser = argparse.ArgumentParser()
parser.add_argument("--rate", type=float, default=1.0)
assert parser.parse_args().rate == 1.0
atexit.register(print, "said at exit")
if (pid := os.fork()) == 0:
    raise SystemExit(0)
assert os.waitpid(pid, 0)[1] == 0
job = dataclasses.replace(job, epochs=1)
"""


def test_a_file_may_do_what_scripts_do(elche: Callable[..., Command], cluster: Cluster, job_file: JobFile) -> None:
    """Read arguments, of which there are none; print at exit; fork; change what json does by default; begin with a byte
    order mark, as some editors save files: that was told as a syntax error.
    """
    path = job_file("linear.py", "import dataclasses", AS_A_SCRIPT)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    done = elche("submit", str(path), "--ranks", "2", "--watch", "--coordinator", cluster.coordinator.address)
    assert done.code == 0, done.err
    assert "said at exit" not in done.out


@pytest.mark.parametrize(
    ("line", "how"),
    [("os.kill(os.getpid(), 9)", "was killed by SIGKILL"), ("os._exit(7)", "exited with code 7")],
)
def test_a_file_that_ends_its_process(elche: Callable[..., Command], job_file: JobFile, line: str, how: str) -> None:
    path = job_file("linear.py", line)
    done = elche("run", str(path), "--ranks", "1")
    assert (done.code, done.complaint) == (
        2,
        f"elche: {path} could not be checked, the process that loaded it {how}",
    )
    assert not (path.parent / "runs").exists()


def test_a_file_that_closes_what_others_have_opened(elche: Callable[..., Command], job_file: JobFile) -> None:
    """As helpers do that make daemons: it was told by a traceback of elche's."""
    path = job_file("linear.py", "os.closerange(3, 4096)")
    done = elche("run", str(path), "--ranks", "1")
    assert done.code == 2
    assert done.err.splitlines() == [
        f"{path} has closed file descriptors that others have opened, as os.closerange does",
        f"elche: {path} could not be checked, the process that loaded it exited with code 2",
    ]


LOADS_FOR_EVER = (
    "Path(f'{__file__}.new').write_text(os.environ['KEY'])",
    "os.rename(f'{__file__}.new', f'{__file__}.loads')",
    "time.sleep(600)",
)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_a_run_ends_while_its_file_loads(
    mark: Mark, tmp_path: Path, job_file: JobFile, number: signal.Signals, code: int
) -> None:
    """Nothing is left of it; and what it was given in its environment was not an argument, which all users can see."""
    path = job_file("linear.py", *LOADS_FOR_EVER)
    command = [sys.executable, "-m", "elche_client", "run", str(path), "--env", "KEY"]
    env = mark.environment({"KEY": "of nobody else"})
    with subprocess.Popen(command, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True) as run:
        eventually(Path(f"{path}.loads").exists, "it loads")
        assert mark.living("of nobody else") == {}
        run.send_signal(number)
        assert run.wait(400) == code
    mark.assert_none_left()
    assert Path(f"{path}.loads").read_text() == "of nobody else"


def test_a_file_that_asks_is_told_that_nobody_answers(cluster: Cluster, job_file: JobFile) -> None:
    path = job_file("linear.py", "input('your name? ')")
    with pytest.raises(JobFailed, match="EOFError: EOF when reading a line"):
        cluster.client.submit(path, num_ranks=1).result()


def test_processes_of_user_code_end_with_a_killed_agent(mark: Mark, tmp_path: Path, job_file: JobFile) -> None:
    lines = 'import dataclasses, subprocess\nif NOTES.suffix != ".rank-none":\n    subprocess.Popen(["sleep", "999"])'
    path = job_file("linear.py", lines, "job = dataclasses.replace(job, epochs=100_000)")
    with (
        coordinator(mark, tmp_path) as one,
        agent(mark, tmp_path, one.address) as other,
        Client(one.address, token="") as client,
    ):
        client.submit(path, num_ranks=2)
        eventually(lambda: client.jobs()[0].num_rounds > 2, "it trains")
        assert len(mark.living("sleep 999")) == 2
        other.process.kill()
        mark.assert_none_left("sleep 999")

"""Bad input gets one clear line on stderr and exit code 2, and nothing is started."""

import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import click
import pytest

from elche.errors import ElcheError, NotAllowed
from elche_client import Client
from elche_coordinator.main import main as coordinator_main
from elche_coordinator.storage.sql.store import SqlStore
from elche_coordinator.storage.store import JobRow
from elche_worker.agent.main import main as worker_main
from support.real_processes import LIMIT_S, Cluster, Command, Coordinator, Mark, agent, command, coordinator

JobFile = Callable[..., Path]
REPLACE = "import dataclasses\njob = dataclasses.replace(job, {})"
TOKEN = {"ELCHE_TOKEN": "correct horse battery"}


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address at which nobody answers, held so that nobody begins to."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


@pytest.mark.parametrize("verb", ["run", "submit"])
def test_paths_that_are_no_file(cluster: Cluster, elche: Callable[..., Command], tmp_path: Path, verb: str) -> None:
    at = ("--coordinator", cluster.address) if verb == "submit" else ()
    missing = elche(verb, "missing.py", *at)
    folder = elche(verb, str(tmp_path), *at)
    assert (missing.code, folder.code) == (2, 2)
    assert "there is no file missing.py" in missing.complaint
    assert f"{tmp_path} is not a file" in folder.complaint


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1\n", "defines no `job`"),
        ("job = 'tomorrow'\n", "`job` must be a TrainingJob, not str"),
        ("def model(:\n    pass\n", "line 1: invalid syntax"),
    ],
    ids=["no job", "another type", "syntax error"],
)
def test_files_without_a_job(
    elche: Callable[..., Command], job_file: JobFile, tmp_path: Path, text: str, said: str
) -> None:
    done = elche("run", str(job_file("wrong.py", text=text)))
    assert done.code == 2
    assert said in done.complaint
    assert "wrong.py" in done.complaint
    assert not (tmp_path / "runs").exists()


def test_a_file_that_raises_shows_where(elche: Callable[..., Command], job_file: JobFile) -> None:
    done = elche("run", str(job_file("wrong.py", text="import torch\nx = torch.ones(2) @ torch.ones(3)\njob = x\n")))
    assert done.code == 2
    assert "x = torch.ones(2) @ torch.ones(3)" in done.err
    assert "wrong.py, line 2" in done.err.splitlines()[-1]
    assert "elche_worker/" not in done.err
    assert not done.out


@pytest.mark.parametrize(
    ("arguments", "lines", "said"),
    [
        ((), "NUM_SAMPLES = 0", "an empty data set"),
        (
            (),
            REPLACE.format("dataset=lambda: iter([1])"),
            "must return a data set with len() and [index], or an IterableDataset, not list_iterator",
        ),
        (("--policy", "weekly"), "", "policy must be one of cadence,"),
        (("--ranks", "2", "--slow", "2=3"), "", "rank 2 cannot be slowed: there are ranks 0 to 1"),
        (("--slow", "1=3"), "", "rank 1 cannot be slowed: there is only rank 0"),
        (("--device", "abacus"), "", "unknown device 'abacus'"),
        (("--epochs", "0"), "", "epochs must be at least 1, not 0"),
    ],
)
def test_jobs_that_cannot_be(
    elche: Callable[..., Command], job_file: JobFile, tmp_path: Path, arguments: tuple[str, ...], lines: str, said: str
) -> None:
    done = elche("run", str(job_file("linear.py", lines)), *arguments)
    assert done.code == 2
    assert said in done.complaint
    assert not (tmp_path / "runs").exists()


def test_a_length_that_is_no_whole_number_is_the_users_error(elche: Callable[..., Command], job_file: JobFile) -> None:
    done = elche("run", str(job_file("linear.py", "Points.__len__ = lambda _: 1.5")))
    assert done.code == 2
    assert "TypeError: 'float' object cannot be interpreted as an integer" in done.err.splitlines()[-1]


def test_submit_slows_a_rank_that_will_not_be(cluster: Cluster, job_file: JobFile) -> None:
    with pytest.raises(ElcheError, match="rank 7"):
        cluster.client.submit(job_file(), slow_factors={7: 3.0}, epochs=1).result()


@pytest.mark.parametrize("verb", ["submit", "jobs", "watch", "cancel"])
def test_nobody_answers(elche: Callable[..., Command], job_file: JobFile, nobody: str, verb: str) -> None:
    of = {"submit": [str(job_file())], "jobs": [], "watch": ["a-job"], "cancel": ["a-job"]}[verb]
    done = elche(verb, *of, "--coordinator", nobody)
    assert done.code == 2
    assert f"no coordinator answers at {nobody}: nothing listens there; start" in done.complaint


@pytest.mark.parametrize("address", ["here", "127.0.0.1:99999", "127.0.0.1:"])
def test_addresses_that_are_none(elche: Callable[..., Command], address: str) -> None:
    done = elche("jobs", "--coordinator", address)
    assert done.code == 2
    assert "HOST:PORT" in done.complaint


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(("--devices", "abacus"), "abacus"), (("--coordinator", "x:99999"), "HOST:PORT")],
    ids=["no device of torch", "no port"],
)
def test_an_agent_that_cannot_be(
    cluster: Cluster, mark: Mark, tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    at = ("--coordinator", cluster.address, "--devices", "cpu", *arguments)
    done = command(mark, "elche_worker.agent", *at, cwd=tmp_path, limit_s=LIMIT_S)
    assert done.code == 2
    assert said in done.complaint


def test_an_agent_that_can_write_nowhere_takes_no_jobs(mark: Mark, tmp_path: Path) -> None:
    """It once offered its slots, and failed all jobs that it was given, one after the other."""
    (tmp_path / "work").write_text("no folder")
    at = ("--coordinator", "127.0.0.1:1", "--devices", "cpu", "--work-dir", "work")
    done = command(mark, "elche_worker.agent", *at, cwd=tmp_path, limit_s=LIMIT_S)
    assert done.code == 2
    assert "--work-dir work cannot be written (File exists), and every job here would fail" in done.complaint


@pytest.mark.parametrize("verb", ["watch", "cancel"])
def test_a_job_that_nobody_knows(cluster: Cluster, elche: Callable[..., Command], verb: str) -> None:
    done = elche(verb, "no-such-job", "--coordinator", cluster.address)
    assert done.code == 2
    assert "no job has the id 'no-such-job'; `elche jobs` lists them" in done.complaint


def refused(mark: Mark, tmp_path: Path, *arguments: str) -> str:
    """The line with which a coordinator refuses its arguments."""
    done = command(mark, "elche_coordinator", "--data", "data", *arguments, cwd=tmp_path)
    assert done.code == 2, done
    return done.complaint


def test_a_coordinator_that_cannot_listen(mark: Mark, tmp_path: Path) -> None:
    assert "set ELCHE_TOKEN" in refused(mark, tmp_path, "--listen", "0.0.0.0:0")
    assert "set ELCHE_TOKEN" in refused(mark, tmp_path, "--listen", "[::]:0")
    assert "is not HOST:PORT" in refused(mark, tmp_path, "--listen", "7717")


@pytest.mark.parametrize(
    ("quotas", "why"),
    [
        (["ada"], "'ada' is not PROJECT=SLOTS, such as ada=4 or '*=2'"),
        (["=2"], "'=2' is not PROJECT=SLOTS"),
        (["ada=-1"], "'ada=-1' is not PROJECT=SLOTS"),
        (["ada=1", "ada=2"], "ada has two quotas"),
    ],
)
def test_quotas_that_are_none(quotas: list[str], why: str, mark: Mark, tmp_path: Path) -> None:
    done = command(mark, "elche_coordinator", *(f"--quota={one}" for one in quotas), cwd=tmp_path)
    assert done.code == 2
    assert why in done.err
    assert not (tmp_path / ".elche").exists()


@pytest.mark.parametrize("most", [16, 64])
def test_a_coordinator_that_may_have_few_files_open_says_so(mark: Mark, tmp_path: Path, most: int) -> None:
    """With 64 it took one connection, and `elche run` said that no coordinator answers; with 16 it had a traceback."""
    began = (sys.executable, "-m", "elche_coordinator", "--data", "data", "--listen", "127.0.0.1:0", "--http", "off")
    done = subprocess.run(
        ["sh", "-c", f'ulimit -n {most}; exec "$@"', "sh", *began],
        capture_output=True, text=True, timeout=LIMIT_S, cwd=tmp_path, env=mark.environment(), check=False,
    )  # fmt: skip
    assert done.returncode == 2, done
    assert f"may have only {most} files open, and each connection is one: raise the limit to 128 or more" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_port_in_use(cluster: Cluster, mark: Mark, tmp_path: Path) -> None:
    assert "port is in use" in refused(mark, tmp_path, "--listen", cluster.address)


def test_metrics_that_cannot_be_served(cluster: Cluster, mark: Mark, tmp_path: Path) -> None:
    line = refused(mark, tmp_path, "--listen", "127.0.0.1:0", "--http", cluster.address)
    assert f"the page and /metrics cannot be served on {cluster.address}" in line


@pytest.mark.parametrize("name", ["data", "data/bundles"])
def test_data_that_is_no_folder(mark: Mark, tmp_path: Path, name: str) -> None:
    """That of bundles ended in a traceback."""
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("a file")
    assert f"{name} cannot be used: it is not a folder" in refused(mark, tmp_path, "--listen", "127.0.0.1:0")


def test_data_that_is_no_database(mark: Mark, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "elche.sqlite").write_text("not a database " * 1000)
    line = refused(mark, tmp_path, "--listen", "127.0.0.1:0")
    assert "data/elche.sqlite is damaged (file is not a database): put back a copy" in line


def test_a_database_that_is_damaged_is_left_as_it_is(mark: Mark, tmp_path: Path) -> None:
    """It ended with a traceback, or after it had removed what ran jobs."""
    (tmp_path / "data").mkdir()
    path = tmp_path / "data" / "elche.sqlite"
    SqlStore.in_file(path).write([JobRow("a", "{}")], last=1, entries=b"what no code can read")
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("UPDATE jobs SET record = CAST(x'7b22ff' AS TEXT)")
    line = refused(mark, tmp_path, "--listen", "127.0.0.1:0")
    assert "data/elche.sqlite is damaged (Could not decode to UTF-8 column 'record'): put back a copy" in line
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("SELECT entries FROM tape").fetchall() == [(b"what no code can read",)]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    """A coordinator that listens everywhere and wants a token."""
    mark = Mark()
    with coordinator(mark, tmp_path_factory.mktemp("guarded"), env=TOKEN, listen="0.0.0.0:0") as one:
        one.address = one.address.replace("0.0.0.0", "127.0.0.1")
        yield one
        assert TOKEN["ELCHE_TOKEN"] not in one.log.read_text()
    mark.assert_none_left()


def test_those_with_the_token_get_in(
    guarded: Coordinator, mark: Mark, tmp_path: Path, elche: Callable[..., Command], job_file: JobFile
) -> None:
    with (
        agent(mark, tmp_path, guarded.address, env=TOKEN),
        Client(guarded.address, token="correct horse battery") as client,
    ):
        job = client.submit(job_file(), epochs=1, num_ranks=1)
        assert job.result().committed_samples == (500,)
    listed = elche("jobs", "--coordinator", guarded.address, env=TOKEN)
    assert listed.code == 0
    assert job.id in listed.out


@pytest.mark.parametrize("token", ["", "wrong", "correct hors"])
def test_clients_without_the_token_stay_out(guarded: Coordinator, job_file: JobFile, token: str) -> None:
    with Client(guarded.address, token=token) as client:
        for call in (client.jobs, lambda: client.submit(job_file()), lambda: client.cancel("x")):
            with pytest.raises(NotAllowed, match="set ELCHE_TOKEN"):
                call()


def test_commands_without_the_token(guarded: Coordinator, elche: Callable[..., Command]) -> None:
    done = elche("jobs", "--coordinator", guarded.address)
    assert done.code == 2
    assert "set ELCHE_TOKEN" in done.complaint


def test_watches_without_the_token(guarded: Coordinator, elche: Callable[..., Command]) -> None:
    done = elche("watch", "x", "--coordinator", guarded.address)
    assert done.code == 2
    assert "set ELCHE_TOKEN" in done.complaint


def test_agents_without_the_token(guarded: Coordinator, mark: Mark, tmp_path: Path) -> None:
    arguments = ("--coordinator", guarded.address, "--devices", "cpu")
    done = command(mark, "elche_worker.agent", *arguments, cwd=tmp_path)
    assert done.code == 2
    assert "set ELCHE_TOKEN" in done.complaint


@pytest.mark.parametrize(
    ("main", "given", "said"),
    [
        (coordinator_main, ["--x"], "elche-coordinator: No such option '--x'; see `elche-coordinator --help`"),
        (coordinator_main, ["backup"], "elche-coordinator: Missing argument 'FOLDER'; see `elche-coordinator --help`"),
        (worker_main, ["--x"], "elche-worker: No such option '--x'; see `elche-worker --help`"),
    ],
)
def test_a_wrong_option_of_a_daemon_is_told_in_one_line(
    main: click.Command, given: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was told with the usage, in four lines."""
    with pytest.raises(SystemExit) as ended:
        main.main(given)
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines() == [said]

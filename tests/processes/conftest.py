"""One coordinator and one agent for all tests that leave them alone; nothing may outlive a test."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elche_client import Client
from support.noting import BASE, REPLACE
from support.real_processes import Cluster, Command, Mark, agent, command, coordinator

JOBS = Path(__file__).parent / "jobs"
RANK = "elche rank"
WAITING = """
import dataclasses

made = []


def train_and_wait(model, batch):
    made.append(None)
    if not Path("{}").exists():
        time.sleep(0.02 if len(made) < 40 else 1.0)
    return train_step(model, batch)


job = dataclasses.replace(job, train_step=train_and_wait)
"""


@pytest.fixture
def elche(mark: Mark, tmp_path: Path) -> Callable[..., Command]:
    """The command `elche` in a folder of its own."""
    return lambda *arguments, **more: command(mark, "elche_client", *arguments, cwd=tmp_path, **more)


@pytest.fixture(scope="session")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    mark, folder = Mark(), tmp_path_factory.mktemp("cluster")
    with (
        coordinator(mark, folder) as one,
        agent(mark, folder, one.address, devices="cpu,cpu,cpu") as other,
        Client(one.address, token="") as client,
    ):
        yield Cluster(one, other, client, mark)
    mark.assert_none_left()


@pytest.fixture
def cluster(shared_cluster: Cluster) -> Iterator[Cluster]:
    """The shared cluster; every rank of the test's jobs must be gone at its end, and the daemons in health."""
    yield shared_cluster
    for job in shared_cluster.client.jobs():
        if not job.state.has_ended:
            shared_cluster.client.cancel(job.job_id)
    shared_cluster.mark.assert_none_left(RANK)
    assert shared_cluster.coordinator.process.poll() is None
    assert shared_cluster.agent.process.poll() is None
    assert shared_cluster.coordinator.new_errors() == []
    assert " ERROR " not in shared_cluster.agent.log.read_text()


@pytest.fixture
def job_file(tmp_path: Path) -> Callable[..., Path]:
    """Writes a job file: one of `jobs/`, with lines added at its end, or a text."""

    def write(name: str = "linear.py", *lines: str, text: str = "") -> Path:
        path = tmp_path / name
        path.write_text("\n".join([text or (JOBS / name).read_text(encoding="utf-8"), *lines, ""]), encoding="utf-8")
        return path

    return write


@pytest.fixture
def held_back(job_file: Callable[..., Path]) -> Callable[[Path], Path]:
    """A job of which no batch is over in less than 0.1 s before the file is there."""

    def write(until: Path) -> Path:
        text, quick = (JOBS / "linear.py").read_text(encoding="utf-8"), "time.sleep(0.002)"
        assert quick in text
        slow = f"time.sleep(0.002 if Path('{until}').exists() else 0.1)"
        return job_file("held_back.py", text=text.replace(quick, slow))

    return write


@pytest.fixture
def waiting(job_file: Callable[..., Path]) -> Callable[[Path], Path]:
    """A job of which each rank makes some 40 batches of 16, and then one in a second before the file is there."""
    return lambda until: job_file("linear.py", WAITING.format(until))


@pytest.fixture
def write(job_file: Callable[..., Path]) -> Callable[..., Path]:
    """Writes jobs/noting.py, lines after it, and what they replace in the job."""

    def write(*lines: str, replaced: str = "") -> Path:
        return job_file("train.py", *lines, REPLACE.format(replaced), text=BASE)

    return write

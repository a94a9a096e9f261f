"""Ranks in networks of their own, that reach the coordinator and not each other."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from elche_client import Client
from elche_client.events import JobState
from support.real_processes import ATTENDED, Mark, coordinator, eventually

pytestmark = pytest.mark.system
JOBS = Path(__file__).parent.parent / "processes" / "jobs"
TOKEN = "networks and their token"


def ip(*arguments: str, is_needed: bool = True) -> None:
    subprocess.run(["ip", *arguments], check=is_needed, capture_output=not is_needed)


@contextmanager
def network(number: int) -> Iterator[tuple[str, str]]:
    """A namespace that is joined to this host and to nothing else; its name, and this host's address there."""
    name, here, there = f"elche-{number}", f"elche{number}", f"eth{number}"
    ip("netns", "delete", name, is_needed=False)
    ip("netns", "add", name)
    try:
        ip("link", "add", here, "type", "veth", "peer", "name", there, "netns", name)
        ip("address", "add", f"10.77.{number}.1/24", "dev", here)
        ip("link", "set", here, "up")
        ip("-n", name, "address", "add", f"10.77.{number}.2/24", "dev", there)
        ip("-n", name, "link", "set", there, "up")
        ip("-n", name, "link", "set", "lo", "up")
        yield name, f"10.77.{number}.1"
    finally:
        ip("netns", "delete", name, is_needed=False)
        ip("link", "delete", here, is_needed=False)


@contextmanager
def agent_in(mark: Mark, folder: Path, name: str, address: str) -> Iterator[None]:
    """An agent in a namespace."""
    log = folder / f"{name}.log"
    command = ["ip", "netns", "exec", name, sys.executable, "-m", "elche_worker.agent", "--coordinator", address]
    command += ["--devices", "cpu", "--work-dir", str(folder / name), "--exit-with-stdin"]
    environment = mark.environment({"ELCHE_TOKEN": TOKEN})
    with (
        log.open("w") as log_file,
        subprocess.Popen(command, stdin=subprocess.PIPE, stderr=log_file, env=environment) as process,
    ):
        try:
            eventually(lambda: ATTENDED.search(log.read_text()), "the agent attends")
            yield
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(10)


def may_make_networks() -> bool:
    """Whether this user, in this container, may."""
    made = subprocess.run(["ip", "netns", "add", "elche-0"], capture_output=True, check=False).returncode == 0
    ip("netns", "delete", "elche-0", is_needed=False)
    return made


def test_ranks_that_cannot_reach_each_other_average_through_the_coordinator(tmp_path: Path) -> None:
    if not may_make_networks():
        pytest.skip("namespaces cannot be made here")
    mark = Mark()
    path = tmp_path / "linear.py"
    path.write_text((JOBS / "linear.py").read_text())
    with ExitStack() as stack:
        places = [stack.enter_context(network(number)) for number in (1, 2)]
        route = subprocess.run(
            ["ip", "-n", places[0][0], "route", "get", "10.77.2.2"], capture_output=True, check=False
        )
        assert b"unreachable" in route.stderr
        one = stack.enter_context(coordinator(mark, tmp_path, listen="0.0.0.0:0", env={"ELCHE_TOKEN": TOKEN}))
        port = one.address.rpartition(":")[2]
        for name, host in places:
            stack.enter_context(agent_in(mark, tmp_path, name, f"{host}:{port}"))
        client = stack.enter_context(Client(f"127.0.0.1:{port}", token=TOKEN))
        result = client.submit(path, num_ranks=2, backend="cpu", verify_rounds=True, slow_factors={1: 2.0}).result()
        assert result.state is JobState.SUCCEEDED
        assert result.committed_samples == (500, 500, 500)
    mark.assert_none_left()

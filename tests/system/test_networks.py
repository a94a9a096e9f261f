"""Ranks in networks of their own: without a way to each other, and with ways that break while they train."""

import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from elche.errors import InvalidJob, JobFailed
from elche_client import Client, JobHandle
from elche_client.commands.doctor import of_links
from elche_client.events import Event, JobState, JobView, MembershipReport
from support.fleets import EPOCHS, is_exact_so_far
from support.networks import ip, lan, may_make_networks, network
from support.real_processes import ATTENDED, Mark, coordinator, eventually

pytestmark = pytest.mark.system
JOBS = Path(__file__).parent.parent / "processes" / "jobs"
TOKEN = "networks and their token"
SLOWLY = """
import dataclasses, time

def slowly(model, batch, step=train_step):
    time.sleep(0.02)
    return step(model, batch)

job = dataclasses.replace(job, train_step=slowly)
"""


@contextmanager
def agent_in(
    mark: Mark, folder: Path, name: str, address: str, *more: str, env: Mapping[str, str] | None = None
) -> Iterator[None]:
    """An agent in a namespace."""
    log = folder / f"{name}.log"
    named = f'hostname {name}; exec {sys.executable} -m elche_worker.agent "$@"'
    command = ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", named, "sh", "--coordinator", address]
    command += ["--devices", "cpu", "--work-dir", str(folder / name), "--exit-with-stdin", *more]
    environment = mark.environment({"ELCHE_TOKEN": TOKEN} if env is None else env)
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
            process.wait(400)


@pytest.mark.parametrize("backend", ["cpu", "auto"])
def test_ranks_that_cannot_reach_each_other_average_through_the_coordinator(tmp_path: Path, backend: str) -> None:
    """As the job says, or when they have tried: they may be behind NATs."""
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
        job = client.submit(path, num_ranks=2, backend=backend, verify_rounds=True, slow_factors={1: 2.0})
        result = job.result()
        assert result.state is JobState.SUCCEEDED
        why = "as the job says" if backend == "cpu" else "cannot reach each other"
        assert client.get(job.id).backend.startswith("cpu (")
        assert why in client.get(job.id).backend
        assert result.committed_samples == (500, 500, 500)
    mark.assert_none_left()


@pytest.mark.long
def test_a_host_that_comes_later_and_reaches_nobody_averages_through_the_coordinator(tmp_path: Path) -> None:
    """The first rank trains on, alone, until both do."""
    if not may_make_networks():
        pytest.skip("namespaces cannot be made here")
    mark = Mark()
    path = tmp_path / "linear.py"
    path.write_text((JOBS / "linear.py").read_text() + SLOWLY)
    with ExitStack() as stack:
        (first, here), (late, there) = [stack.enter_context(network(number)) for number in (1, 2)]
        one = stack.enter_context(coordinator(mark, tmp_path, listen="0.0.0.0:0", env={"ELCHE_TOKEN": TOKEN}))
        port = one.address.rpartition(":")[2]
        stack.enter_context(agent_in(mark, tmp_path, first, f"{here}:{port}"))
        client = stack.enter_context(Client(f"127.0.0.1:{port}", token=TOKEN))
        job = client.submit(path, num_ranks=2, min_ranks=1, epochs=60)
        eventually(lambda: client.get(job.id).num_rounds > 5, "it trains alone")
        began_s = time.monotonic()
        stack.enter_context(agent_in(mark, tmp_path, late, f"{there}:{port}"))
        eventually(lambda: client.get(job.id).backend.startswith("cpu ("), "both train")
        print(f"both train after {time.monotonic() - began_s:.1f} s")
        result = job.result()
        assert result.committed_samples == (500,) * 60
        assert all(rank.batches > 50 for rank in result.ranks), result.ranks
        assert " is lost" not in one.log.read_text()
    mark.assert_none_left()


@contextmanager
def hosts(tmp_path: Path, num_hosts: int = 3) -> Iterator[tuple[Client, list[str]]]:
    """A coordinator here, and an agent with one slot on each of some hosts of one network."""
    if not may_make_networks():
        pytest.skip("namespaces cannot be made here")
    mark = Mark()
    with ExitStack() as stack:
        names = stack.enter_context(lan(num_hosts))
        one = stack.enter_context(coordinator(mark, tmp_path, listen="0.0.0.0:0", env={"ELCHE_TOKEN": TOKEN}))
        port = one.address.rpartition(":")[2]
        for name in names:
            stack.enter_context(agent_in(mark, tmp_path, name, f"10.77.9.254:{port}"))
        yield stack.enter_context(Client(f"127.0.0.1:{port}", token=TOKEN)), names
    mark.assert_none_left()


def begin(
    client: Client, tmp_path: Path, epochs: int = 80, num_ranks: int = 3, more: str = ""
) -> tuple[JobHandle, Iterator[Event]]:
    """A job that trains on all of them, and what is told of it; with `more` lines in its file."""
    path = tmp_path / "linear.py"
    path.write_text((JOBS / "linear.py").read_text() + SLOWLY + more)
    job = client.submit(path, num_ranks=num_ranks, backend="gloo", epochs=epochs)
    watch = job.watch()
    eventually(lambda: isinstance(event := next(watch), JobView) and event.num_rounds > 5, "it trains")
    return job, watch


def next_change(watch: Iterator[Event], text: str, limit_s: float = 400.0) -> MembershipReport:
    """The next change of membership of which this is told."""

    def found() -> MembershipReport | None:
        event = next(watch)
        return event if isinstance(event, MembershipReport) and text in event.text else None

    return eventually(found, text, limit_s)


def test_two_of_three_ranks_cannot_reach_each_other(tmp_path: Path) -> None:
    """What 10.77.9.2 sends to 10.77.9.3 is lost, without a word; all else arrives."""
    with hosts(tmp_path) as (client, (_, two, _)):
        job, watch = begin(client, tmp_path, EPOCHS)
        ip("-n", two, "neigh", "replace", "10.77.9.3", "lladdr", "02:00:00:00:00:01", "nud", "permanent", "dev", "eth0")
        began_s = time.monotonic()
        said = next_change(watch, "cannot reach each other")
        seconds = time.monotonic() - began_s
        print(f"left out after {seconds:.1f} s: {said.text}")
        ip("-n", two, "neigh", "delete", "10.77.9.3", "dev", "eth0")
        assert said.num_ranks == 2
        next_change(watch, "trains again")
        is_exact_so_far(job)


LARGER = """
small = model

def larger():
    made = small()
    made.more = nn.Parameter(torch.zeros(20_000))
    return made

job = dataclasses.replace(job, model=larger)
"""


@pytest.mark.long(reason="a link that loses all packets goes the same way; worker/test_links.py has the packet")
def test_large_packets_from_one_rank_to_another_are_lost(tmp_path: Path) -> None:
    """As between hosts that disagree about the MTU: they connected, so the averaging was waited for, for good."""
    with hosts(tmp_path, 2) as (client, (_, two)):
        job, watch = begin(client, tmp_path, epochs=150, num_ranks=2, more=LARGER)
        large = ["-s", "10.77.9.1", "-m", "length", "--length", "1200:65535", "-j", "DROP"]
        ip("netns", "exec", two, "iptables", "-A", "INPUT", *large)
        assert next_change(watch, "cannot reach each other").num_ranks == 1
        ip("netns", "exec", two, "iptables", "-F")
        next_change(watch, "trains again")
        ends_exactly(job)
    assert "large packets to it are lost" in "".join(log.read_text() for log in tmp_path.glob("*/*/rank-*.log"))


def ends_exactly(job: JobHandle) -> None:
    result = job.result()
    assert result.state is JobState.SUCCEEDED, result.error
    assert set(result.committed_samples) == {result.dataset_size}


@pytest.mark.long
def test_two_of_four_ranks_cannot_reach_each_other(tmp_path: Path) -> None:
    """Both ways, and each of them reaches the others: one is left out."""
    with hosts(tmp_path, 4) as (client, (one, two, *_)):
        job, watch = begin(client, tmp_path, num_ranks=4)
        for name, other in ((one, "10.77.9.2"), (two, "10.77.9.1")):
            ip("netns", "exec", name, "iptables", "-A", "INPUT", "-s", other, "-j", "DROP")
        said = next_change(watch, "cannot reach each other")
        assert said.num_ranks == 3
        for name in (one, two):
            ip("netns", "exec", name, "iptables", "-F")
        next_change(watch, "trains again")
        ends_exactly(job)


@pytest.mark.long
@pytest.mark.parametrize("lost", ["what it sends", "what it gets", "both"])
def test_a_host_cannot_reach_the_coordinator(tmp_path: Path, lost: str) -> None:
    """The others go on without it. It still reaches them, and comes back when it reaches the coordinator, too."""
    with hosts(tmp_path) as (client, (_, _, three)):
        job, watch = begin(client, tmp_path, epochs=150)
        rules = {"what it sends": ["OUTPUT -d"], "what it gets": ["INPUT -s"], "both": ["OUTPUT -d", "INPUT -s"]}
        for rule in rules[lost]:
            ip("netns", "exec", three, "iptables", "-A", *rule.split(), "10.77.9.254", "-j", "DROP")
        began_s = time.monotonic()
        said = next_change(watch, "rank 2")
        print(f"left out after {time.monotonic() - began_s:.1f} s: {said.text}")
        assert said.num_ranks == 2
        ip("netns", "exec", three, "iptables", "-F")
        next_change(watch, "trains again")
        print(f"back after {time.monotonic() - began_s:.1f} s")
        ends_exactly(job)


@pytest.mark.long
def test_slow_and_lossy_links_are_waited_for(tmp_path: Path) -> None:
    """Host 2 loses a tenth of what comes, and host 3 sends at most 200 kbit/s: nobody is left out for that."""
    with hosts(tmp_path) as (client, (_, two, three)):
        job, watch = begin(client, tmp_path, epochs=20)
        lose = ["iptables", "-A", "INPUT", "-m", "statistic", "--mode", "random", "--probability", "0.1", "-j", "DROP"]
        slow = ["tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", "200kbit", "burst", "4kb", "latency", "1s"]
        for name, command in ((two, lose), (three, slow)):
            ip("netns", "exec", name, *command)
        result = job.result()
        assert result.state is JobState.SUCCEEDED, result.error
        assert set(result.committed_samples) == {result.dataset_size}
        assert not [event for event in watch if isinstance(event, MembershipReport)]


@pytest.mark.long
def test_a_host_vanishes(tmp_path: Path) -> None:
    """Its cable is pulled: nothing is refused or reset. A host that comes takes its place."""
    with hosts(tmp_path) as (client, names):
        job, watch = begin(client, tmp_path, epochs=10_000)
        ip("-n", "elche-switch", "link", "set", "port3", "down")
        began_s = time.monotonic()
        said = next_change(watch, "it has not answered")
        print(f"left out after {time.monotonic() - began_s:.1f} s: {said.text}")
        assert said.num_ranks == 2
        with agent_in(Mark(), tmp_path, names[0], f"10.77.9.254:{client.address.rpartition(':')[2]}"):
            back = next_change(watch, "trains again")
            print(f"{back.text} after {time.monotonic() - began_s:.1f} s")
            job.cancel()
            with pytest.raises(JobFailed, match="cancelled"):
                job.result()


def test_doctor_finds_a_slow_link_and_a_closed_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between three hosts; and says what it would need, and when there is but one."""
    with hosts(tmp_path) as (client, (one, _, three)):
        slow = ("qdisc", "add", "dev", "eth0", "root", "tbf", "rate", "20mbit", "burst", "32kbit", "latency", "50ms")
        subprocess.run(["tc", "-n", three, *slow], check=True)
        no_way_in = ("-p", "tcp", "--syn", "-s", "10.77.9.2", "-j", "REJECT", "--reject-with", "tcp-reset")
        ip("netns", "exec", one, "iptables", "-A", "INPUT", *no_way_in)
        monkeypatch.setenv("ELCHE_TOKEN", TOKEN)
        findings = list(of_links(client.address))
        with pytest.raises(InvalidJob, match="hosts named: 1"):
            list(client.measure_links([one]))
        with pytest.raises(InvalidJob, match="no host named 'nobody' is connected"):
            list(client.measure_links([one, "nobody"]))
    assert [found.state for found in findings] == ["warning", "ok", "ok", "ok"]
    assert findings[0].text.startswith("elche-lan-2 cannot connect to elche-lan-1: 10.77.9.1:")
    for found in findings[1:3]:
        there, back = map(int, re.findall(r"([\d,]+) Mbit/s", found.text.replace(",", "")))
        assert 12 < back < 21 < there, found.text
    assert "and elche-lan-3, the slowest, 100 million parameters average in some" in findings[-1].text

"""The coordinator as a service: small, observable, hard to break, and with a memory."""

import random
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from elche.errors import ElcheError
from elche.stopping import ONE_S
from elche.v1 import agent_pb2, agent_pb2_grpc, job_pb2, job_pb2_grpc
from elche_client import Client
from elche_client.events import Checkpoint, Event, JobState, JobView, RoundReport
from support.real_processes import Cluster, Coordinator, Mark, agent, command, coordinator, eventually

JobFile = Callable[..., Path]
HeldBack = Callable[[Path], Path]
NUM_SAMPLES = 500  # of jobs/linear.py
MAX_IDLE_KIB = 120 * 1024


def metrics(url: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Samples by name."""
    text = urllib.request.urlopen(url, timeout=400).read().decode()
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        assert family.name.startswith(("elche_", "process_"))
        assert family.documentation
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def test_it_imports_no_torch_and_no_numpy() -> None:
    script = "import sys, elche_coordinator.daemon; print([name for name in ('torch', 'numpy') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_idle_it_is_small_and_in_health(mark: Mark, tmp_path: Path) -> None:
    with coordinator(mark, tmp_path) as one, grpc.insecure_channel(one.address) as channel:
        health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=400)
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        metrics(f"{one.page_url}/metrics")
        status = Path(f"/proc/{one.process.pid}/status").read_text()
        (used,) = (int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:"))
        assert used < MAX_IDLE_KIB


def test_metrics_of_a_job_that_runs(cluster: Cluster, held_back: HeldBack, tmp_path: Path) -> None:
    job = cluster.client.submit(held_back(tmp_path / "never"), num_ranks=2, epochs=1000)
    watch = job.watch()
    for _ in range(4):
        eventually(lambda: isinstance(next(watch), RoundReport), "a round")
    found = metrics(f"{cluster.coordinator.page_url}/metrics")
    job.cancel()
    assert ({"state": "training"}, 1.0) in found["elche_jobs"]
    for name in ("elche_rank_batch_seconds", "elche_rank_share_ratio", "elche_rank_batches_total"):
        ranks = {labels["rank"]: value for labels, value in found[name] if labels["job"] == job.id}
        assert set(ranks) == {"0", "1"}
        assert all(value > 0 for value in ranks.values()), (name, ranks)
    for name in ("elche_job_samples_per_second", "elche_job_rounds_total", "elche_job_anchor_batches"):
        (value,) = (value for labels, value in found[name] if labels["job"] == job.id)
        assert value > 0
    assert list(watch)[-1].state is JobState.CANCELLED


def test_a_coordinator_that_is_told_to_stop_has_jobs_saved_first_and_lets_nobody_in(
    mark: Mark, tmp_path: Path, held_back: HeldBack
) -> None:
    """One of another version goes on with all that was committed before the signal. A page that is looked at makes it
    take its time. Its agent and ranks try again at once, and must not be told what the next coordinator does not know:
    no rank is started again.
    """
    may_end, epochs = tmp_path / "may-end", 20
    with ExitStack() as stack:
        one = stack.enter_context(coordinator(mark, tmp_path))
        attending = stack.enter_context(agent(mark, tmp_path, one.address))
        client = stack.enter_context(Client(one.address, reconnect_s=60))
        job = client.submit(held_back(may_end), num_ranks=2, epochs=epochs)
        watch, version = job.watch(), 0
        while version < 5:
            event = eventually(lambda: next(watch), "rounds")
            version = event.version if isinstance(event, RoundReport) else version
        assert not client.checkpoints(job.id), "none was due"
        before = mark.living("elche rank")
        stack.enter_context(urllib.request.urlopen(f"{one.page_url}/api/stream?job={job.id}", timeout=400)).readline()
        one.process.send_signal(signal.SIGTERM)
        assert one.process.wait(400) == 0
        assert "1 jobs make a checkpoint before this coordinator stops" in one.log.read_text()
        saved = eventually(lambda: event if isinstance(event := next(watch), Checkpoint) else None, "a checkpoint")
        assert saved.version > version
        (tmp_path / "again").mkdir()
        two = stack.enter_context(coordinator(mark, tmp_path / "again", data=one.data, listen=one.address))
        eventually(lambda: attending.log.read_text().count("connected as agent-1") == 2, "it is back under its name")
        assert mark.living("elche rank") == before, attending.log.read_text()
        may_end.touch()
        assert job.result().committed_samples == (NUM_SAMPLES,) * epochs
        assert two.new_errors() == []


def test_a_coordinator_of_another_version_goes_on_from_checkpoints(
    mark: Mark, tmp_path: Path, held_back: HeldBack
) -> None:
    """What the one before did cannot be repeated by other code: its jobs go back, and say so."""
    may_end, epochs = tmp_path / "may-end", 12
    with ExitStack() as stack:
        one = stack.enter_context(coordinator(mark, tmp_path))
        stack.enter_context(agent(mark, tmp_path, one.address, devices="cpu,cpu,cpu"))
        client = stack.enter_context(Client(one.address))
        path = held_back(may_end)
        fails = client.submit(path, num_ranks=1, epochs=10_000, on_rank_loss="fail")
        ran = client.submit(path, num_ranks=2, epochs=epochs, checkpoint_every_epochs=1)
        watch = ran.watch()
        saved = eventually(lambda: event if isinstance(event := next(watch), Checkpoint) else None, "a checkpoint")
        one.process.kill()
        one.process.wait()
        with sqlite3.connect(one.data / "elche.sqlite") as database:
            database.execute("UPDATE states SET code = 'other'")
        (tmp_path / "again").mkdir()
        two = stack.enter_context(coordinator(mark, tmp_path / "again", data=one.data, listen=one.address))
        assert "was another version: jobs that ran go back to their newest checkpoints" in two.log.read_text()
        client = stack.enter_context(Client(two.address))
        *_, ended = client.watch(fails.id)
        assert "the coordinator stopped while the job ran; submit it again" in ended.error
        may_end.touch()
        assert list(watch)[-1].state is JobState.SUCCEEDED, "a watch outlasts the restart"
        result = client.job(ran.id).result()
        assert result.committed_samples == (NUM_SAMPLES,) * epochs
        assert result.rounds > saved.version


def test_a_second_signal_ends_a_coordinator_at_once(mark: Mark, tmp_path: Path, held_back: HeldBack) -> None:
    """The job's next round is far away."""
    with ExitStack() as stack:
        one = stack.enter_context(coordinator(mark, tmp_path, env={"ELCHE_GRACE": "10000"}))
        stack.enter_context(agent(mark, tmp_path, one.address))
        client = stack.enter_context(Client(one.address, reconnect_s=60))
        job = client.submit(held_back(tmp_path / "never"), num_ranks=2, epochs=200, anchor=100)
        watch = job.watch()
        eventually(lambda: isinstance(next(watch), RoundReport), "a round")
        one.process.send_signal(signal.SIGTERM)
        eventually(lambda: "make a checkpoint before" in one.log.read_text(), "it waits for the job")
        time.sleep(ONE_S)  # one that comes sooner is taken for the same request; a third could find no handler any more
        one.process.send_signal(signal.SIGTERM)
        assert one.process.wait(400) == 0
        assert "has made no checkpoint in time" in one.log.read_text()


def test_a_stop_is_orderly(mark: Mark, tmp_path: Path, job_file: JobFile) -> None:
    """SIGTERM ends a coordinator with a job that waits and a watcher that watches."""
    with coordinator(mark, tmp_path) as one, Client(one.address, token="", reconnect_s=0) as client:
        watch = client.submit(job_file()).watch()
        assert next(watch).state is JobState.QUEUED
        one.process.send_signal(signal.SIGTERM)
        with pytest.raises(ElcheError):
            list(watch)
        assert one.process.wait(400) == 0


def test_two_coordinators_with_one_database(mark: Mark, tmp_path: Path, job_file: JobFile) -> None:
    (tmp_path / "second").mkdir()
    with coordinator(mark, tmp_path) as one, Client(one.address) as client:
        client.submit(job_file())
        with pytest.raises(AssertionError), coordinator(mark, tmp_path / "second", data=one.data):
            pass


def is_serving(one: Coordinator) -> bool:
    with Client(one.address, token="") as client:
        client.jobs()
    return one.process.poll() is None and one.new_errors() == []


def test_garbage_on_the_port(cluster: Cluster) -> None:
    chance = random.Random(1)
    host, _, port = cluster.address.rpartition(":")
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    for opening in (b"", b"GET / HTTP/1.1\r\n\r\n", preface, preface + b"\xff\xff\xff\x04\x00\x00\x00\x00\x00"):
        with suppress(OSError), socket.create_connection((host, int(port)), timeout=400) as connection:
            connection.sendall(opening + chance.randbytes(20_000))
            connection.shutdown(socket.SHUT_WR)
    assert is_serving(cluster.coordinator)


def test_an_agent_that_does_not_say_hello(cluster: Cluster) -> None:
    exited = agent_pb2.RankExited(job_id="no-such-job", rank=1, incarnation=1)
    openings = [[], [agent_pb2.AttendRequest()], [agent_pb2.AttendRequest(rank_exited=exited)]]
    with grpc.insecure_channel(cluster.address) as channel:
        stub = agent_pb2_grpc.AgentServiceStub(channel)
        for opening in openings:
            with pytest.raises(grpc.RpcError) as raised:
                list(stub.Attend(iter(opening), timeout=400))
            assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        hello = agent_pb2.AttendRequest(hello=agent_pb2.AgentHello(host="x"))
        list(stub.Attend(iter([hello, agent_pb2.AttendRequest(rank_exited=exited)]), timeout=400))
        for second in (hello, agent_pb2.AttendRequest()):
            with pytest.raises(grpc.RpcError):
                list(stub.Attend(iter([hello, second]), timeout=400))
    assert is_serving(cluster.coordinator)


@pytest.mark.parametrize(
    ("spec", "code"),
    [
        (job_pb2.JobSpec(), grpc.StatusCode.INVALID_ARGUMENT),
        (job_pb2.JobSpec(source="x" * ((1 << 20) + 1)), grpc.StatusCode.INVALID_ARGUMENT),
        (job_pb2.JobSpec(source="x" * 5_000_000), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (job_pb2.JobSpec(source="x", settings={"epochs": "0"}), grpc.StatusCode.INVALID_ARGUMENT),
        (job_pb2.JobSpec(source="x", slow_factors={0: float("nan")}), grpc.StatusCode.INVALID_ARGUMENT),
        (job_pb2.JobSpec(source="x", slow_factors={0: -1.0}), grpc.StatusCode.INVALID_ARGUMENT),
        (job_pb2.JobSpec(source="x", num_ranks=1, slow_factors={1: 2.0}), grpc.StatusCode.INVALID_ARGUMENT),
        pytest.param(
            job_pb2.JobSpec(source="x", num_ranks=2**31, settings={"policy": '"weekly"'}),
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
    ],
    ids=["empty", "1 MiB", "5 MB", "no epochs", "slow nan", "slow -1", "slow rank 1 of 1", "unknown policy"],
)
def test_a_spec_that_no_agent_could_run(cluster: Cluster, spec: job_pb2.JobSpec, code: grpc.StatusCode) -> None:
    before = len(cluster.client.jobs())
    with grpc.insecure_channel(cluster.address) as channel:
        with pytest.raises(grpc.RpcError) as raised:
            job_pb2_grpc.JobServiceStub(channel).SubmitJob(job_pb2.SubmitJobRequest(spec=spec), timeout=400)
        assert raised.value.code() is code
    assert len(cluster.client.jobs()) == before


def test_standard_input_that_has_ended(mark: Mark, tmp_path: Path) -> None:
    arguments = ("--listen", "127.0.0.1:0", "--http", "off", "--data", "data", "--exit-with-stdin")
    done = command(mark, "elche_coordinator", *arguments, cwd=tmp_path, limit_s=400)
    assert done.code == 0, done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize("host", ["localhost", pytest.param("[::1]")])
def test_where_it_says_it_listens_it_does(mark: Mark, tmp_path: Path, host: str) -> None:
    with coordinator(mark, tmp_path, listen=f"{host}:0") as one, Client(one.address, token="") as client:
        assert client.jobs() == []


def until_queued(watch: Iterator[Event], num_views: int = 20) -> Iterator[Event]:
    """The events until the job has waited in so many views: a view is of now, and reports may be behind it."""
    for event in watch:
        yield event
        num_views -= isinstance(event, JobView) and event.state is JobState.QUEUED
        if not num_views:
            return


def test_an_agent_is_asked_to_end(mark: Mark, tmp_path: Path, job_file: JobFile) -> None:
    """SIGTERM: its ranks go with it, and the job waits for the host, whose disk has its checkpoint."""
    with coordinator(mark, tmp_path) as one, agent(mark, tmp_path, one.address) as host, Client(one.address) as client:
        job = client.submit(job_file(), num_ranks=1, epochs=10_000)
        watch = job.watch()
        eventually(lambda: isinstance(next(watch), RoundReport), "a round")
        host.process.send_signal(signal.SIGTERM)
        assert host.process.wait(400) == 0
        mark.assert_none_left("elche rank", limit_s=400)
        eventually(lambda: re.match("waits for host .*, which is not connected: ", client.jobs()[0].reason), "it waits")
        assert any("the job goes back to checkpoint" in getattr(event, "text", "") for event in until_queued(watch))
        job.cancel()


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_all_of_it_over_ipv6(mark: Mark, tmp_path: Path, job_file: Callable[..., Path]) -> None:
    with (
        coordinator(mark, tmp_path, listen="[::1]:0") as one,
        agent(mark, tmp_path, one.address, devices="cpu,cpu"),
        Client(one.address, token="") as client,
    ):
        assert one.address.startswith("[::1]:")
        job = client.submit(job_file("linear.py"), num_ranks=2, epochs=2)
        assert job.result().state is JobState.SUCCEEDED
        assert client.get(job.id).backend.startswith("gloo")

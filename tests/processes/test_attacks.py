"""What once hung, crashed, slowed or grew the coordinator for others: each attack, against a real one."""

import json
import os
import sqlite3
import stat
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from socket import create_connection
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from elche.errors import InvalidJob, TooMuch
from elche.v1 import (
    job_pb2,
    job_pb2_grpc,
    rank_pb2,
    rank_pb2_grpc,
    store_pb2,
    store_pb2_grpc,
)
from elche_client import Client
from elche_client.events import JobResult, JobState
from support.fakes import READY, FakeRank, fake_agent
from support.real_processes import Coordinator, Mark, agent, coordinator, eventually

pytestmark = pytest.mark.slow(reason="most tests have a coordinator of their own")

JobFile = Callable[..., Path]


@pytest.fixture(scope="module")
def one_alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    mark = Mark()
    with coordinator(mark, tmp_path_factory.mktemp("alone")) as one:
        yield one
    mark.assert_none_left()


@pytest.fixture
def alone(one_alone: Coordinator) -> Iterator[Coordinator]:
    """A coordinator without a real agent, which is in health after the test."""
    yield one_alone
    assert one_alone.process.poll() is None
    assert one_alone.new_errors() == []


@pytest.fixture
def channel(alone: Coordinator) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(alone.address) as channel:
        yield channel


@pytest.fixture
def client(alone: Coordinator) -> Iterator[Client]:
    with Client(alone.address, token="") as client:
        yield client


def result_of(client: Client, job_id: str) -> JobResult:
    *_, result = client.watch(job_id)
    assert isinstance(result, JobResult)
    return result


def is_healthy(one: Coordinator) -> bool:
    """What `/healthz` says, if it says something."""
    with urllib.request.urlopen(f"{one.page_url}/healthz", timeout=400) as answer:
        return bool(answer.read() == b"ok\n")


def test_a_stranger_who_watches_the_health_is_told_to_check_it(alone: Coordinator, channel: grpc.Channel) -> None:
    """Each such call left a traceback in the log."""
    stub = health_pb2_grpc.HealthStub(channel)
    with pytest.raises(grpc.RpcError, match=r"Health\.Watch is not offered: call Check") as refused:
        list(stub.Watch(health_pb2.HealthCheckRequest(), timeout=400))
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert stub.Check(health_pb2.HealthCheckRequest(), timeout=400).status == health_pb2.HealthCheckResponse.SERVING
    assert alone.new_errors() == []


# Numbers and texts out of bounds


OUT_OF_BOUNDS = {
    "HeaderRow.local_step is 18446744073709551615; at most 9007199254740992 is taken": {
        "sync_ack": rank_pb2.SyncAck(round=1, generation=1, header=[rank_pb2.HeaderRow(local_step=2**64 - 1)])
    },
    "BatchesTrained.data_wait_ms is nan; it must be a finite number": {
        "batches_trained": rank_pb2.BatchesTrained(local_step=1, data_wait_ms=float("nan"))
    },
    "Evaluated.sums has 2000 entries; at most 1000 are taken": {
        "evaluated": rank_pb2.Evaluated(sums={f"metric {n}": rank_pb2.ScalarSum() for n in range(2000)})
    },
    "Ready.epochs is 4294967295; at most 100000 is taken": {"ready": {**READY, "epochs": 2**32 - 1}},
    "a ConverseRequest came, and this program knows no such message: are all programs of one version of elche?": {},
    "Ready.tensors has 1100000 characters; at most 1048576 are taken": {
        "ready": {**READY, "tensors": ["x" * 1100] * 1000}
    },
    "Ready.device has 5000 characters; at most 255 are taken": {"ready": {**READY, "device": "x" * 5000}},
}


@pytest.mark.parametrize("said", OUT_OF_BOUNDS)
def test_what_a_rank_says_out_of_bounds_fails_its_own_job_alone(
    client: Client, channel: grpc.Channel, job_file: JobFile, said: str
) -> None:
    """A rank's header with local_step = 2**64 - 1 once hung 11 of 12 other jobs."""
    with fake_agent(channel) as host:
        bad, other = client.submit(job_file(), num_ranks=1), client.submit(job_file(), num_ranks=1)
        started = {(start := host.started()).job_id: start for _ in range(2)}
        ranks = {job_id: FakeRank(channel, start.secret) for job_id, start in started.items()}
        ranks[bad.id].say(**OUT_OF_BOUNDS[said])
        for _ in ranks[bad.id].stream:
            pass
        host.exited(started[bad.id])
        result = result_of(client, bad.id)
        assert result.state is JobState.FAILED
        assert result.error.endswith(f"has sent an invalid message: {said}")
        ranks[other.id].say(ready=READY)
        assert ranks[other.id].heard("form_group").world_size == 1
        other.cancel()
        ranks[other.id].leave()
        host.exited(started[other.id])
        assert result_of(client, other.id).state is JobState.CANCELLED


def test_a_job_whose_figures_fit_no_message_is_shown_with_its_state(
    client: Client, channel: grpc.Channel, job_file: JobFile
) -> None:
    """A rank that had made 2**53 batches: its job had no state for whoever asked, also once it had ended."""
    with fake_agent(channel) as host:
        job = client.submit(job_file(), num_ranks=1)
        start = host.started()
        rank = FakeRank(channel, start.secret)
        rank.say(ready=READY)
        rank.say(group_ready=rank_pb2.GroupReady(generation=rank.heard("form_group").generation))
        rank.say(batches_trained=rank_pb2.BatchesTrained(local_step=2**53, num_processed=1, batch_ms=[1.0]))
        eventually(lambda: "its figures cannot be shown" in client.get(job.id).reason, "the batches have come")
        assert client.get(job.id).state is JobState.TRAINING
        job.cancel()
        rank.leave()
        host.exited(start)
        assert result_of(client, job.id).state is JobState.CANCELLED
        assert client.get(job.id).state is JobState.CANCELLED
        assert {view.state for view in client.jobs() if view.job_id == job.id} == {JobState.CANCELLED}


RESUMED: dict[str, Any] = {
    "attempt": 1, "version": 3, "global_step": 3, "dataset_size": 100, "epoch_size": 100, "seed": 0,
    "ledger": {"epoch": 0, "books": {}}, "policy": {}, "tallies": {},
    "evaluations": {
        "metrics": {}, "best": None, "best_version": None, "num_since_best": 0, "owed_epochs": [], "by_version": {}
    },
}  # fmt: skip


@pytest.mark.parametrize(
    "damage",
    [
        {"version": "x"},
        {"version": -1},
        {"version": 2**70},
        {"attempt": 2**70},
        {"global_step": 2**80},
        {"ledger": {"epoch": "soon", "books": {}}},
        {"ledger": {"epoch": 0, "books": {"0": {"committed": [[0.5, "1"]], "free": []}}}},
        {"evaluations": {**RESUMED["evaluations"], "metrics": {"\ud800": 1.0}}},
        {"evaluations": {**RESUMED["evaluations"], "metrics": {"loss": "none"}}},
        {"policy": {"el_che": {"ranks": [[1], [2]]}}},
    ],
    ids=str,
)
def test_a_checkpoints_damaged_figures_cost_its_own_job_alone(
    client: Client, alone: Coordinator, channel: grpc.Channel, job_file: JobFile, damage: dict[str, Any]
) -> None:
    """A manifest with a version of "x", -1 or 2**70 once made `elche jobs` fail for all until a restart."""
    with fake_agent(channel) as host:
        bad, other = client.submit(job_file(), num_ranks=1), client.submit(job_file(), num_ranks=1)
        started = {(start := host.started()).job_id: start for _ in range(2)}
        rank = FakeRank(channel, started[bad.id].secret)
        rank.say(ready={**READY, "epochs": 2, "resumed": json.dumps({**RESUMED, **damage})})
        assert {bad.id, other.id} <= {view.job_id for view in client.jobs()}
        bad.cancel()
        other.cancel()
        rank.leave()
        for start in started.values():
            host.exited(start)
        assert result_of(client, bad.id).state in (JobState.FAILED, JobState.CANCELLED)
        assert result_of(client, other.id).state is JobState.CANCELLED
        assert {bad.id, other.id} <= {view.job_id for view in client.jobs()}
    alone.new_errors()  # what cannot be told is logged


def test_epochs_that_were_never_trained_take_no_room(client: Client, channel: grpc.Channel, job_file: JobFile) -> None:
    """`--epochs 4294967295`, then cancel, once took all memory of the host."""
    with pytest.raises(InvalidJob, match="epochs must be below 100001, not 4294967295"):
        client.submit(job_file(), epochs=2**32 - 1)
    with fake_agent(channel) as host:
        job = client.submit(job_file(), num_ranks=1, epochs=100_000)
        start = host.started()
        rank = FakeRank(channel, start.secret)
        rank.say(ready={**READY, "epochs": 100_000})
        rank.heard("form_group")
        job.cancel()
        rank.leave()
        host.exited(start)
        result = result_of(client, job.id)
    assert (result.committed_samples, result.dropped_samples) == ((), ())


# Lists


def attach(channel: grpc.Channel, num_ranks: int, host: str = "host") -> rank_pb2.AttachResponse:
    """A loop of so many ranks becomes a job."""
    ranks = [rank_pb2.LoopRank(host=host, device="cpu")] * num_ranks
    stub = rank_pb2_grpc.RankServiceStub(channel)
    return stub.Attach(rank_pb2.AttachRequest(name="wide", ranks=ranks, policy="shares"), timeout=400)


def test_jobs_beyond_one_message_come_page_by_page(client: Client, channel: grpc.Channel) -> None:
    """758 jobs of 64 ranks were once more than a message holds, and nobody could list any."""
    jobs = [attach(channel, 64, "h" * 255).job_id for _ in range(150)]
    stub = job_pb2_grpc.JobServiceStub(channel)
    page = stub.ListJobs(job_pb2.ListJobsRequest(), timeout=400)
    assert page.next_page_token
    assert page.ByteSize() < 3 << 20
    assert [view.job_id for view in client.jobs() if view.job_id in jobs] == jobs
    few = stub.ListJobs(job_pb2.ListJobsRequest(page_size=3, page_token=page.next_page_token), timeout=400)
    assert len(few.jobs) == 3
    with pytest.raises(grpc.RpcError, match="the page token was not returned by an earlier page"):
        stub.ListJobs(job_pb2.ListJobsRequest(page_token="-1"), timeout=400)
    for job_id in jobs:
        client.cancel(job_id)


def processor_s(pid: int) -> float:
    """Time that a process has worked."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def leave_if_begun(rank: FakeRank) -> None:
    """A session that had not begun when its job ended is refused."""
    with suppress(grpc.RpcError):
        rank.leave()


@pytest.mark.gate
def test_ten_thousand_ranks_attach_and_leave_while_others_are_answered(mark: Mark, tmp_path: Path) -> None:
    """A loop of 10,000 ranks that was cancelled once kept `/healthz` waiting for 21 s."""
    with (
        coordinator(mark, tmp_path) as one,
        Client(one.address, token="") as client,
        grpc.insecure_channel(one.address) as channel,
    ):
        used_s: list[float] = []
        done = threading.Event()

        def watch() -> None:
            before_s = processor_s(one.process.pid)
            while not done.is_set():
                assert is_healthy(one)
                now_s = processor_s(one.process.pid)
                used_s.append(now_s - before_s)
                before_s = now_s
                time.sleep(0.005)  # so that the page is asked, not flooded

        watcher = threading.Thread(target=watch)
        watcher.start()
        attached = attach(channel, 10_000)
        with ExitStack() as stack:
            for secret in attached.secrets[:200]:
                stack.callback(leave_if_begun, FakeRank(channel, secret))
            client.cancel(attached.job_id)
            assert result_of(client, attached.job_id).state is JobState.CANCELLED
        eventually(lambda: len(used_s) >= 100, "enough answers")
        done.set()
        watcher.join()
        # Between two answers, of its processor's time: one that does it all at once uses ten times that.
        assert max(used_s) < 2.0, sorted(used_s)[-20:]


# Connections, memory, disk


def test_connections_that_ask_for_nothing_keep_nobody_out(alone: Coordinator) -> None:
    """256 silent connections once stopped the page, the metrics and the health check."""
    host, port = alone.page_url.removeprefix("http://").split(":")
    with ExitStack() as stack:
        for number in range(400):
            connection = stack.enter_context(create_connection((host, int(port)), timeout=400))
            if number % 2:
                connection.sendall(b"GET /healthz HTTP/1.1\r\nhost: ")
        assert is_healthy(alone)


@pytest.mark.gate
def test_who_does_not_acknowledge_the_settings_of_http2_is_disconnected(alone: Coordinator) -> None:
    """gRPC does not bound headers until they are acknowledged, and waited for a minute."""
    host, port = alone.address.split(":")
    with create_connection((host, int(port)), timeout=900) as connection:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")
        received = b""
        while part := connection.recv(1 << 16):
            received += part
    assert received


def test_the_store_has_a_bound_in_bytes(client: Client, channel: grpc.Channel, job_file: JobFile) -> None:
    """One rank once stored 1.8 GiB in 9 s."""
    with fake_agent(channel) as host:
        job = client.submit(job_file(), num_ranks=1)
        start = host.started()
        stub, secret = store_pb2_grpc.StoreServiceStub(channel), (("elche-secret", start.secret),)
        mebibyte = bytes(1 << 20)
        for number in range(63):
            stub.Set(store_pb2.SetRequest(key=f"key {number}", value=mebibyte), metadata=secret, timeout=400)
        with pytest.raises(grpc.RpcError, match="the rendezvous store cannot take") as full:
            stub.Set(store_pb2.SetRequest(key="one too many", value=mebibyte), metadata=secret, timeout=400)
        assert full.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        stub.DeleteKey(store_pb2.DeleteKeyRequest(key="key 0"), metadata=secret, timeout=400)
        stub.Set(store_pb2.SetRequest(key="again", value=bytes(1 << 19)), metadata=secret, timeout=400)
        stub.Set(store_pb2.SetRequest(key="count", value=b"9223372036854775807"), metadata=secret, timeout=400)
        with pytest.raises(grpc.RpcError, match="not a 64-bit number"):
            stub.Add(store_pb2.AddRequest(key="count", amount=1), metadata=secret, timeout=400)
        waiting = stub.Get.future(
            store_pb2.GetRequest(key="never", timeout={"seconds": 600}), metadata=secret, timeout=400
        )
        job.cancel()
        host.exited(start)
        assert "the job has ended" in waiting.exception(timeout=400).details()


WIDE = """
import dataclasses
from torch.utils.data import TensorDataset
job = dataclasses.replace(
    job,
    model=lambda: torch.nn.Linear(3000, 3000),
    dataset=lambda: TensorDataset(torch.zeros(20, 3000)),
    train_step=lambda model, batch: model(batch[0]).sum(),
    evaluate=None,
)
"""
"""A model of 36 MB: more than all queues on its way to a client hold."""


def test_a_download_that_is_abandoned_ends_at_the_agent(mark: Mark, tmp_path: Path, job_file: JobFile) -> None:
    """30 of them once left 20 threads in the agent and 200 MB in the coordinator."""
    with (
        coordinator(mark, tmp_path) as one,
        agent(mark, tmp_path, one.address, devices="cpu") as host,
        Client(one.address, token="") as client,
        grpc.insecure_channel(one.address) as channel,
    ):
        job = client.submit(job_file("linear.py", WIDE.strip()), num_ranks=1, epochs=1)
        job.result()
        threads = Path(f"/proc/{host.process.pid}/task")
        before = len(list(threads.iterdir()))
        for _ in range(10):
            stream = job_pb2_grpc.JobServiceStub(channel).FetchModel(job_pb2.FetchModelRequest(job_id=job.id))
            next(stream)
            stream.cancel()
        eventually(lambda: len(list(threads.iterdir())) <= before + 2, "the agent's threads end")


def test_no_host_speaks_for_anothers_processes(client: Client, channel: grpc.Channel, job_file: JobFile) -> None:
    """Any agent could once end another agent's rank by a word."""
    with fake_agent(channel, 1, "honest") as honest, fake_agent(channel, 0, "other") as other:
        job = client.submit(job_file(), num_ranks=1)
        start = honest.started()
        rank = FakeRank(channel, start.secret)
        other.exited(start, 1, "gone, says another host")
        rank.say(ready=READY)
        assert rank.heard("form_group").world_size == 1
        job.cancel()
        rank.leave()
        honest.exited(start)
        assert result_of(client, job.id).state is JobState.CANCELLED


def test_a_damaged_or_newer_record_does_not_keep_the_others_away(mark: Mark, tmp_path: Path, job_file: JobFile) -> None:
    """One such record once kept the coordinator from starting, with a traceback."""
    with coordinator(mark, tmp_path) as one, Client(one.address, token="") as client:
        jobs = [client.submit(job_file()) for _ in range(4)]
        for job in jobs:
            job.cancel()
            result_of(client, job.id)
    with closing(sqlite3.connect(tmp_path / "data" / "elche.sqlite")) as database, database:
        database.execute("UPDATE jobs SET record = '{\"format' WHERE id = ?", (jobs[0].id,))
        database.execute("UPDATE jobs SET record = json_set(record, '$.format', 99) WHERE id = ?", (jobs[1].id,))
        database.execute("UPDATE jobs SET record = json_set(record, '$.result', 7) WHERE id = ?", (jobs[2].id,))
    with coordinator(mark, tmp_path) as one, Client(one.address, token="") as client:
        assert [view.job_id for view in client.jobs()] == [jobs[3].id]
        lines = [line for line in one.log.read_text().splitlines() if "is ignored" in line]
        assert [job.id in line for job, line in zip(jobs, lines, strict=False)] == [True] * 3
        assert "has format 99" in lines[1]
        assert "Traceback" not in one.log.read_text()


@pytest.mark.gate
def test_while_records_cannot_be_written_nothing_is_taken(mark: Mark, tmp_path: Path, job_file: JobFile) -> None:
    """The client was once told that nobody answers, the job was taken, and a retry made a second one."""
    with coordinator(mark, tmp_path) as one, Client(one.address, token="") as client:
        client.submit(job_file()).cancel()
        with closing(sqlite3.connect(tmp_path / "data" / "elche.sqlite", isolation_level=None)) as database:
            database.execute("BEGIN EXCLUSIVE")
            with pytest.raises(TooMuch, match="cannot write its records"):
                client.submit(job_file())
            eventually(lambda: "records cannot be written" in one.log.read_text(), "the failure is logged")
            with pytest.raises(TooMuch, match=r"cannot write its records.*nothing was submitted"):
                client.submit(job_file())
            database.execute("ROLLBACK")
        eventually(lambda: all(view.state.has_ended for view in client.jobs()), "what was withdrawn is cancelled")

        def is_taken() -> bool:
            try:
                return bool(client.submit(job_file()))
            except TooMuch:
                return False

        eventually(is_taken, "records are written again")
        assert "import torch" not in one.log.read_text(), "the log shows what users have written"
        one.new_errors()


def test_a_submission_that_is_sent_again_makes_no_second_job(
    client: Client, alone: Coordinator, channel: grpc.Channel
) -> None:
    stub = job_pb2_grpc.JobServiceStub(channel)
    request = job_pb2.SubmitJobRequest(spec=job_pb2.JobSpec(name="twice", source="job = 1"), key="mine")
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: stub.SubmitJob(request, timeout=400).job_id, range(8)))
    assert len(set(answers)) == 1
    assert len([view for view in client.jobs() if view.name == "twice"]) == 1
    client.cancel(answers[0])


def test_a_submission_keeps_its_key_over_a_restart(mark: Mark, tmp_path: Path) -> None:
    request = job_pb2.SubmitJobRequest(spec=job_pb2.JobSpec(name="twice", source="job = 1"), key="mine")
    answers = []
    for _ in range(2):
        with coordinator(mark, tmp_path) as one, grpc.insecure_channel(one.address) as channel:
            answers.append(job_pb2_grpc.JobServiceStub(channel).SubmitJob(request, timeout=400).job_id)
    assert answers[0] == answers[1]


def test_the_source_is_written_once(
    client: Client, alone: Coordinator, channel: grpc.Channel, job_file: JobFile
) -> None:
    """Each round once rewrote it: 113 MB in 8 s for a file of 1 MB."""
    job = client.submit(job_file("linear.py", "# a rare word: xylophone"))
    job.cancel()
    result_of(client, job.id)
    with closing(sqlite3.connect(alone.data / "elche.sqlite")) as database:
        ((record, spec, name),) = database.execute("SELECT record, spec, source FROM jobs WHERE id = ?", (job.id,))
        ((text,),) = database.execute("SELECT text FROM sources WHERE hash = ?", (name,))
    assert "xylophone" not in record + spec
    assert "xylophone" in text


# Messages


def test_bytes_that_are_no_message_are_refused_in_words(client: Client, channel: grpc.Channel) -> None:
    """They were once answered UNKNOWN, with the text of a Python exception."""
    submit = channel.unary_unary("/elche.v1.JobService/SubmitJob")
    attend = channel.stream_stream("/elche.v1.AgentService/Attend")
    for call in (
        lambda: submit(b"\xff\xff\xff", timeout=400),
        lambda: next(attend(iter([b"\xff\xff\xff"]), timeout=400)),
    ):
        with pytest.raises(grpc.RpcError) as refused:
            call()
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert refused.value.details() == "the request is malformed: it is not a message of this service"


@pytest.mark.parametrize(
    "text", ["[" * 5000, "1" * 6000, "{", "NaN", '"\\ud800"'], ids=["deep", "long", "open", "nan", "surrogate"]
)
def test_settings_that_are_no_json_are_refused_in_words(channel: grpc.Channel, text: str) -> None:
    spec = job_pb2.JobSpec(name="x", source="job = 1", settings={"epochs": text})
    with pytest.raises(grpc.RpcError) as refused:
        job_pb2_grpc.JobServiceStub(channel).SubmitJob(job_pb2.SubmitJobRequest(spec=spec), timeout=400)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert len(refused.value.details()) < 300


def test_long_ids_are_not_echoed(channel: grpc.Channel) -> None:
    stub = job_pb2_grpc.JobServiceStub(channel)
    with pytest.raises(grpc.RpcError) as refused:
        stub.CancelJob(job_pb2.CancelJobRequest(job_id="x" * 100_000), timeout=400)
    assert refused.value.details() == "CancelJobRequest.job_id has 100000 characters; at most 200 are taken"


def test_no_line_of_the_log_can_be_forged(
    client: Client, alone: Coordinator, channel: grpc.Channel, job_file: JobFile
) -> None:
    with fake_agent(channel) as host:
        job = client.submit(job_file(), num_ranks=1)
        start = host.started()
        rank = FakeRank(channel, start.secret)
        rank.say(failed=rank_pb2.RankFailed(error="oh\n2026-01-01 00:00:00 INFO all is well \x1b[2J"))
        rank.leave()
        host.exited(start)
        result_of(client, job.id)
    (line,) = (line for line in alone.log.read_text().splitlines() if "all is well" in line)
    assert "oh\\n2026" in line
    assert "\x1b" not in line


# Secrets


def test_what_users_have_written_is_theirs_alone(alone: Coordinator) -> None:
    modes = {}
    for path in (alone.data, *alone.data.rglob("*")):
        with suppress(FileNotFoundError):  # the database has such for a moment
            modes[path] = stat.S_IMODE(path.stat().st_mode)
    assert alone.data / "elche.sqlite" in modes
    assert {path: mode for path, mode in modes.items() if mode & 0o077} == {}


def test_a_token_that_can_be_guessed_is_refused(mark: Mark, tmp_path: Path, elche: Callable[..., Any]) -> None:
    from support.real_processes import command

    done = command(mark, "elche_coordinator", "--listen", "127.0.0.1:0", cwd=tmp_path, env={"ELCHE_TOKEN": "a"})
    assert done.code == 2
    assert "a token of 1 characters can be guessed: it must have at least 16" in done.complaint


def test_a_secret_is_worth_nothing_when_its_session_has_ended(
    client: Client, channel: grpc.Channel, job_file: JobFile
) -> None:
    """It once stayed good for the store and for averaging until the job's end."""
    with fake_agent(channel) as host:
        job = client.submit(job_file(), num_ranks=2)
        start, other = host.started(), host.started()
        store, secret = store_pb2_grpc.StoreServiceStub(channel), (("elche-secret", start.secret),)
        store.Set(store_pb2.SetRequest(key="a", value=b"1"), metadata=secret, timeout=400)
        FakeRank(channel, start.secret).leave()

        def is_refused() -> bool:
            try:
                store.Set(store_pb2.SetRequest(key="a", value=b"2"), metadata=secret, timeout=400)
            except grpc.RpcError as error:
                return error.code() is grpc.StatusCode.UNAUTHENTICATED
            return False

        eventually(is_refused, "the secret is refused")
        job.cancel()
        for one in (start, other):
            host.exited(one)
        result_of(client, job.id)

"""Calls with any bytes, to a real coordinator: each is carried out or refused, and costs its own job alone."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from socket import create_connection
from typing import Any
from urllib.parse import quote
from urllib.request import urlopen

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elche.v1 import agent_pb2, rank_pb2, rank_pb2_grpc
from elche_client import Client
from support.corpus import METHODS, messages
from support.fakes import READY, FakeRank, fake_agent
from support.fuzzing import TEXTS, changed_bytes, fuzzed, message_bytes
from support.real_processes import Coordinator, Mark, coordinator

REFUSALS = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNIMPLEMENTED,
}
"""What a call may end with: never INTERNAL or UNKNOWN. The deadline is the test's own, for calls that wait."""
MEMORY_BYTES = 300 << 20
"""Memory that a coordinator may take, at most, in one test beyond what it had."""
OWN = {"RankService/Converse", "AveragingService/Average", "AgentService/Attend"}
"""Streams with tests of their own."""
CALLS = sorted(name for path in METHODS if (name := path.removeprefix("/elche.v1.")) not in OWN)


WAITS_S = 0.3
"""After so long a call that waits is left."""


@dataclass(slots=True)
class Target:
    """A coordinator with two jobs that train: one that is attacked, and one that nobody may touch."""

    one: Coordinator
    channel: grpc.Channel
    client: Client
    job_id: str
    secret: str
    """Of the rank of the job that is attacked."""
    other_id: str
    loop_id: str
    """Of the newest loop that has attached; first that of the job."""
    before: tuple[Any, ...] = ()
    had_bytes: int = 0

    def call(self, method: str, sent: Sequence[bytes], metadata: Mapping[str, str] | None = None) -> None:
        """Makes a call and reads some of its answers. Fails for a status that says there is a bug."""
        found = METHODS[f"/elche.v1.{method}"]
        kind = "_".join("stream" if one else "unary" for one in (found.client_streaming, found.server_streaming))
        ask = getattr(self.channel, kind)(f"/elche.v1.{method}", request_serializer=bytes, response_deserializer=bytes)
        said = tuple((metadata or {"elche-secret": self.secret}).items())
        try:
            answer = ask(iter(sent) if found.client_streaming else sent[0], metadata=said, timeout=WAITS_S)
            for _ in answer if found.server_streaming else ():
                pass
        except grpc.RpcError as error:
            ended = error
        else:
            ended = None
        if ended is not None:
            assert ended.code() in REFUSALS, f"{method}: {ended.code()}, {ended.details()}"
            assert ended.details(), f"{method}: {ended.code()} without a word"
        assert self.one.new_errors() == [], method

    def fresh_secret(self) -> str:
        """Of a rank that has said nothing yet, of a loop that is its own job."""
        if self.job_id != self.loop_id:
            self.client.cancel(self.loop_id)
        attach = rank_pb2.AttachRequest(name="loop", ranks=[rank_pb2.LoopRank(host="h", device="cpu")], policy="shares")
        attached = rank_pb2_grpc.RankServiceStub(self.channel).Attach(attach, timeout=400)
        self.loop_id = attached.job_id
        return str(attached.secrets[0])

    def check(self) -> None:
        """The coordinator lives, has logged no bug, holds little, and the other job is as it was."""
        assert self.one.process.poll() is None
        assert self.one.new_errors() == []
        assert self.view() == self.before
        assert peak_bytes(self.one) < self.had_bytes + MEMORY_BYTES

    def view(self) -> tuple[Any, ...]:
        """The other job, but for what time changes."""
        view = self.client.get(self.other_id)
        ranks = tuple((rank.rank, rank.host, rank.num_batches) for rank in view.ranks)
        return view.state, view.num_rounds, view.epoch_committed, view.epoch_processed, ranks


def peak_bytes(one: Coordinator) -> int:
    lines = Path(f"/proc/{one.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    mark = Mark()
    with coordinator(mark, tmp_path_factory.mktemp("fuzzed")) as one:
        yield one
    mark.assert_none_left()


@pytest.fixture
def target(served: Coordinator, tmp_path: Path) -> Iterator[Target]:
    path = tmp_path / "job.py"
    path.write_text("job = 1")
    with ExitStack() as stack:
        channel = stack.enter_context(grpc.insecure_channel(served.address))
        client = stack.enter_context(Client(served.address, token=""))
        jobs, ranks = [], []
        for host in ("untouched", "attacked"):
            agent = stack.enter_context(fake_agent(channel, 1, host))
            jobs.append(client.submit(path, num_ranks=1, priority=1000))
            ranks.append((start := agent.started(), FakeRank(channel, start.secret)))
            stack.callback(agent.exited, start)
            stack.callback(ranks[-1][1].leave)
            ranks[-1][1].say(ready=READY)
            generation = ranks[-1][1].heard("form_group").generation
            ranks[-1][1].say(group_ready=rank_pb2.GroupReady(generation=generation))
            ranks[-1][1].heard("sync_now")
        other, attacked = jobs
        one = Target(served, channel, client, attacked.id, ranks[1][0].secret, other.id, attacked.id)
        one.before, one.had_bytes = one.view(), peak_bytes(served)
        yield one
        one.check()
        for view in client.jobs():
            client.cancel(view.job_id)


def aimed(method: str, job_id: str) -> list[Any]:
    """The messages of a method, about the job and the host that are attacked."""
    found = []
    for message in messages(method):
        one = type(message).FromString(message.SerializeToString())
        for name, value in (("job_id", job_id), ("host", "attacked")):
            if name in one.DESCRIPTOR.fields_by_name:
                setattr(one, name, value)
        found.append(one)
    return found


@pytest.mark.parametrize("method", CALLS)
def test_a_call_with_any_bytes_is_carried_out_or_refused(target: Target, method: str) -> None:
    corpus = aimed(method, target.job_id)

    @fuzzed(20)
    @given(sent=st.lists(message_bytes(corpus), min_size=1, max_size=3))
    def attack(sent: list[bytes]) -> None:
        target.call(method, sent)

    attack()


HEADERS = ("authorization", "elche-secret", "elche-heard", "elche-store", "elche-protocol", "elche-release")
CHECKED = ("JobService/ListJobs", "StoreService/NumKeys", "RankService/Converse", "BundleService/FetchBundle")


@pytest.mark.parametrize("method", CHECKED)
def test_a_call_with_any_metadata_is_carried_out_or_refused(target: Target, method: str) -> None:
    """5,000 digits as the number of messages that were heard were a bug of the coordinator, as Python reads no more."""
    for name, text in product(HEADERS, (*TEXTS, "Bearer x", "é", "2", ".", "\x7f")):
        value = quote(text, safe=" {}[]")[:6000]
        own = {"elche-secret": target.fresh_secret() if method == "RankService/Converse" else target.secret}
        target.call(method, [b""], metadata={**own, name: value})


def test_a_rank_that_says_anything_costs_its_own_job_alone(target: Target) -> None:

    @fuzzed(30)
    @given(sent=st.lists(message_bytes(messages("RankService/Converse")), min_size=1, max_size=5))
    def attack(sent: list[bytes]) -> None:
        target.call("RankService/Converse", sent, {"elche-secret": target.fresh_secret()})

    attack()


@fuzzed(40)
@given(sent=st.lists(message_bytes(messages("AgentService/Attend")), min_size=1, max_size=5), greets=st.booleans())
def test_an_agent_that_says_anything_costs_nobody_else(target: Target, sent: list[bytes], greets: bool) -> None:
    hello = agent_pb2.AttendRequest(hello=agent_pb2.AgentHello(host="attacked")).SerializeToString()
    target.call("AgentService/Attend", [hello, *sent] if greets else sent)


PATHS = (
    b"GET /api/jobs?text=a&state=training&page=1 HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n",
    b"GET /api/stream?job=JOB&host_page=2 HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n",
    b"GET /api/jobs/JOB HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n",
    b"GET /api/jobs/JOB/series HTTP/1.1\r\nhost: 127.0.0.1\r\naccept-encoding: gzip\r\n\r\n",
    b"GET /api/jobs/JOB/log/0 HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n",
    b"GET /api/jobs/JOB/journal HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\nhost: 127.0.0.1\r\naccept: application/openmetrics-text; version=1.0.0\r\n\r\n",
    b"GET /download/abc HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer abc\r\n\r\n",
    b"GET /static/page.js HTTP/1.1\r\nhost: 127.0.0.1\r\nrange: bytes=0-5\r\n\r\n",
    b"POST /api/jobs/JOB/scale?ranks=2 HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 2\r\n\r\n{}",
    b"POST /api/jobs/JOB/pause HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 0\r\n\r\n",
    b"POST /api/agents/agent-1/nothing HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 0\r\n\r\n",
)


NAMES = ("job", "page", "host_page", "text", "state", "ranks")
QUERIES = st.builds(
    lambda path, name, text: path % f"?{name}={quote(text[:2000])}".encode(),
    st.sampled_from([b"GET /api/%b%%b HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n" % name for name in (b"jobs", b"stream")]),
    st.sampled_from(NAMES),
    st.sampled_from([*TEXTS, "²", "1.5"]),
)


def test_a_page_that_is_asked_anything_answers_or_refuses(target: Target) -> None:
    host, _, port = target.one.page_url.removeprefix("http://").rpartition(":")

    @fuzzed(75)
    @given(asked=QUERIES | changed_bytes([path.replace(b"JOB", target.job_id.encode()) for path in PATHS]))
    def ask(asked: bytes) -> None:
        with create_connection((host, int(port)), timeout=400) as connection:
            connection.sendall(asked + b"\r\n\r\n")  # so that it is mostly a whole request
            connection.settimeout(1.0)
            try:
                head = connection.recv(100)
            except (TimeoutError, ConnectionResetError):
                head = b""
        assert not head or 200 <= int(head.split()[1]) < 500, head
        assert target.one.new_errors() == []

    ask()
    with urlopen(f"{target.one.page_url}/healthz", timeout=400) as answer:
        assert answer.read() == b"ok\n"

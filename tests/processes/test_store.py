"""The rendezvous store, and who may use it: a fake agent gets the secrets that ranks would get."""

import gc
import queue
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch.distributed as dist

from elche.network import CHANNEL_OPTIONS
from elche.v1 import rank_pb2, rank_pb2_grpc, store_pb2, store_pb2_grpc
from elche_client import Client
from elche_client.events import JobState
from elche_worker.collectives import store as store_module
from elche_worker.collectives.store import CoordinatorStore
from support.cutter import cutting
from support.fakes import READY, FakeAgent, fake_agent
from support.real_processes import Coordinator, Mark, coordinator, eventually

JobFile = Callable[..., Path]
TEN_S = timedelta(seconds=10)


@pytest.fixture(scope="module")
def one_alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    """A coordinator without a real agent."""
    mark = Mark()
    with coordinator(mark, tmp_path_factory.mktemp("alone")) as one:
        yield one
    mark.assert_none_left()


@pytest.fixture
def alone(one_alone: Coordinator) -> Coordinator:
    """The same, whatever it has logged before."""
    one_alone.new_errors()
    return one_alone


@pytest.fixture
def channel(alone: Coordinator) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(alone.address) as channel:
        yield channel


@pytest.fixture
def agent(channel: grpc.Channel) -> Iterator[FakeAgent]:
    with fake_agent(channel) as agent:
        yield agent


@pytest.fixture
def client(alone: Coordinator) -> Iterator[Client]:
    """Its jobs end with the test: the next one's agent would get their ranks."""
    with Client(alone.address, token="") as client:
        yield client
        for job in client.jobs():
            client.cancel(job.job_id)


def test_two_ranks_meet_at_the_store(
    client: Client, agent: FakeAgent, channel: grpc.Channel, job_file: JobFile
) -> None:
    client.submit(job_file(), num_ranks=2)
    one, other = (CoordinatorStore(channel, agent.started().secret) for _ in range(2))

    one.set("plain", b"\x00\xff")
    assert other.get("plain") == b"\x00\xff"
    one.set("plain", "text")
    assert other.get("plain") == b"text"

    waited: list[bytes] = []
    waiter = threading.Thread(target=lambda: waited.append(other.get("later")))
    waiter.start()
    one.set("later", b"now")
    waiter.join(400)
    assert waited == [b"now"]

    one.set_timeout(timedelta(days=1))
    began_s = time.monotonic()
    with pytest.raises(RuntimeError, match="nobody has set never"):
        one.wait(["plain", "never"], timedelta(seconds=0.2))
    assert time.monotonic() - began_s >= 0.2  # its own limit, and not the day that the store would wait
    other.set_timeout(timedelta(seconds=0.1))
    with pytest.raises(RuntimeError, match="nobody has set never"):
        other.get("never")
    other.set_timeout(TEN_S)

    adders = [threading.Thread(target=lambda s=store: [s.add("count", 2) for _ in range(50)]) for store in (one, other)]
    for adder in adders:
        adder.start()
    for adder in adders:
        adder.join()
    assert one.add("count", -200) == 0
    assert one.get("count") == b"0"

    assert one.compare_set("lock", "", "mine") == b"mine"
    assert other.compare_set("lock", "", "yours") == b"mine"
    assert other.compare_set("lock", "mine", "yours") == b"yours"
    assert one.compare_set("missing", "expected", "new") == b"expected"
    assert not one.check(["missing"])

    assert one.check(["plain", "lock"])
    assert not one.check(["plain", "nothing"])
    assert one.check([])
    assert other.delete_key("plain")
    assert not one.delete_key("plain")
    assert not one.check(["plain"])
    with pytest.raises(RuntimeError, match="cannot take"):
        one.set("large", b"x" * ((1 << 20) + 1))


@pytest.fixture(params=["itself", "through a prefix"])
def store(request: pytest.FixtureRequest, client: Client, agent: FakeAgent, channel: grpc.Channel, job_file: JobFile):
    """A store that nobody keeps, as torch uses it, or directly."""
    client.submit(job_file(), num_ranks=1)
    secret = agent.started().secret
    if request.param == "itself":
        return CoordinatorStore(channel, secret)
    prefixed = dist.PrefixStore("1/2", CoordinatorStore(channel, secret))
    gc.collect()
    return prefixed


def test_all_that_a_store_of_torch_has(store: Any) -> None:
    """What torch's own suite asks of a store (test/distributed/test_store.py), and what NCCL calls."""
    store.set("key0", "value0")
    assert store.get("key0") == b"value0"
    assert [store.add("key3", amount) for amount in (1, 2, 3, 4, 5, 6)][-1] == 21
    assert store.get("key3") == b"21"
    assert store.num_keys() == 2
    store.set("-key3", "7")
    assert store.delete_key("-key3")
    assert not store.delete_key("-key3")
    assert store.num_keys() == 2

    assert store.compare_set("cs", "wrong", "new") == b"wrong"
    assert store.compare_set("cs", "", "new") == b"new"
    assert store.compare_set("cs", "wrong", "other") == b"new"
    assert store.check(["cs", "key0"])
    assert not store.check(["cs", "nothing"])

    assert store.has_extended_api()
    store.append("log", "one")
    store.append("log", b" two")
    assert store.get("log") == b"one two"
    store.multi_set(["a", "b"], ["1", "2"])
    assert store.multi_get(["b", "a"]) == [b"2", b"1"]
    assert store.clone().get("a") == b"1"


def test_a_store_of_torch_says_what_is_wrong_in_torchs_errors(store: Any, alone: Coordinator) -> None:
    with pytest.raises(dist.DistStoreError, match=r"timeout after 0\.2 s: nobody has set .*bad_key"):
        store.wait(["bad_key"], timedelta(seconds=0.2))
    store.set_timeout(timedelta(seconds=0.3))
    assert store.timeout == timedelta(seconds=0.3)
    with pytest.raises(dist.DistStoreError, match=r"timeout after 0\.3 s"):
        store.get("bad_key")
    store.set("text", "no number")
    with pytest.raises(dist.DistStoreError, match="holds no number"):
        store.add("text", 1)
    with pytest.raises(NotImplementedError, match="queue"):
        store.queue_push("queue", "value")


def test_a_store_whose_coordinator_is_away_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "AWAY_S", 0.0)
    with grpc.insecure_channel("127.0.0.1:1") as nobody:
        store = dist.PrefixStore("1", CoordinatorStore(nobody, "secret"))
        with pytest.raises(dist.DistNetworkError, match="rendezvous through the coordinator failed"):
            store.set("key", "value")


def test_a_call_whose_connection_breaks_is_made_again(
    alone: Coordinator, client: Client, agent: FakeAgent, job_file: JobFile
) -> None:
    """One broken connection failed the group that ranks were building by it, and with their first group the job."""
    client.submit(job_file(), num_ranks=1)
    secret, got = agent.started().secret, []
    with cutting(alone.address) as way, grpc.insecure_channel(way.address, options=CHANNEL_OPTIONS) as channel:
        store = CoordinatorStore(channel, secret)
        store.set("mine", b"1")
        num_before = way.num_uploaded
        waiter = threading.Thread(target=lambda: got.append(store.get("later")))
        waiter.start()
        eventually(lambda: way.num_uploaded > num_before, "it waits for the key")
        way.cut()
        with grpc.insecure_channel(alone.address) as direct:
            CoordinatorStore(direct, secret).set("later", b"now")
        waiter.join(400)
        assert got == [b"now"]
        way.cut()
        store.set("mine", b"2")
        assert store.get("mine") == b"2"


def test_a_store_whose_coordinator_was_restarted_lacks_the_keys(
    client: Client, agent: FakeAgent, channel: grpc.Channel, job_file: JobFile
) -> None:
    """Who went on to wait in the new one would wait for keys that nobody sets again."""
    client.submit(job_file(), num_ranks=1)
    store = CoordinatorStore(channel, agent.started().secret)
    store.set("key", b"1")
    store._table = "that of the process before"
    with pytest.raises(dist.DistNetworkError, match="started again, without the keys"):
        store.get("key")
    store.set("key", b"2")
    assert store.get("key") == b"2"


def test_a_rank_sees_its_own_jobs_keys_only(
    client: Client, agent: FakeAgent, channel: grpc.Channel, job_file: JobFile
) -> None:
    first, second = (client.submit(job_file(), num_ranks=1) for _ in range(2))
    starts = [agent.started(), agent.started()]
    assert [start.job_id for start in starts] == [first.id, second.id]
    mine, theirs = (CoordinatorStore(channel, start.secret) for start in starts)
    mine.set("key", b"mine")
    assert not theirs.check(["key"])
    assert not theirs.delete_key("key")
    assert theirs.add("key", 1) == 1
    assert mine.get("key") == b"mine"

    first.cancel()
    agent.exited(starts[0])
    eventually(lambda: list(first.watch())[-1].state is JobState.CANCELLED, "the first job ends")
    with pytest.raises(RuntimeError, match="its job has ended"):
        mine.check(["key"])
    assert theirs.check(["key"])


@pytest.mark.parametrize("secret", [None, "", "wrong"])
def test_strangers_stay_out(channel: grpc.Channel, secret: str | None) -> None:
    metadata = None if secret is None else (("elche-secret", secret),)
    ready = rank_pb2.ConverseRequest(group_ready=rank_pb2.GroupReady(generation=1))
    with pytest.raises(grpc.RpcError) as conversed:
        next(rank_pb2_grpc.RankServiceStub(channel).Converse(iter([ready]), metadata=metadata, timeout=400))
    assert conversed.value.code() is grpc.StatusCode.UNAUTHENTICATED
    with pytest.raises(grpc.RpcError) as stored:
        store_pb2_grpc.StoreServiceStub(channel).Set(store_pb2.SetRequest(key="a"), metadata=metadata, timeout=400)
    assert stored.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_a_secret_opens_one_session(client: Client, agent: FakeAgent, channel: grpc.Channel, job_file: JobFile) -> None:
    """The second gets nothing, neither beside the first nor after it."""
    client.submit(job_file(), num_ranks=1)
    metadata = (("elche-secret", agent.started().secret),)
    stub = rank_pb2_grpc.RankServiceStub(channel)
    silence: queue.SimpleQueue[rank_pb2.ConverseRequest | None] = queue.SimpleQueue()
    silence.put(rank_pb2.ConverseRequest(ready=rank_pb2.Ready(**READY)))
    first = stub.Converse(iter(silence.get, None), metadata=metadata, timeout=400)
    assert next(first).HasField("welcome")
    assert next(first).HasField("form_group")
    for _ in range(2):
        with pytest.raises(grpc.RpcError) as second:
            next(stub.Converse(iter([]), metadata=metadata, timeout=400))
        assert second.value.code() is grpc.StatusCode.UNAUTHENTICATED
        silence.put(None)
        assert [message for message in first if message.HasField("start_epoch")] == []


def test_a_rank_that_says_nonsense_harms_only_itself(
    client: Client, agent: FakeAgent, channel: grpc.Channel, job_file: JobFile
) -> None:
    job = client.submit(job_file(), num_ranks=1)
    start = agent.started()
    nonsense = [
        rank_pb2.ConverseRequest(sync_ack=rank_pb2.SyncAck(round=99, generation=99)),
        rank_pb2.ConverseRequest(final_state_saved=rank_pb2.FinalStateSaved(path="/nowhere")),
        rank_pb2.ConverseRequest(group_ready=rank_pb2.GroupReady(generation=7)),
        rank_pb2.ConverseRequest(evaluated=rank_pb2.Evaluated(epoch=3)),
        rank_pb2.ConverseRequest(ready=rank_pb2.Ready(**{**READY, "policy": "weekly"})),
    ]
    stub = rank_pb2_grpc.RankServiceStub(channel)
    talk: queue.SimpleQueue[rank_pb2.ConverseRequest | None] = queue.SimpleQueue()
    for message in nonsense:
        talk.put(message)
    session = stub.Converse(iter(talk.get, None), metadata=(("elche-secret", start.secret),), timeout=400)
    assert "weekly" in next(message.shutdown.reason for message in session if message.HasField("shutdown"))
    talk.put(None)
    agent.exited(start)
    assert list(job.watch())[-1].invalid


@pytest.mark.parametrize(
    "said",
    [
        {"dataset_size": 2**62, "batch_size": 0},
        {"dataset_size": 0},
        {"anchor": 0},
        {"max_anchor": 0, "overhead_target": float("nan")},
        {"speed_hint": rank_pb2.SpeedHint(slow_rank=9, ratio=2.0)},
    ],
    ids=str,
)
def test_a_rank_that_is_ready_for_the_impossible(
    alone: Coordinator, client: Client, agent: FakeAgent, channel: grpc.Channel, job_file: JobFile, said: dict
) -> None:
    """Whatever a rank says of its job, the job ends with words and the coordinator goes on."""
    job = client.submit(job_file(), num_ranks=1)
    start = agent.started()
    talk: queue.SimpleQueue[rank_pb2.ConverseRequest | None] = queue.SimpleQueue()
    talk.put(rank_pb2.ConverseRequest(ready=rank_pb2.Ready(**{**READY, **said})))
    stub = rank_pb2_grpc.RankServiceStub(channel)
    session = stub.Converse(iter(talk.get, None), metadata=(("elche-secret", start.secret),), timeout=400)
    assert next(session).HasField("welcome")
    answer = next(session, None)
    talk.put(None)
    agent.exited(start, 1)
    assert job.id in [view.job_id for view in client.jobs()]
    assert list(job.watch())[-1].state is JobState.FAILED
    assert answer is None or answer.HasField("shutdown") or answer.HasField("form_group")
    assert alone.new_errors() == []


def test_a_rank_without_epochs(mark: Mark, tmp_path: Path, job_file: JobFile) -> None:
    with (
        coordinator(mark, tmp_path) as one,
        Client(one.address, token="") as client,
        grpc.insecure_channel(one.address) as channel,
        fake_agent(channel) as agent,
    ):
        job = client.submit(job_file(), num_ranks=1)
        start = agent.started()
        ready = rank_pb2.ConverseRequest(ready=rank_pb2.Ready(**{**READY, "epochs": 0}))
        stub = rank_pb2_grpc.RankServiceStub(channel)
        next(stub.Converse(iter([ready]), metadata=(("elche-secret", start.secret),), timeout=400), None)
        agent.exited(start, 1)
        assert [view.job_id for view in client.jobs()] == [job.id]


def test_a_counter_that_is_no_number(
    alone: Coordinator, client: Client, agent: FakeAgent, channel: grpc.Channel, job_file: JobFile
) -> None:
    client.submit(job_file(), num_ranks=1)
    store = CoordinatorStore(channel, agent.started().secret)
    store.set("word", b"abc")
    with pytest.raises(RuntimeError):
        store.add("word", 1)
    assert alone.new_errors() == []


def test_a_session_that_outlives_its_job(
    alone: Coordinator, client: Client, agent: FakeAgent, channel: grpc.Channel, job_file: JobFile
) -> None:
    """The agent says that the process has ended before the coordinator sees its stream end."""
    job = client.submit(job_file(), num_ranks=1)
    start = agent.started()
    talk: queue.SimpleQueue[rank_pb2.ConverseRequest | None] = queue.SimpleQueue()
    talk.put(rank_pb2.ConverseRequest(ready=rank_pb2.Ready(**READY)))
    stub = rank_pb2_grpc.RankServiceStub(channel)
    session = stub.Converse(iter(talk.get, None), metadata=(("elche-secret", start.secret),), timeout=400)
    assert next(session).HasField("welcome")
    assert next(session).HasField("form_group")
    agent.exited(start, 1)
    assert list(job.watch())[-1].state is JobState.FAILED
    talk.put(None)
    for _ in session:
        pass
    assert alone.new_errors() == []

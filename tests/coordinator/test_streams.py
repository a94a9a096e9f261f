"""Conversations that break and go on: nothing is said twice, nothing lost, and nothing shown before it is durable."""

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elche.v1 import agent_pb2, rank_pb2
from elche_coordinator import codec
from elche_coordinator.core.coordinator import Coordinator
from elche_coordinator.core.life.hangs import Duty
from elche_coordinator.core.messages.commands import Command
from elche_coordinator.core.messages.events import (
    AgentJoined,
    Event,
    GroupFormed,
    JobSubmitted,
    LoopAttached,
    LoopBegan,
    LoopLeft,
    PingAnswered,
    RankStarted,
    ResultReceived,
    RoundEntered,
    UserEventRecorded,
)
from elche_coordinator.core.messages.ids import AgentId, GenerationId, Incarnation, JobId, Rank, RoundId
from elche_coordinator.core.messages.spec import JobSpec, Slot
from elche_coordinator.core.records.ranks import Address
from elche_coordinator.driver import Driver
from elche_coordinator.services.sessions import attend, open_session
from elche_coordinator.storage import tape
from elche_coordinator.storage.snapshots import Snapshots
from elche_coordinator.storage.sql.store import SqlStore
from elche_coordinator.storage.store import SavedState
from elche_coordinator.streams import presence, streams
from elche_coordinator.streams.send_queue import SendQueue
from elche_coordinator.streams.streams import Secrets, Stream, Superseded
from support.clusters import Cluster
from support.effort import lines_run

HELLO = agent_pb2.AgentHello(host="host", slots=[agent_pb2.Slot(device="cpu")] * 2, identity="an agent")
RANK: Address = {"job_id": JobId("job"), "rank": Rank(0), "incarnation": Incarnation(1)}


def said(queue: SendQueue[Any]) -> list[Any]:
    """What waits in a queue."""
    waiting = list(queue._items)
    queue._items.clear()
    return waiting


def numbers(queue: SendQueue[Any]) -> list[int]:
    return [message.seq for message in said(queue)]


def new_stream(*, is_resumable: bool = True) -> Stream[rank_pb2.ConverseResponse]:
    return Stream(is_resumable=is_resumable)


def keep(stream: Stream[rank_pb2.ConverseResponse], count: int) -> None:
    for _ in range(count):
        stream.keep(rank_pb2.ConverseResponse())


def test_what_was_not_heard_is_said_again_and_only_that() -> None:
    stream = new_stream()
    first = stream.connect(0)
    keep(stream, 5)
    stream.show(4)
    assert numbers(first) == [1, 2, 3, 4]
    second = stream.connect(2)
    stream.resend()
    assert numbers(second) == [3, 4], "the fifth is not durable"
    stream.show(5)
    assert numbers(second) == [5]
    assert first.is_closed
    assert not stream.disconnect(first), "another connection has taken its place"
    assert stream.is_connected


def test_one_who_has_heard_more_than_was_said_belongs_to_a_newer_store() -> None:
    stream = new_stream()
    keep(stream, 2)
    with pytest.raises(Superseded, match="message 3 was received, but only 2 were sent"):
        stream.connect(3)


def test_messages_of_who_does_not_come_back_are_not_kept() -> None:
    stream = new_stream(is_resumable=False)
    stream.connect(0)
    keep(stream, 10)
    stream.show(10)
    assert not stream._kept


def test_for_one_who_stays_away_no_more_than_so_much_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MAX_KEPT", 10)
    stream = new_stream()
    keep(stream, 10)
    stream.show(10)
    assert (len(stream._kept), stream.is_over) == (10, False)
    keep(stream, 1)
    stream.show(11)
    assert (len(stream._kept), stream.is_over) == (0, True)


def test_for_one_who_reads_nothing_no_more_than_so_many_bytes_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """50,000 orders to write a checkpoint, of 4 MB each, were few enough."""
    monkeypatch.setattr(streams, "MAX_KEPT_BYTES", 10_000)
    stream = new_stream()
    for number in range(1, 100):
        stream.keep(rank_pb2.ConverseResponse(shutdown=rank_pb2.Shutdown(reason="x" * 3000)))
        stream.show(number)
        stream.on_received(number - 2)
        assert (len(stream._kept), stream.is_over) == (min(number, 2), False)
    stream.show(stream.keep(rank_pb2.ConverseResponse(shutdown=rank_pb2.Shutdown(reason="x" * 3000))))
    assert not stream.is_over
    stream.show(stream.keep(rank_pb2.ConverseResponse(shutdown=rank_pb2.Shutdown(reason="x" * 3000))))
    assert (len(stream._kept), stream.is_over) == (0, True)


def test_who_comes_and_goes_a_thousand_times_is_awaited_once(tmp_path: Path) -> None:
    """Each time began another wait of ten minutes."""

    async def story() -> None:
        driver = start_with_job(tmp_path, 1)
        for _ in range(1000):
            queue = opened(driver)
            stream = driver.streams.of_rank(RANK)
            assert stream is not None
            stream.disconnect(queue)
            driver.presence.on_rank_away(RANK)
        await asyncio.sleep(0)  # the loop drops what is cancelled
        loop: Any = asyncio.get_running_loop()
        assert len(loop._scheduled) < 500
        driver.stop()

    asyncio.run(story())


def test_a_message_that_comes_again_is_no_news() -> None:
    stream = new_stream()
    stream.num_read = 4
    assert [number for number in (0, 3, 4, 5) if stream.is_news(number)] == [0, 5]


def test_a_secret_is_nobody_elses() -> None:
    secrets, others = Secrets(b"a key"), Secrets(b"another")
    secret = secrets.new(RANK)
    assert secrets.read(secret) == RANK
    assert others.read(secret) is None
    assert secrets.read(secrets.new({**RANK, "rank": Rank(1)})) != RANK
    body, _, signature = secret.partition(".")
    for forged in ("", ".", body, f"{body}.", f"{body[:-2]}.{signature}", f"é.{signature}", f"{body}.é"):
        assert secrets.read(forged) is None


# A driver that ends and starts again

Story = Callable[[Path], Awaitable[None]]


def start(path: Path) -> Driver:
    store = SqlStore.in_file(path / "elche.sqlite")
    return Driver(Coordinator(), store, recorded=tape.read(store))


def start_with_job(path: Path, num_ranks: int) -> Driver:
    """A driver with an agent, on which the ranks of a job start."""
    driver = start(path)
    attend(driver, HELLO)
    spec = JobSpec(name="job", source_hash="", file_name="job.py", num_ranks=num_ranks)
    driver.handle(JobSubmitted(job_id=JobId("job"), spec=spec, submitted_at=1.0))
    return driver


def opened(driver: Driver) -> SendQueue[Any]:
    """What is sent to the first rank on a new connection."""
    queue = open_session(driver, RANK, 0)
    assert queue is not None
    return queue


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def abandon(driver: Driver) -> None:
    """The process is gone: nothing is closed in order."""
    driver.writer._stopped.set()
    driver.writer._queue.put(None)
    driver.writer._thread.join(400)
    if driver._timer is not None:
        driver._timer.cancel()


def test_a_restart_in_the_middle_of_a_conversation(tmp_path: Path) -> None:
    """The agent comes back with what it has heard, gets the rest, and says again what was not durable."""

    async def story() -> None:
        one = start(tmp_path)
        agent_id, stream, queue = attend(one, HELLO)
        (welcome,) = said(queue)
        assert (welcome.welcome.is_new, welcome.welcome.taken) == (True, 0)
        spec = JobSpec(name="job", source_hash="", file_name="job.py", num_ranks=2)
        one.handle(JobSubmitted(job_id=JobId("job"), spec=spec, submitted_at=1.0))
        await asyncio.wait_for(one.durable(), 10)
        started = said(queue)
        assert [message.seq for message in started] == [1, 2]
        one.handle(RankStarted(**RANK, agent_id=agent_id, log_path="/log"), number=1)
        await until(lambda: stream.num_taken == 1)
        assert said(queue)[-1].taken.seq == 1
        one.writer.write = lambda batch: None  # type: ignore[method-assign]  # what follows never becomes durable
        one.handle(RankStarted(**{**RANK, "rank": Rank(1)}, agent_id=agent_id, log_path="/log"), number=2)
        assert (stream.num_read, stream.num_taken) == (2, 1)
        abandon(one)

        two = start(tmp_path)
        assert two.core.job_ids() == ["job"]
        assert two.identity == one.identity
        hello = agent_pb2.AgentHello()
        hello.CopyFrom(HELLO)
        hello.store, hello.num_received, hello.num_ranks = two.identity.id, 1, 2
        again, stream, queue = attend(two, hello)
        welcome, order = said(queue)
        assert again == agent_id
        assert (welcome.welcome.is_new, welcome.welcome.taken) == (False, 1)
        assert (order.seq, order.command) == (2, started[1].command), "the second was not heard"
        assert not stream.is_news(1)
        assert stream.is_news(2)
        hello.num_received = 3
        with pytest.raises(Superseded):
            attend(two, hello)
        two.stop()

    asyncio.run(story())


def test_a_rank_keeps_what_is_not_durable(tmp_path: Path) -> None:
    """Its welcome names what is durable, and not what was read: the rest may be lost in a crash."""

    async def story() -> None:
        driver = start_with_job(tmp_path, 1)
        opened(driver)
        stream = driver.streams.of_rank(RANK)
        assert stream is not None
        driver.writer.write = lambda batch: None  # type: ignore[method-assign]
        pong = rank_pb2.ConverseRequest(event_recorded=rank_pb2.EventRecorded(text="a word"), seq=1)
        driver.handle(codec.rank_event(RANK, pong), number=1)
        queue = opened(driver)
        assert said(queue)[0].welcome.taken == 0
        abandon(driver)

    asyncio.run(story())


def test_a_rank_that_comes_back_is_asked_what_it_could_not_be_asked_before(tmp_path: Path) -> None:
    """Not back yet after a restart, it was not asked, and later never again: it could hang, and the others with it."""

    async def story() -> None:
        driver = start_with_job(tmp_path, 1)
        opened(driver)
        hangs = driver.core.jobs[JobId("job")].silence.hangs
        duties = {Rank(0): Duty()}
        assert [hangs.check(duties, now_s)[0] for now_s in (1e9, 2e9)] == [[0], []]
        queue = opened(driver)
        assert [message.WhichOneof("message") for message in said(queue)] == ["welcome", "ping"]
        driver.handle(PingAnswered(**RANK))
        queue = opened(driver)
        assert [message.WhichOneof("message") for message in said(queue)] == ["welcome"]
        driver.stop()

    asyncio.run(story())


@dataclass
class Host:
    """An agent with the rank of a submitted loop, both connected."""

    driver: Driver
    agent_id: AgentId
    ends: dict[str, Callable[[], object]]
    """Ends the connection of the rank or of the agent."""

    @property
    def is_known(self) -> bool:
        return [host.agent_id for host in self.driver.agents.hosts()] == [self.agent_id]


def host_with_loop(folder: Path) -> Host:
    driver = start(folder)
    agent_id, agents, to_agent = attend(driver, HELLO)
    spec = JobSpec(name="job", source_hash="hash", file_name="loop.py", num_ranks=1, is_loop=True)
    driver.handle(JobSubmitted(job_id=JobId("job"), spec=spec, submitted_at=1.0))
    to_rank = open_session(driver, RANK, 0)
    driver.handle(LoopBegan(**RANK, policy="El Che"), number=1)
    ranks = driver.streams.of_rank(RANK)
    assert ranks is not None
    return Host(
        driver,
        agent_id,
        {
            "rank": lambda: ranks.disconnect(to_rank) and driver.presence.on_rank_away(RANK),
            "agent": lambda: agents.disconnect(to_agent) and driver.presence.on_agent_away(agent_id),
        },
    )


async def after_the_grace() -> None:
    """Returns when timers that were due at once have run: they are called in the order of their times."""
    await asyncio.sleep(0.001)


@pytest.mark.parametrize("goes_first", ["agent", "rank"])
@pytest.mark.parametrize("has_left", [True, False])
def test_a_script_that_has_ended_its_loop_owes_no_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, goes_first: str, *, has_left: bool
) -> None:
    """A break of its agent's stream was taken for the death of both, and the host's other jobs lost their ranks."""
    monkeypatch.setattr(presence, "BOTH_GRACE_S", 0.0)
    monkeypatch.setattr(Coordinator, "is_awaited", lambda *_: True)

    async def story() -> None:
        host = host_with_loop(tmp_path)
        if has_left:
            host.driver.handle(LoopLeft(**RANK), number=2)
        for who in sorted(host.ends, key=lambda one: one != goes_first):
            host.ends[who]()
        assert host.is_known, "both may be back in a moment"
        await after_the_grace()
        assert host.is_known == has_left
        host.driver.stop()

    asyncio.run(story())


@pytest.mark.parametrize("goes_first", ["agent", "rank"])
@pytest.mark.parametrize("comes_back", ["agent", "rank"])
def test_a_host_whose_connections_were_all_cut_keeps_its_ranks_if_one_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, goes_first: str, comes_back: str
) -> None:
    """A proxy that reset all connections at once cost the ranks, though all of them were back in 50 ms."""
    monkeypatch.setattr(presence, "BOTH_GRACE_S", 0.0)
    monkeypatch.setattr(Coordinator, "is_awaited", lambda *_: True)

    async def story() -> None:
        host = host_with_loop(tmp_path)
        for who in sorted(host.ends, key=lambda one: one != goes_first):
            host.ends[who]()
        if comes_back == "agent":
            again = agent_pb2.AgentHello(store=host.driver.identity.id, num_ranks=1)
            again.MergeFrom(HELLO)
            attend(host.driver, again)
        else:
            open_session(host.driver, RANK, 0)
        await after_the_grace()
        assert host.is_known
        host.driver.stop()

    asyncio.run(story())


@pytest.mark.parametrize("goes_first", ["agent", "rank"])
@pytest.mark.parametrize("is_short", [True, False])
@pytest.mark.parametrize("grace", ["AGENT_GRACE_S", "LAST_GRACE_S"])
def test_a_host_for_which_nobody_waits_has_longer_to_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, goes_first: str, grace: str, *, is_short: bool
) -> None:
    """An outage of two seconds cost jobs whose ranks were all on the host all that they had made; the fourth failed. A
    submitted loop, which cannot go back to a checkpoint, failed at the first of eleven seconds.
    """
    for one in ("BOTH_GRACE_S", "AGENT_GRACE_S", "LAST_GRACE_S"):
        monkeypatch.setattr(presence, one, 100.0 if one == grace and is_short else 0.0)
    if grace == "AGENT_GRACE_S":
        monkeypatch.setattr(Coordinator, "can_begin_again", lambda *_: True)

    async def story() -> None:
        host = host_with_loop(tmp_path)
        for who in sorted(host.ends, key=lambda one: one != goes_first):
            host.ends[who]()
        await after_the_grace()
        assert host.is_known == is_short
        host.driver.stop()

    asyncio.run(story())


@pytest.mark.parametrize("num_cut", [1, 2])
def test_of_a_loop_whose_ranks_are_all_cut_off_nobody_is_lost_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_cut: int
) -> None:
    """Its ranks trained on, and ended well, and the job was said to have failed."""
    monkeypatch.setattr(presence, "LOOP_GRACE_S", 0.0)
    monkeypatch.setattr(presence, "AGENT_GRACE_S", 100.0)

    async def story() -> None:
        driver, job_id = start(tmp_path), JobId("loop")
        spec = JobSpec(name="loop", source_hash="", file_name="loop", num_ranks=2, is_loop=True)
        ranks = (("host", "cpu"), ("host", "cpu"))
        driver.handle(LoopAttached(job_id=job_id, spec=spec, ranks=ranks, policy="", submitted_at=1.0))
        queues = [(one, open_session(driver, one, 0)) for one in driver.core.addresses(job_id)]
        for address, queue in queues[:num_cut]:
            stream = driver.streams.of_rank(address)
            assert stream is not None
            assert queue is not None
            stream.disconnect(queue)
            driver.presence.on_rank_away(address)
        await after_the_grace()
        records = driver.core.jobs[job_id].ranks.values()
        assert [one.is_present for one in records] == [num_cut == 2, True]
        driver.stop()

    asyncio.run(story())


def test_ranks_that_go_with_their_host_are_not_all_counted_with_each(tmp_path: Path) -> None:
    """Each of a thousand looked at all of them, and began a grace time of the host that would do so again: the end of a
    host took seconds of the event loop.
    """

    def lines_and_timers(num_ranks: int) -> tuple[int, int]:
        found: list[int] = []

        async def story() -> None:
            driver, loop = start(tmp_path / str(num_ranks)), asyncio.get_running_loop()
            hello = agent_pb2.AgentHello(host="host", slots=[agent_pb2.Slot(device="cpu")] * num_ranks, identity="one")
            agent_id, agents, to_agent = attend(driver, hello)
            spec = JobSpec(name="job", source_hash="", file_name="job.py", num_ranks=num_ranks)
            driver.handle(JobSubmitted(job_id=JobId("job"), spec=spec, submitted_at=1.0))
            opened = [(one, open_session(driver, one, 0)) for one in driver.core.addresses(JobId("job"))]
            assert agents.disconnect(to_agent)
            driver.presence.on_agent_away(agent_id)

            def go(address: Address, queue: SendQueue[Any] | None) -> None:
                stream = driver.streams.of_rank(address)
                assert stream is not None
                assert stream.disconnect(queue)
                driver.presence.on_rank_away(address)

            before = len(loop._scheduled)  # type: ignore[attr-defined]
            found.append(lines_run(lambda: [go(*one) for one in opened]))
            found.append(len(loop._scheduled) - before)  # type: ignore[attr-defined]
            driver.stop()

        (tmp_path / str(num_ranks)).mkdir()
        asyncio.run(story())
        lines, timers = found
        return lines, timers

    (few, _), (many, timers) = lines_and_timers(20), lines_and_timers(160)
    assert many < 1.5 * 8 * few
    assert timers == 161, "a grace time of each rank, and a shorter one of the host"


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_host_is_awaited_if_a_job_has_ranks_elsewhere(num_ranks: int) -> None:
    cluster = Cluster(1)
    cluster.handle(AgentJoined(agent_id=AgentId("other"), host="other", slots=(Slot(device="cpu"),)))
    cluster.submit("job", num_ranks)
    (first, *_) = cluster.core.jobs[JobId("job")].ranks.values()
    assert first.agent_id is not None
    assert cluster.core.is_awaited(first.agent_id) == (num_ranks == 2)
    assert cluster.core.can_begin_again(first.agent_id)


def test_an_agent_of_another_store_keeps_its_ranks(tmp_path: Path) -> None:
    """A coordinator that was started on an empty folder must not end what it knows nothing of."""

    async def story() -> None:
        driver = start(tmp_path)
        hello = agent_pb2.AgentHello()
        hello.CopyFrom(HELLO)
        hello.store, hello.num_ranks = "another", 1
        with pytest.raises(Superseded, match="another coordinator's"):
            attend(driver, hello)
        hello.num_ranks = 0
        _, _, queue = attend(driver, hello)
        assert said(queue)[0].welcome.is_new
        driver.stop()

    asyncio.run(story())


@pytest.mark.parametrize("damage", [b"", b"no pickle", b"\x80\x05."])
def test_a_saved_state_that_is_damaged_is_left_with_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, damage: bytes
) -> None:
    """The coordinator starts all the same, from the jobs' records."""
    monkeypatch.setattr(tape, "SAVE_EVERY", 1)
    monkeypatch.setattr(tape, "SAVE_FRACTION", 1e9)

    async def story() -> None:
        driver = start(tmp_path)
        driver.handle(
            JobSubmitted(
                job_id=JobId("job"), spec=JobSpec(name="job", source_hash="", file_name="job.py"), submitted_at=1.0
            )
        )
        await asyncio.wait_for(driver.durable(), 10)
        driver.stop()
        with sqlite3.connect(tmp_path / "elche.sqlite") as database:
            assert database.execute("UPDATE states SET state = ?", (damage,)).rowcount == 1
        assert tape.read(SqlStore.in_file(tmp_path / "elche.sqlite")) is None
        assert "has left what cannot be read" in caplog.text

    asyncio.run(story())


def test_a_tape_of_long_events_is_replaced_sooner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two thousand reports of 200 KB made a database of 300 MB."""
    monkeypatch.setattr(tape, "SAVE_BYTES", 50_000)
    monkeypatch.setattr(tape, "SAVE_FRACTION", 1e9)

    async def story() -> None:
        one = start_with_job(tmp_path, 1)
        opened(one)
        for _ in range(100):
            one.handle(UserEventRecorded(**RANK, text="x" * 10_000))
            await asyncio.wait_for(one.durable(), 10)
        one.stop()
        with sqlite3.connect(tmp_path / "elche.sqlite") as database:
            ((num_bytes,),) = database.execute("SELECT coalesce(sum(length(entries)), 0) FROM tape")
        assert num_bytes < 70_000

    asyncio.run(story())


def test_a_saved_state_replaces_the_tape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a coordinator reads when it starts does not grow with the events of its life."""
    monkeypatch.setattr(tape, "SAVE_EVERY", 20)
    monkeypatch.setattr(tape, "SAVE_FRACTION", 1e9)

    async def story() -> None:
        driver = start(tmp_path)
        attend(driver, HELLO)
        spec = JobSpec(name="job", source_hash="", file_name="job.py", num_ranks=9)
        for number in range(100):
            driver.handle(JobSubmitted(job_id=JobId(f"job-{number}"), spec=spec, submitted_at=1.0))
            await asyncio.wait_for(driver.durable(), 10)
        driver.stop()
        recorded = tape.read(SqlStore.in_file(tmp_path / "elche.sqlite"))
        assert recorded is not None
        assert recorded.last == 101
        assert len(recorded.entries) < 25

    asyncio.run(story())


def test_a_restarted_coordinator_repeats_for_no_longer_than_a_few_saves_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save waited for a hundred times its own time by the clock, in which a thousand ranks said what then took five
    seconds to repeat.
    """
    now_s = 1.0
    saved: list[int] = []
    handle, take = Coordinator.handle, Snapshots.take

    def handle_for_10_ms(core: Coordinator, event: Event, *, now_s: float) -> list[Command]:
        pass_by(0.01)
        return handle(core, event, now_s=now_s)

    def take_for_20_ms(snapshots: Snapshots, last: int, code: str) -> SavedState:
        pass_by(0.02)
        saved.append(last)
        return take(snapshots, last, code)

    def pass_by(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    monkeypatch.setattr(tape, "SAVE_EVERY", 10)
    monkeypatch.setattr(tape, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(Coordinator, "handle", handle_for_10_ms)
    monkeypatch.setattr(Snapshots, "take", take_for_20_ms)

    async def story() -> None:
        driver = start_with_job(tmp_path, 1)
        opened(driver)
        for _ in range(200):
            driver.handle(UserEventRecorded(**RANK, text="said"))
        driver.stop()

    asyncio.run(story())
    assert {later - one for one, later in pairwise(saved)} <= {40, 41}, "twenty times a save, or what rounding adds"
    assert len(saved) == 5


def test_what_a_rank_says_in_each_round_is_told_to_be_taken_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each entry and each result had an acknowledgement of its own, half of all that a thousand ranks were sent."""
    monkeypatch.setattr("elche_coordinator.driver.TAKEN_LATER_S", 1000.0)

    async def story() -> None:
        one = start_with_job(tmp_path, 2)
        queue = opened(one)
        assert said(queue)[0].HasField("welcome")
        generation = GenerationId(1)
        for number, round_id in ((1, RoundId(1)), (3, RoundId(2))):
            one.handle(RoundEntered(**RANK, generation=generation, round=round_id), number=number)
            result = ResultReceived(**RANK, generation=generation, round=round_id, header=(), collective_ms=1.0)
            one.handle(result, number=number + 1)
            await one.durable()
        assert said(queue) == [], "nothing hangs on it"
        one.handle(GroupFormed(**RANK, generation=generation), number=5)
        await one.durable()
        assert [message.taken.seq for message in said(queue)] == [5]
        one.stop()

    asyncio.run(story())


@pytest.mark.parametrize("says_more", [True, False])
def test_that_a_rank_has_entered_a_round_is_taken_is_told_with_what_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says_more: bool
) -> None:
    """The round's result, soon; one message for both. If nothing follows, it is told all the same, a little later."""
    monkeypatch.setattr("elche_coordinator.driver.TAKEN_LATER_S", 1000.0 if says_more else 0.01)

    async def story() -> None:
        one = start_with_job(tmp_path, 2)
        queue = opened(one)
        assert said(queue)[0].HasField("welcome")
        stream = one.streams.of_rank(RANK)
        assert stream is not None
        one.handle(RoundEntered(**RANK, generation=GenerationId(1), round=RoundId(1)), number=1)
        await until(lambda: stream.num_taken == 1)
        if says_more:
            one.handle(GroupFormed(**RANK, generation=GenerationId(1)), number=2)
        told: list[int] = []
        await until(lambda: bool(told.extend(message.taken.seq for message in said(queue)) or told))
        assert told == [2 if says_more else 1]
        one.stop()

    asyncio.run(story())


def test_connections_over_which_the_oldest_message_does_not_arrive_are_counted() -> None:
    """As where large packets are lost: the receiver connects, again and again."""
    stream = new_stream()
    for count in (0, 0):
        assert stream.disconnect(stream.connect(0))
        assert stream.num_in_vain == count
    keep(stream, 2)
    for count in (1, 2, 3):
        assert stream.disconnect(stream.connect(0))
        assert stream.num_in_vain == count
    assert stream.disconnect(stream.connect(1))
    assert stream.num_in_vain == 1, "another one is the oldest now"
    assert stream.disconnect(stream.connect(2))
    assert stream.num_in_vain == 0

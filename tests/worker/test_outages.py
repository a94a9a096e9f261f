"""An agent whose coordinator goes away: its ranks go on, for as long as they are to, and say then where they are."""

import queue
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from elche.v1 import agent_pb2, agent_pb2_grpc, rank_pb2, rank_pb2_grpc
from elche_worker.agent.agent import Agent
from elche_worker.session import session as session_module
from elche_worker.session.session import Session
from support.real_processes import eventually

KEEP_S = 0.5


class QuietCoordinator(agent_pb2_grpc.AgentServiceServicer):
    """Welcomes an agent, says nothing more, and breaks the stream when a test wants it."""

    def __init__(self) -> None:
        self.hellos: list[agent_pb2.AgentHello] = []
        self.breaks = threading.Event()
        self.attended = threading.Semaphore(0)

    def Attend(self, request_iterator: Any, context: Any) -> Iterator[agent_pb2.AttendResponse]:  # noqa: N802
        self.hellos.append(next(request_iterator).hello)
        welcome = agent_pb2.AgentWelcome(agent_id="agent-1", store="store")
        yield agent_pb2.AttendResponse(welcome=welcome)
        self.attended.release()
        self.breaks.wait(400)
        self.breaks.clear()
        context.abort(grpc.StatusCode.UNAVAILABLE, "it breaks")


class Ranks:
    """Two ranks that run until they are ended."""

    def __init__(self) -> None:
        self.num_running = 2
        self.ended = threading.Event()

    def warm_up(self) -> None:
        return

    def watch(self, is_over: threading.Event) -> None:
        return

    def kill_all(self) -> None:
        self.ended.set()

    def close(self) -> None:
        self.num_running = 0


@pytest.fixture
def one() -> Iterator[tuple[QuietCoordinator, grpc.Server, Ranks]]:
    servicer, server = QuietCoordinator(), grpc.server(ThreadPoolExecutor(4))
    agent_pb2_grpc.add_AgentServiceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    agent, ranks = Agent(f"127.0.0.1:{port}", [], Path("/nowhere"), keep_s=KEEP_S), Ranks()
    agent._processes = ranks  # type: ignore[assignment]
    thread = threading.Thread(target=agent.run)
    thread.start()
    assert servicer.attended.acquire(timeout=100)
    yield servicer, server, ranks
    agent.stop()
    servicer.breaks.set()
    server.stop(None)
    thread.join(400)
    assert not thread.is_alive()


def test_a_stream_that_was_quiet_for_long_breaks_and_no_rank_is_ended(one: Any) -> None:
    """The time away begins when the stream ends: a coordinator may have nothing to say for hours."""
    servicer, _, ranks = one
    assert not ranks.ended.wait(3 * KEEP_S), "it is quiet, not away"
    servicer.breaks.set()
    assert servicer.attended.acquire(timeout=100), "it attends again"
    assert not ranks.ended.is_set()
    first, again = servicer.hellos
    assert again.identity == first.identity
    assert (again.store, again.num_ranks) == ("store", 2)


def test_ranks_are_ended_when_the_coordinator_does_not_come_back(one: Any) -> None:
    servicer, server, ranks = one
    server.stop(None)
    servicer.breaks.set()
    assert ranks.ended.wait(400)


class OfRanks(rank_pb2_grpc.RankServiceServicer):
    """Notes each step that a rank reports, and whether its stream is open; breaks it when a test wants it."""

    def __init__(self) -> None:
        self.steps: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.breaks, self.may_open = threading.Event(), threading.Semaphore(1)
        self.refuses = False

    def Converse(self, request_iterator: Any, context: Any) -> Iterator[rank_pb2.ConverseResponse]:  # noqa: N802
        assert self.may_open.acquire(timeout=100)
        if self.refuses:
            self.may_open.release()
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "its store is older")
        yield rank_pb2.ConverseResponse(welcome=rank_pb2.Welcome(store="store"))
        reading = threading.Thread(target=self._read, args=[request_iterator], daemon=True)
        reading.start()
        self.breaks.wait(400)
        self.breaks.clear()
        context.abort(grpc.StatusCode.UNAVAILABLE, "it breaks")

    def _read(self, requests: Any) -> None:
        try:
            for request in requests:
                self.steps.put(request.batches_trained.local_step)
        except Exception:  # the stream has been broken
            pass


def report(session: Session, step: int) -> None:
    session.send(rank_pb2.ConverseRequest(batches_trained=rank_pb2.BatchesTrained(local_step=step)))


@pytest.fixture
def conversing() -> Iterator[tuple[OfRanks, Session, threading.Event]]:
    """A rank's session with a coordinator, and whether it has found it away."""
    servicer, server = OfRanks(), grpc.server(ThreadPoolExecutor(4))
    rank_pb2_grpc.add_RankServiceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    away = threading.Event()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        session = Session(channel, "secret", on_command=lambda _: None, on_lost=lambda _: None, on_away=away.set)
        try:
            yield servicer, session, away
        finally:
            session.close()
            servicer.breaks.set()
            server.stop(None)


def test_a_rank_says_on_its_next_stream_how_far_it_has_come_meanwhile(conversing: Any) -> None:
    """It trains no more until it is told to, and would be taken for one that hangs."""
    servicer, session, away = conversing
    report(session, 3)
    assert servicer.steps.get(timeout=400) == 3
    servicer.breaks.set()
    assert away.wait(400)
    report(session, 4)
    report(session, 5)
    servicer.may_open.release()
    assert servicer.steps.get(timeout=400) == 5


def test_a_rank_that_is_refused_says_so_though_it_has_just_said_that_the_coordinator_is_away(
    conversing: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an older state was restored ranks waited, and their logs said for a minute that the coordinator is away."""
    monkeypatch.setattr(session_module, "LOG_EVERY_S", 1e9)
    servicer, _, away = conversing
    servicer.breaks.set()
    assert away.wait(400)
    servicer.refuses = True
    servicer.may_open.release()
    said = ""

    def refused() -> bool:
        nonlocal said
        said += capsys.readouterr().err
        return "refuses" in said

    eventually(refused, "it says that it is refused")
    assert said.splitlines() == [
        "elche: the coordinator is away (it breaks); this rank goes on, and tries again",
        "elche: the coordinator refuses this rank (its store is older); this rank goes on, and tries again",
    ]

"""An agent that is told to stop stops, whatever it was about to do; so does a coordinator whose terminal is closed."""

import asyncio
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from elche import stopping
from elche.v1 import agent_pb2, agent_pb2_grpc
from elche_client.local.notifications import NotificationQueue, SignalReceived, forward_signals
from elche_coordinator.lifecycle.stopping import Stop
from elche_worker.agent import agent as module
from elche_worker.agent.agent import Agent
from elche_worker.agent.main import _find, leave_on_signals
from elche_worker.agent.processes import Processes


class Silent(agent_pb2_grpc.AgentServiceServicer):
    """Lets an agent attend and says nothing."""

    def Attend(  # noqa: N802
        self, requests: Iterator[agent_pb2.AttendRequest], context: grpc.ServicerContext
    ) -> Iterator[agent_pb2.AttendResponse]:
        ended = threading.Event()
        if context.add_callback(ended.set):  # else the call has ended already
            ended.wait()
        yield from ()


def test_an_agent_is_stopped_as_it_opens_a_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There was no call yet that could be cancelled; the one that it made then was waited for, forever."""
    monkeypatch.setattr(Processes, "warm_up", lambda self: None)
    server = grpc.server(ThreadPoolExecutor(4))
    agent_pb2_grpc.add_AgentServiceServicer_to_server(Silent(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    agent = Agent(f"127.0.0.1:{port}", [], tmp_path)

    @contextmanager
    def opened_as_it_stops(address: str, tls: str) -> Iterator[grpc.Channel]:
        with grpc.insecure_channel(address) as channel:
            agent.stop()
            yield channel

    monkeypatch.setattr(module, "open_channel", opened_as_it_stops)
    running = threading.Thread(target=agent.run, daemon=True)
    running.start()
    try:
        running.join(400)
        assert not running.is_alive()
    finally:
        server.stop(None)  # or its threads keep the process that has failed


@pytest.fixture(params=[signal.SIG_DFL, signal.SIG_IGN], ids=["in a terminal", "under nohup"])
def before(request: pytest.FixtureRequest) -> Iterator[signal.Handlers]:
    """What SIGHUP did before; all signals do what they did once the test has ended."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = [signal.getsignal(number) for number in numbers]
    signal.signal(signal.SIGHUP, request.param)
    yield request.param
    for number, handler in zip(numbers, handlers, strict=True):
        signal.signal(number, handler)


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each signal is a request of its own."""
    monkeypatch.setattr(stopping, "ONE_S", 0.0)


@pytest.mark.usefixtures("one_by_one")
def test_a_worker_whose_terminal_is_closed_leaves_in_order(before: signal.Handlers) -> None:
    """It was killed. The kernel and the shell may both say that it is closed, and who ends one sends SIGTERM, too:
    neither is an order to hurry.
    """
    calls: queue.SimpleQueue[str] = queue.SimpleQueue()
    leave_on_signals(lambda: calls.put("leave"))
    for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM):
        os.kill(os.getpid(), number)
    assert calls.get(timeout=400) == "leave"
    assert calls.empty(), f"it hurries, with SIGHUP as {before!r} before"
    for number in (signal.SIGHUP, signal.SIGTERM):
        os.kill(os.getpid(), number)
    assert calls.get(timeout=400) == "leave"
    assert calls.empty()


@pytest.mark.usefixtures("one_by_one")
def test_a_coordinator_whose_terminal_is_closed_stops_in_order(before: signal.Handlers) -> None:
    async def run() -> None:
        stop = Stop(exit_with_stdin=False)
        if before is signal.SIG_IGN:
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            return
        os.kill(os.getpid(), signal.SIGHUP)
        async with asyncio.timeout(100):
            await stop.asked.wait()
        for number in (signal.SIGHUP, signal.SIGTERM):
            os.kill(os.getpid(), number)
        for _ in range(10):  # turns of the loop, in which it would see a signal
            await asyncio.sleep(0.01)
        assert not stop.at_once.is_set()
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(100):
            await stop.at_once.wait()

    asyncio.run(run())


@pytest.mark.usefixtures("before")
def test_two_signals_at_one_time_are_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """`timeout` sends its signal to the command and to the command's group: a run, a worker and a coordinator that it
    ended took the second for an order to hurry, and lost what they had trained since the last checkpoint.
    """
    monkeypatch.setattr(stopping, "ONE_S", 10_000.0)  # however long this process waits for a processor
    notifications: NotificationQueue = queue.SimpleQueue()
    with forward_signals(notifications, kill=lambda: pytest.fail("it hurries")):
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
        assert notifications.get(timeout=400) == SignalReceived(number=signal.SIGTERM)
    calls: queue.SimpleQueue[str] = queue.SimpleQueue()
    leave_on_signals(lambda: calls.put("leave"))
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)
    assert calls.get(timeout=400) == "leave"

    async def run() -> None:
        stop = Stop(exit_with_stdin=False)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.01)
        assert stop.asked.is_set()
        assert not stop.at_once.is_set()

    asyncio.run(run())
    assert calls.empty()


def test_a_signal_after_some_time_hurries(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(stopping.time, "monotonic", lambda: now_s)
    signals = stopping.StopSignals()
    assert [signals.hurries(number) for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGTERM)] == [False] * 3
    now_s += stopping.ONE_S
    assert [signals.hurries(number) for number in (signal.SIGHUP, signal.SIGTERM)] == [False, True]


def test_ctrl_c_is_not_for_the_process_that_lists_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is of the same terminal, and printed a traceback into a worker that was ended while it started."""
    popen, before, inherited = subprocess.Popen, signal.getsignal(signal.SIGINT), []

    def listing(command: object, **how: Any) -> "subprocess.Popen[str]":
        inherited.append(signal.getsignal(signal.SIGINT))
        return popen(["echo", '[{"device": "cuda:0"}]'], **how)

    monkeypatch.setattr(subprocess, "Popen", listing)
    assert _find(["cuda:0"]) == [{"device": "cuda:0"}]
    assert inherited == [signal.SIG_IGN]
    assert signal.getsignal(signal.SIGINT) is before

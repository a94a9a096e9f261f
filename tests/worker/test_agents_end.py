"""An agent that is told to stop stops, whatever it was about to do."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from elche.v1 import agent_pb2, agent_pb2_grpc
from elche_worker.agent import agent as module
from elche_worker.agent.agent import Agent
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
    """There was no call yet that could be cancelled; the one that it made then was waited for, for ever."""
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
        running.join(100)
        assert not running.is_alive()
    finally:
        server.stop(None)  # or its threads keep the process that has failed

"""Agents and ranks that are nobody's: they say to a real coordinator whatever a test wants."""

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from elche.ready import ready_message
from elche.settings import AgreedSettings
from elche.v1 import agent_pb2, agent_pb2_grpc, rank_pb2, rank_pb2_grpc

AGREED = AgreedSettings(
    epochs=1, batch_size=10, dataset_size=100, checkpoint_every_minutes=None, divergence_threshold=0
)
READY: dict[str, Any] = {field.name: value for field, value in ready_message(AGREED, device="cpu").ListFields()}
"""What a rank says when it is ready, by field."""
"""What a rank says of a small job."""


class FakeAgent:
    """Attends with slots, starts nothing, and keeps what it is told to start."""

    def __init__(self, channel: grpc.Channel, num_slots: int = 2, host: str = "fake", **labels: str) -> None:
        self.outgoing: queue.SimpleQueue[agent_pb2.AttendRequest | None] = queue.SimpleQueue()
        slots = [agent_pb2.Slot(device="cpu")] * num_slots
        self.outgoing.put(agent_pb2.AttendRequest(hello=agent_pb2.AgentHello(host=host, slots=slots, labels=labels)))
        self.stream = agent_pb2_grpc.AgentServiceStub(channel).Attend(iter(self.outgoing.get, None))
        assert next(self.stream).HasField("welcome")

    def started(self) -> agent_pb2.StartRank:
        """The next rank to start."""
        return next(message.start_rank for message in self.stream if message.HasField("start_rank"))

    def exited(self, start: agent_pb2.StartRank, code: int = 0, log_tail: str = "said by a fake") -> None:
        """Says that a rank has ended."""
        address = {"job_id": start.job_id, "rank": start.rank, "incarnation": start.incarnation}
        exited = agent_pb2.RankExited(**address, exit_code=code, log_tail=log_tail)
        self.outgoing.put(agent_pb2.AttendRequest(rank_exited=exited))

    def leave(self) -> None:
        self.outgoing.put(None)
        for _ in self.stream:
            pass


@contextmanager
def fake_agent(channel: grpc.Channel, num_slots: int = 2, host: str = "fake", **labels: str) -> Iterator[FakeAgent]:
    agent = FakeAgent(channel, num_slots, host, **labels)
    try:
        yield agent
    finally:
        agent.leave()


class FakeRank:
    """One rank's session."""

    def __init__(self, channel: grpc.Channel, secret: str) -> None:
        self.outgoing: queue.SimpleQueue[rank_pb2.ConverseRequest | None] = queue.SimpleQueue()
        stub = rank_pb2_grpc.RankServiceStub(channel)
        self.stream = stub.Converse(iter(self.outgoing.get, None), metadata=(("elche-secret", secret),))

    def say(self, **message: Any) -> None:
        """Sends one message."""
        self.outgoing.put(rank_pb2.ConverseRequest(**message))

    def heard(self, kind: str) -> Any:
        """The next message of a kind."""
        return next(getattr(message, kind) for message in self.stream if message.HasField(kind))

    def leave(self) -> None:
        self.outgoing.put(None)
        for _ in self.stream:
            pass

"""The gRPC service of agents: hosts that offer devices, start ranks and deliver files."""

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import TypeVar, assert_never

import grpc

from elche.errors import ElcheError, InvalidJob, UnknownMessage, Unreachable
from elche.mapping import from_message
from elche.v1 import agent_pb2, agent_pb2_grpc
from elche_coordinator import codec
from elche_coordinator.core.messages.events import (
    DrainRequested,
    Event,
    HostFitnessChanged,
    RankExited,
    RankStarted,
    StacksReported,
)
from elche_coordinator.core.messages.ids import AgentId
from elche_coordinator.core.records.ranks import address_of
from elche_coordinator.driver import AnyStream, Driver
from elche_coordinator.limits.budgets import HELLO_S
from elche_coordinator.limits.releasing import Context
from elche_coordinator.roles import CALLER
from elche_coordinator.services.sessions import attend
from elche_coordinator.streams.send_queue import SendQueue
from elche_coordinator.streams.transfers import BEGIN_S, Transfers

log = logging.getLogger(__name__)

Request = TypeVar("Request")

MANY_IN_VAIN = 3
"""Connections of an agent that end before an order has arrived, after which it gets no more ranks."""
UNREACHED = (
    "it connects, but its orders do not arrive: large packets to it may be lost; see whether all network interfaces on "
    "the way have the same MTU"
)
"""The problem of such a host."""


class AgentServicer(agent_pb2_grpc.AgentServiceServicer):
    """The streams of agents, and their deliveries of files."""

    def __init__(self, driver: Driver, transfers: Transfers) -> None:
        self._driver = driver
        self._transfers = transfers

    async def Attend(
        self, request_iterator: AsyncIterator[agent_pb2.AttendRequest], context: Context
    ) -> AsyncIterator[agent_pb2.AttendResponse]:
        first = await _next(request_iterator, HELLO_S)
        if first is None or not first.HasField("hello"):
            raise InvalidJob("the first message of an agent must be its hello")
        agent_id, stream, queue = attend(self._driver, first.hello, CALLER.get().name)
        self._note_arrival(agent_id, stream)
        reading = asyncio.ensure_future(self._read(agent_id, request_iterator, stream, queue))
        try:
            async for order in queue:
                if (response := self._driver.order_message(order)) is not None:
                    yield response
            if reading.done():
                reading.result()  # raises the error of the agent's last message
        finally:
            reading.cancel()
            if stream.disconnect(queue):
                log.info("agent=%s has disconnected", agent_id)
                self._note_arrival(agent_id, stream)
                if context.code() == grpc.StatusCode.UNAUTHENTICATED:  # its token has ended, so its ranks may not stay
                    self._driver.presence.lose_agent(agent_id)
                else:
                    self._driver.presence.on_agent_away(agent_id)

    async def _read(
        self,
        agent_id: AgentId,
        requests: AsyncIterator[agent_pb2.AttendRequest],
        stream: AnyStream,
        queue: SendQueue[agent_pb2.AttendResponse],
    ) -> None:
        try:
            async for request in requests:
                self._driver.health.messages["agent", "in"] += 1
                stream.on_received(request.num_received)
                self._note_arrival(agent_id, stream)
                if queue.is_closed or not stream.is_news(request.seq):
                    continue  # another connection has taken its place, or it has come before
                match request.WhichOneof("message"):
                    case "rank_started":
                        event: Event = from_message(request.rank_started, RankStarted, agent_id=agent_id)
                    case "rank_exited":
                        exited = codec.rank_exited(agent_id, request.rank_exited)
                        event = exited if self._has(exited) else replace(exited, log_tail="")
                    case "rank_stacks":
                        stacks = from_message(request.rank_stacks, StacksReported, agent_id=agent_id)
                        event = stacks if self._has(stacks) else replace(stacks, text="")
                    case "host_leaves":
                        event = DrainRequested(agent_id=agent_id, is_drained=True)
                    case "host_fitness":
                        event = self._fitness(agent_id, request.host_fitness.problem)
                    case "hello":
                        raise InvalidJob("an agent says its hello once, and first")
                    case None:
                        raise UnknownMessage("AttendRequest")
                    case unreachable:
                        assert_never(unreachable)
                self._driver.handle(event, number=request.seq)
                await self._driver.take(stream, request, CALLER.get().name)
        except ElcheError as error:
            log.warning("agent=%s has sent an invalid message and is disconnected: %s", agent_id, error)
            raise
        finally:
            queue.close()

    def _note_arrival(self, agent_id: AgentId, stream: AnyStream) -> None:
        """Notes whether orders reach a host: jobs are placed on others meanwhile, and those that start there say so."""
        host = self._driver.core.fleet.agents.get(agent_id)
        before = problem = host.problem if host is not None else ""
        if stream.num_in_vain >= MANY_IN_VAIN:
            problem = UNREACHED
        elif not stream.num_in_vain and before == UNREACHED:
            problem = ""
        if problem != before:
            self._driver.handle(self._fitness(agent_id, problem))

    def _fitness(self, agent_id: AgentId, problem: str) -> HostFitnessChanged:
        """The event; logs it if that has changed: an agent says it again when it connects again."""
        host = self._driver.core.fleet.agents.get(agent_id)
        if host is not None and host.problem != problem:
            if problem:
                log.warning("agent=%s host=%s can start no ranks, and gets no more: %s", agent_id, host.host, problem)
            else:
                log.info("agent=%s host=%s can start ranks again", agent_id, host.host)
        return HostFitnessChanged(agent_id=agent_id, problem=problem)

    def _has(self, event: RankExited | StacksReported) -> bool:
        """True if the event's process is on its agent's host. Of others, the core takes in nothing that an agent says,
        but the event is written, for the acknowledgement: without the text, which may be long.
        """
        address, core = address_of(event), self._driver.core
        return core.is_there(address) and core.agent_of(address) == event.agent_id

    async def Deliver(
        self, request_iterator: AsyncIterator[agent_pb2.DeliverRequest], context: Context
    ) -> agent_pb2.DeliverResponse:
        transfer = ""
        try:
            while (request := await _next(request_iterator, BEGIN_S)) is not None:
                transfer = transfer or request.transfer
                if request.error:
                    await self._transfers.deliver(transfer, InvalidJob(request.error))
                    return agent_pb2.DeliverResponse()
                if request.sha256 or request.HasField("offset"):
                    self._transfers.announce(transfer, request.sha256, request.offset)
                await self._transfers.deliver(transfer, request.data)  # empty data is a sign of life
            await self._transfers.deliver(transfer, None)
        except BaseException:  # also when the agent's end cancels this call
            self._transfers.lose(transfer)
            raise
        return agent_pb2.DeliverResponse()


async def _next(requests: AsyncIterator[Request], wait_s: float) -> Request | None:
    """The next message; None at the end. Raises `Unreachable` if none comes in time."""
    try:
        async with asyncio.timeout(wait_s):
            return await anext(requests, None)
    except TimeoutError:
        raise Unreachable(f"nothing has come for {wait_s:g} s") from None

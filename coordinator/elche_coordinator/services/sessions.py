"""Opens the streams of agents and ranks, for the first time and again (protocol P15)."""

import logging

from elche.v1 import agent_pb2, rank_pb2
from elche_coordinator import codec
from elche_coordinator.core.messages.events import SessionOpened
from elche_coordinator.core.messages.ids import AgentId, JobId
from elche_coordinator.core.records.ranks import Address
from elche_coordinator.driver import AnyStream, Driver
from elche_coordinator.streams.send_queue import SendQueue
from elche_coordinator.streams.streams import Superseded

log = logging.getLogger(__name__)

AgentQueue = SendQueue[agent_pb2.AttendResponse]
RankQueue = SendQueue[rank_pb2.ConverseResponse]

OTHER_STORE = "they wait for that; end the agent to give them up"


def attend(driver: Driver, hello: agent_pb2.AgentHello, caller: str = "") -> tuple[AgentId, AnyStream, AgentQueue]:
    """Opens an agent's stream, for the first time or again; also returns the queue of messages to it.

    Raises `Superseded` when the agent's ranks belong to another coordinator's store, or to a newer state of this,
    `TooMuch` when the caller has too many agents, and `Unreachable` when the driver has been stopped.
    """
    driver.require_running()
    if hello.store not in ("", driver.identity.id) and hello.num_ranks:
        raise Superseded(f"ranks of another coordinator's run on {hello.host}; {OTHER_STORE}")
    driver.presence.lose_identities(hello.gone)
    known = driver.streams.identities.get(hello.identity) if hello.identity else None
    if known is not None and hello.store != driver.identity.id:
        driver.presence.lose_agent(known)
    is_new = known is None or hello.store != driver.identity.id
    agent_id = driver.streams.next_agent_id if is_new or known is None else known
    driver.agents.hold(agent_id, caller, hello)
    if is_new:
        log.info("agent=%s host=%s offers %d slots", agent_id, hello.host, len(hello.slots))
        if others := driver.core.fleet.holders(JobId(""), AgentId(""), hello.folder):
            log.info("agent=%s has the work folder of %s: it is shared, or one is a copy", agent_id, ", ".join(others))
        driver.handle(codec.agent_joined(agent_id, hello), identity=hello.identity)
    stream = driver.streams.agents[agent_id]
    queue: AgentQueue = stream.connect(0 if is_new else hello.num_received)
    welcome = agent_pb2.AgentWelcome(
        agent_id=agent_id, store=driver.identity.id, taken=stream.num_taken, is_new=is_new, takes_fitness=True
    )
    # First of all: it says which of the agent's messages are durable, before any order is repeated.
    queue.put(agent_pb2.AttendResponse(welcome=welcome))
    stream.resend()
    driver.presence.release_stopped()
    return agent_id, stream, queue


def open_session(driver: Driver, address: Address, num_received: int | None) -> RankQueue | None:
    """Opens a rank's stream; returns the queue of messages to it. None if this process has opened one before, and
    does not say how many messages it has heard. Raises `Superseded`, and `Unreachable` when the driver has been
    stopped.
    """
    driver.require_running()
    stream = driver.streams.of_rank(address)
    if stream is None and num_received:
        raise Superseded("the coordinator's store is older than its ranks; start it on the newer one")
    if stream is None:
        driver.handle(SessionOpened(**address), identity="" if num_received is None else "rank")
        stream = driver.streams.of_rank(address)
    elif num_received is None or not stream.is_resumable or stream.is_over:
        return None
    assert stream is not None
    queue: RankQueue = stream.connect(num_received or 0)
    welcome = rank_pb2.Welcome(store=driver.identity.id, taken=stream.num_taken, takes_stopped=True)
    queue.put(rank_pb2.ConverseResponse(welcome=welcome))
    stream.resend()
    driver.ask_again(address)
    driver.presence.release_stopped()
    return queue

"""Presence of agents and ranks: grace times in which one whose stream has ended may reconnect before it is lost."""

import asyncio
from collections.abc import Callable, Iterable

from elche_coordinator.core.coordinator import Coordinator
from elche_coordinator.core.messages.events import AgentLost, Event, SessionLost
from elche_coordinator.core.messages.ids import AgentId
from elche_coordinator.core.records.ranks import Address
from elche_coordinator.streams.streams import Stream, Streams

AGENT_GRACE_S = 10.0
"""Seconds for which an agent with ranks may be away, which tries to reconnect every second."""
BOTH_GRACE_S = 1.5
"""The same if one of its ranks is away as well, and its jobs have ranks on other hosts, which wait for so long if the
host is dead. If a proxy has cut all connections, both come back sooner: they try five times in that time. Without ranks
on other hosts, jobs would go back to a checkpoint, or fail, so that there is no reason for haste.
"""
LAST_GRACE_S = 30.0
"""The same if no job on the host has ranks elsewhere, and each would fail without the host, as submitted loops do."""
SESSION_GRACE_S = 600.0
"""Seconds for which a rank may be away whose agent, which would report its death, is connected: it may be stopped in a
debugger. Others that wait for it may go on without it much sooner (protocol P20.3).
"""
LOOP_GRACE_S = 2.0
"""The same for a user-owned loop, without an agent that reports a death; `AGENT_GRACE_S` if no rank is connected."""
RESTART_GRACE_S = 30.0
"""Seconds in which agents and ranks must reconnect to a restarted coordinator."""
LOOP_RESTART_GRACE_S = 8.0
"""The same for ranks of a user-owned loop: others may be waiting for one that has died meanwhile."""


class Presence:
    """Follows the streams of agents and ranks, and reports who is lost (protocol P15.4). An agent is lost, with its
    ranks, when its stream is not back after a grace time and none of its ranks is connected either. A rank whose agent
    is connected is lost when its own stream is not back.
    """

    def __init__(self, core: Coordinator, streams: Streams, handle: Callable[[Event], None]) -> None:
        self._core = core
        self._streams = streams
        self._handle = handle
        self._stopped: set[AgentId] = set()
        """Former agents for whose ranks another agent has said that they stopped (protocol P19.7)."""
        self._judging: dict[Stream[object], asyncio.TimerHandle] = {}
        """The newest grace time of each rank that has been away."""
        self._judging_agents: dict[AgentId, tuple[asyncio.TimerHandle, bool]] = {}
        """The newest grace time of each agent that has been away, and whether it is that for an agent and its ranks."""

    def on_agent_away(self, agent_id: AgentId) -> None:
        """Handles the end of an agent's stream. One without ranks is lost at once."""
        stream = self._streams.agents.get(agent_id)
        if stream is None:
            return
        ranks = self._core.ranks_of(agent_id)
        if not stream.is_resumable or not ranks:
            self.lose_agent(agent_id)
        else:
            are_both_lost = any(self._is_lost(address) for address in ranks)
            grace_s = self._grace_s(agent_id, are_both_lost=are_both_lost)
            self._await_agent(agent_id, stream, grace_s, are_both_lost=are_both_lost)

    def on_rank_away(self, address: Address) -> None:
        """Handles the end of a rank's stream."""
        stream, agent_id = self._streams.of_rank(address), self._core.agent_of(address)
        if stream is None or stream.is_over:
            return
        agent = self._streams.agents.get(agent_id) if agent_id is not None else None
        if agent_id is not None and agent is not None and agent.is_lost and self._is_lost(address):
            self._hasten(agent_id, agent)
        if not stream.is_resumable:
            self._handle(SessionLost(**address))
        elif agent_id is None:
            self._await_rank(address, stream, LOOP_GRACE_S, alone_s=AGENT_GRACE_S - LOOP_GRACE_S)
        else:
            self._await_rank(address, stream, SESSION_GRACE_S)

    def on_stopped(self, address: Address) -> None:
        """Handles that a rank has stopped while no coordinator answered."""
        if (agent_id := self._core.agent_of(address)) is not None:
            self._stopped.add(agent_id)
            self.release_stopped()

    def release_stopped(self) -> None:
        """Reports former agents as lost once each job of their stopped ranks has a rank elsewhere that is connected.
        These ranks then need not wait until the next agent on that host gives up offering the drafts of the stopped
        ones. Called when an agent or rank has connected.
        """
        for agent_id in list(self._stopped):
            others = self._core.beside_stopped(agent_id)
            if others and all(any(map(self._lives, one)) for one in others):
                self._stopped.discard(agent_id)
                self.lose_agent(agent_id)

    def _lives(self, address: Address) -> bool:
        """True if a rank and its agent are both connected. Of a rank that has stopped, only the rank's stream is: the
        next agent on its host opens it to report the stop, before it attends itself.
        """
        stream, agent_id = self._streams.of_rank(address), self._core.agent_of(address)
        agent = self._streams.agents.get(agent_id) if agent_id is not None else None
        return stream is not None and stream.is_connected and agent is not None and agent.is_connected

    def await_all(self) -> None:
        """Starts the grace times of all agents and ranks, which have to reconnect after the coordinator's restart."""
        for agent_id, stream in self._streams.agents.items():
            self._await_agent(agent_id, stream, RESTART_GRACE_S)
        for job_id, streams in self._streams.ranks.items():
            for (rank, incarnation), stream in streams.items():
                address: Address = {"job_id": job_id, "rank": rank, "incarnation": incarnation}
                is_of_loop = self._core.agent_of(address) is None
                self._await_rank(address, stream, LOOP_RESTART_GRACE_S if is_of_loop else RESTART_GRACE_S)

    def lose_agent(self, agent_id: AgentId) -> None:
        """Reports the agent, if it is known, as lost with its ranks."""
        self._stopped.discard(agent_id)
        if agent_id in self._streams.agents:
            # Before the event, after which the stream is not found any more.
            self._streams.agents[agent_id].close()
            self._handle(AgentLost(agent_id=agent_id))

    def lose_identities(self, identities: Iterable[str]) -> None:
        """Reports agents, by identity, as lost that another agent of their host has found dead."""
        for identity in identities:
            agent_id = self._streams.identities.get(identity)
            if agent_id is not None and not self._streams.agents[agent_id].is_connected:
                self.lose_agent(agent_id)

    def _is_lost(self, address: Address) -> bool:
        stream = self._streams.of_rank(address)
        return stream is not None and stream.is_lost and self._core.has_session_due(address)

    def _grace_s(self, agent_id: AgentId, *, are_both_lost: bool) -> float:
        """How long an agent may be away, and if `are_both_lost`, one of its ranks with it."""
        if self._core.is_awaited(agent_id):
            return BOTH_GRACE_S if are_both_lost else AGENT_GRACE_S
        return AGENT_GRACE_S if self._core.can_begin_again(agent_id) else LAST_GRACE_S

    def _hasten(self, agent_id: AgentId, stream: Stream[object]) -> None:
        """Shortens the grace time of an agent that is away, since one of its ranks is, too."""
        timer, are_both_lost = self._judging_agents.get(agent_id, (None, False))
        if are_both_lost:  # since an earlier one of its ranks went: a thousand may go at once
            return
        grace_s = self._grace_s(agent_id, are_both_lost=True)
        if timer is not None:
            grace_s = min(grace_s, timer.when() - asyncio.get_running_loop().time())
        self._await_agent(agent_id, stream, grace_s, are_both_lost=True)

    def _await_agent(
        self, agent_id: AgentId, stream: Stream[object], grace_s: float, *, are_both_lost: bool = False
    ) -> None:
        num_connections = stream.num_connections

        def judge() -> None:
            del self._judging_agents[agent_id]
            # It has been back since. If it is away again, that absence has a grace time of its own.
            if self._streams.agents.get(agent_id) is not stream or stream.num_connections != num_connections:
                return
            ranks = [self._streams.of_rank(address) for address in self._core.ranks_of(agent_id)]
            if any(rank is not None and rank.is_connected for rank in ranks):
                # A rank ends with its agent, so the agent runs.
                self._await_agent(agent_id, stream, max(grace_s, AGENT_GRACE_S))
            else:
                self.lose_agent(agent_id)

        if agent_id in self._judging_agents:
            self._judging_agents[agent_id][0].cancel()
        self._judging_agents[agent_id] = asyncio.get_running_loop().call_later(grace_s, judge), are_both_lost

    def _await_rank(self, address: Address, stream: Stream[object], grace_s: float, *, alone_s: float = 0.0) -> None:
        """Reports the rank as lost unless it reconnects within `grace_s`, or `alone_s` later if by then no rank of its
        job is connected: nobody waits for it, and all may be cut off.
        """
        num_connections = stream.num_connections

        def judge() -> None:
            del self._judging[stream]
            if self._streams.of_rank(address) is not stream or stream.num_connections != num_connections:
                return
            of_job = self._streams.ranks[address["job_id"]].values()
            if alone_s and not any(one.is_connected for one in of_job):
                self._await_rank(address, stream, alone_s)
            else:
                self._handle(SessionLost(**address))

        if stream in self._judging:  # it has been away before, perhaps thousands of times
            self._judging[stream].cancel()
        self._judging[stream] = asyncio.get_running_loop().call_later(grace_s, judge)

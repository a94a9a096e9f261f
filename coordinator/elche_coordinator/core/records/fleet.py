"""The hosts and their devices: which slots are free, and which rank has which."""

from collections.abc import Mapping
from dataclasses import dataclass

from elche_coordinator.core.messages.ids import AgentId, JobId, Rank
from elche_coordinator.core.messages.spec import Slot


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One slot of one agent."""

    agent_id: AgentId
    slot: int


@dataclass(slots=True, kw_only=True)
class AgentRecord:
    """What the coordinator knows of one host."""

    host: str
    slots: tuple[Slot, ...]
    is_drained: bool = False
    """Whether it gets no more ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostView:
    """One host at one moment."""

    agent_id: AgentId
    host: str
    """Its name; several hosts may have the same."""
    slots: tuple[Slot, ...]
    ranks: Mapping[int, tuple[JobId, Rank]]
    """Index of a busy slot to the rank on it."""
    is_drained: bool = False
    """Whether it gets no more ranks."""


class Fleet:
    """All slots. A slot has at most one rank; a rank that is a replica group has several slots of one host."""

    def __init__(self) -> None:
        self.agents: dict[AgentId, AgentRecord] = {}
        self.taken: dict[Place, tuple[JobId, Rank]] = {}

    def join(self, agent_id: AgentId, host: str, slots: tuple[Slot, ...]) -> None:
        """A host offers its slots."""
        self.agents[agent_id] = AgentRecord(host=host, slots=slots)

    def leave(self, agent_id: AgentId) -> None:
        """A host is gone, and its slots with it."""
        for place in self.places(agent_id):
            self.taken.pop(place, None)
        self.agents.pop(agent_id, None)

    def places(self, agent_id: AgentId) -> list[Place]:
        """All slots of a host; none of one that is not here."""
        agent = self.agents.get(agent_id)
        return [Place(agent_id=agent_id, slot=slot) for slot in range(len(agent.slots) if agent else 0)]

    def drain(self, agent_id: AgentId, *, is_drained: bool) -> None:
        """The host gets no more ranks, or some again; nothing changes for one that is not here."""
        if agent_id in self.agents:
            self.agents[agent_id].is_drained = is_drained

    def free_places(self) -> list[Place]:
        """The slots that may get a rank, host by host."""
        return [
            place
            for agent_id, agent in self.agents.items()
            if not agent.is_drained
            for place in self.places(agent_id)
            if place not in self.taken
        ]

    def num_groups(self, group_size: int) -> int:
        """How many ranks of so many slots all hosts can have that are not drained."""
        hosts = [agent for agent in self.agents.values() if not agent.is_drained]
        return sum(len(agent.slots) // group_size for agent in hosts)

    def take(self, job_id: JobId, least: int, most: int, group_size: int = 1) -> list[tuple[Place, ...]]:
        """Takes slots for a job, `group_size` of one host for each rank, in rank order; none at all when there are
        too few. At most 0 asks for as many as fit.
        """
        free = self._free_groups(group_size)
        if not 0 < least <= len(free):
            return []
        groups = free[: most or len(free)]
        for index, places in enumerate(groups):
            self.taken |= dict.fromkeys(places, (job_id, Rank(index)))
        return groups

    def take_again(
        self, job_id: JobId, rank: Rank, group_size: int, before: tuple[Place, ...]
    ) -> tuple[Place, ...] | None:
        """Takes slots for a rank that had others before, if possible the same; None when there are too few."""
        free = self._free_groups(group_size)
        places = before if before in free else next(iter(free), None)
        if places is not None:
            self.taken |= dict.fromkeys(places, (job_id, rank))
        return places

    def _free_groups(self, group_size: int) -> list[tuple[Place, ...]]:
        """Free slots in groups that lie on one host each."""
        hosts: dict[AgentId, list[Place]] = {}
        for place in self.free_places():
            hosts.setdefault(place.agent_id, []).append(place)
        return [
            tuple(places[start : start + group_size])
            for places in hosts.values()
            for start in range(0, len(places) - group_size + 1, group_size)
        ]

    def hosts(self) -> list[HostView]:
        """All hosts, in the order in which they joined."""
        ranks: dict[AgentId, dict[int, tuple[JobId, Rank]]] = {agent_id: {} for agent_id in self.agents}
        for place, owner in self.taken.items():
            ranks[place.agent_id][place.slot] = owner
        return [
            HostView(
                agent_id=agent_id,
                host=agent.host,
                slots=agent.slots,
                ranks=ranks[agent_id],
                is_drained=agent.is_drained,
            )
            for agent_id, agent in self.agents.items()
        ]

    def give_back(self, place: Place) -> None:
        """The slot's rank is gone."""
        self.taken.pop(place, None)

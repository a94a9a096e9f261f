"""The hosts and their devices: free slots, and the ranks on the others."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from elche.selector import parse
from elche_coordinator.core.messages.ids import AgentId, JobId, Rank
from elche_coordinator.core.messages.spec import JobSpec, Slot

MAX_REMEMBERED = 1_000_000
"""Most hosts and slots in the cache of all sets of conditions together; the least recently used set is dropped
first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One slot of one agent."""

    agent_id: AgentId
    slot: int


@dataclass(slots=True, kw_only=True)
class AgentRecord:
    """The coordinator's record of one host."""

    host: str
    """Its name, for people; not unique."""
    slots: tuple[Slot, ...]
    labels: dict[str, str] = field(default_factory=dict)
    """Properties of the host on which jobs may set conditions. They never change, so that `Fleet` may cache which hosts
    meet a condition.
    """
    is_drained: bool = False
    """True if it gets no more ranks."""
    problem: str = ""
    """Why it can start no ranks; empty: it can."""
    folder: str = ""
    """Id of its work folder; empty: unknown."""
    jobs: tuple[JobId, ...] = ()
    """Jobs that ended before it joined, and whose folders it has."""

    @property
    def is_offered(self) -> bool:
        """True if it gets ranks."""
        return not self.is_drained and not self.problem

    def meeting(self, conditions: Collection[str]) -> frozenset[int]:
        """The slots that meet all conditions."""
        parsed = [parse(text) for text in conditions]
        found = set()
        for index, slot in enumerate(self.slots):
            facts = {**self.labels, "device": slot.device, "model": slot.model, "host": self.host}
            if all(one.holds(facts, slot.memory_bytes) for one in parsed):
                found.add(index)
        return frozenset(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostView:
    """One host at one moment."""

    agent_id: AgentId
    host: str
    """Name of the host; not unique."""
    slots: tuple[Slot, ...]
    ranks: Mapping[int, tuple[JobId, Rank]]
    """The ranks on busy slots, by slot index."""
    is_drained: bool = False
    """True if it gets no more ranks."""
    labels: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""
    """Why it can start no ranks; empty: it can."""


class Fleet:
    """All slots. A slot has at most one rank; a rank that is a replica group has several slots of one host.

    A device other than the CPU may be offered several times, to run small jobs at the same time. One job gets it only
    once, since NCCL allows a device once per group, unless its host allows more: then its ranks average over gloo.
    """

    def __init__(self) -> None:
        self.agents: dict[AgentId, AgentRecord] = {}
        """The connected hosts, in the order in which they joined."""
        self.taken: dict[Place, tuple[JobId, Rank]] = {}
        """Busy slots, all of hosts in `agents`. A slot stays busy until its rank's process has exited."""
        self._meeting: dict[tuple[str, ...], dict[AgentId, dict[int, Place]]] = {}
        """Cache by conditions, the most recently used last: the slots of each host that meet them, by index."""
        self._num_remembered = 0
        """Number of hosts and slots in `_meeting`."""

    def __getstate__(self) -> dict[str, Any]:
        """The state without the cache, which would make every saved state of the core larger."""
        return {"agents": self.agents, "taken": self.taken}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        self.agents, self.taken = state["agents"], state["taken"]

    def join(self, agent_id: AgentId, record: AgentRecord) -> None:
        """Adds a host."""
        self.agents[agent_id] = record

    def leave(self, agent_id: AgentId) -> None:
        """Removes a host and its slots."""
        for place in self.places(agent_id):
            self.taken.pop(place, None)
        self.agents.pop(agent_id, None)
        for known in self._meeting.values():
            if (slots := known.pop(agent_id, None)) is not None:
                self._num_remembered -= 1 + len(slots)

    def places(self, agent_id: AgentId) -> list[Place]:
        """All slots of a host; empty for an unknown one."""
        agent = self.agents.get(agent_id)
        return [Place(agent_id=agent_id, slot=slot) for slot in range(len(agent.slots) if agent else 0)]

    def holders(self, job_id: JobId, agent_id: AgentId, folder: str) -> list[AgentId]:
        """The hosts that may have a job's output, which was on this agent with this work folder; the likeliest first:
        those that use its folder now, first of all that agent, and those that have reported the job's folder. After a
        coordinator of another version the agent's id may be another's, which has another folder.
        """
        why = {
            one: (agent.folder == folder != "", one == agent_id and agent.folder == folder, job_id in agent.jobs)
            for one, agent in self.agents.items()
        }
        return sorted((one for one in why if any(why[one])), key=lambda one: why[one], reverse=True)

    def drain(self, agent_id: AgentId, *, is_drained: bool) -> bool:
        """Drains the host, or makes it available again. Returns False if it was so before, or is unknown."""
        agent = self.agents.get(agent_id)
        if agent is None or agent.is_drained == is_drained:
            return False
        agent.is_drained = is_drained
        return True

    def set_problem(self, agent_id: AgentId, problem: str) -> bool:
        """Notes why the host can start no ranks, or that it can. Returns False if this was known, or it is unknown."""
        agent = self.agents.get(agent_id)
        if agent is None or agent.problem == problem:
            return False
        agent.problem = problem
        return True

    def unfit(self, conditions: tuple[str, ...]) -> str:
        """A host with slots that meet the conditions, which can start no ranks or is drained; empty: there is none."""
        meeting = self._slots_meeting(conditions)
        fitting = [agent for agent_id, agent in self.agents.items() if meeting[agent_id]]
        problems = (f"host {agent.host} can start none: {agent.problem}" for agent in fitting if agent.problem)
        drained = (f"host {agent.host} is drained" for agent in fitting if agent.is_drained)
        return next(problems, next(drained, ""))

    def meets(self, place: Place, conditions: tuple[str, ...]) -> bool:
        """True if the slot, of a known host, meets all conditions."""
        return place.slot in self._slots_meeting(conditions)[place.agent_id]

    def _slots_meeting(self, conditions: tuple[str, ...]) -> dict[AgentId, dict[int, Place]]:
        """The slots of each host that meet all conditions, cached."""
        known = self._meeting[conditions] = self._meeting.pop(conditions, {})
        for agent_id, agent in self.agents.items():
            if agent_id not in known:
                slots = sorted(agent.meeting(conditions))
                known[agent_id] = {slot: Place(agent_id=agent_id, slot=slot) for slot in slots}
                self._num_remembered += 1 + len(slots)
        # The newest set stays, however large: it is the one that the caller gets.
        while self._num_remembered > MAX_REMEMBERED and len(self._meeting) > 1:
            oldest = self._meeting.pop(next(iter(self._meeting)))
            self._num_remembered -= sum(1 + len(slots) for slots in oldest.values())
        return known

    def free_places(self, conditions: tuple[str, ...] = ()) -> list[Place]:
        """The free slots of hosts that get ranks, host by host."""
        return [place for place in self.offered(conditions) if place not in self.taken]

    def offered(self, conditions: tuple[str, ...]) -> list[Place]:
        """The slots of hosts that get ranks, free or not."""
        meeting = self._slots_meeting(conditions)
        return [
            place for agent_id, agent in self.agents.items() if agent.is_offered for place in meeting[agent_id].values()
        ]

    def num_slots(self, conditions: tuple[str, ...] = ()) -> int:
        """Number of slots that one job could have of all hosts, whether these get ranks or not."""
        meeting = self._slots_meeting(conditions)
        return len(self._once((place for agent_id in self.agents for place in meeting[agent_id].values()), set()))

    def free_for_one(self, conditions: tuple[str, ...], without: Collection[Place] = ()) -> list[Place]:
        """The free slots that one job could have."""
        return self._once((one for one in self.free_places(conditions) if one not in without), set())

    def num_groups(self, spec: JobSpec) -> int:
        """Number of ranks of the job for which hosts that get ranks have slots, free or not; for a loop, only
        slots of the host that has most.
        """
        return len(self._groups(self._once(self.offered(spec.conditions), set()), spec))

    def take(self, job_id: JobId, spec: JobSpec, most: int, without: Collection[Place] = ()) -> list[tuple[Place, ...]]:
        """Takes slots for a job, `spec.group_size` of one host for each rank, in rank order; none if there are too few.
        `most` 0 takes as many as fit. Slots in `without` are not taken. If only some hosts have the job's checkpoint,
        the first slots are on one of these; without such slots, none are taken.
        """
        least, free = spec.least_ranks, self._free_groups(job_id, spec, without)
        if not 0 < least <= len(free) or not self.has_checkpoint(free[0][0], spec):
            return []
        groups = free[: most or len(free)]
        for index, places in enumerate(groups):
            self.taken |= dict.fromkeys(places, (job_id, Rank(index)))
        return groups

    def take_again(
        self, job_id: JobId, rank: Rank, spec: JobSpec, before: tuple[Place, ...], without: Collection[Place] = ()
    ) -> tuple[Place, ...] | None:
        """Takes slots for a rank to be restarted, if possible those of `before`; None if there are too few."""
        free = self._free_groups(job_id, spec, without)
        places = before if before in free else next(iter(free), None)
        if places is not None:
            self.taken |= dict.fromkeys(places, (job_id, rank))
        return places

    def _free_groups(self, job_id: JobId, spec: JobSpec, without: Collection[Place]) -> list[tuple[Place, ...]]:
        """Free slots for the job, in groups on one host each; for a loop, all on the host that has most."""
        free = [place for place in self.free_places(spec.conditions) if place not in without]
        if not free:
            return []  # before all of its ranks' slots are looked at, for each of a host's thousand that is gone
        its_own = {self._device(place) for place, (owner, _) in self.taken.items() if owner == job_id}
        groups = self._groups(self._once(free, its_own), spec)
        return sorted(groups, key=lambda places: not self.has_checkpoint(places[0], spec))

    def has_checkpoint(self, place: Place, spec: JobSpec) -> bool:
        """True if the slot's host has the job's checkpoint, or all have it."""
        return spec.resume_work_folder in ("", self.agents[place.agent_id].folder)

    def holders_of_checkpoint(self, spec: JobSpec) -> list[AgentRecord]:
        """The hosts that have the work folder with the job's checkpoint."""
        return [one for one in self.agents.values() if one.folder == spec.resume_work_folder]

    def why_no_checkpoint(self, spec: JobSpec) -> str:
        """Why no slot is free on a host that has the job's checkpoint; empty if one is, or any host will do."""
        holders = self.holders_of_checkpoint(spec)
        free = self.free_places(spec.conditions)
        if not spec.resume_work_folder or any(self.has_checkpoint(place, spec) for place in free):
            return ""
        if all(one.is_drained for one in holders):
            return "is drained" if holders else "is not connected"
        if all(not one.is_offered for one in holders):
            return f"can start no rank ({next(one.problem for one in holders if one.problem)})"
        return "has no free slot for it"

    def _device(self, place: Place) -> tuple[AgentId, str]:
        return place.agent_id, self._slot(place).device

    def _slot(self, place: Place) -> Slot:
        return self.agents[place.agent_id].slots[place.slot]

    def _once(self, places: Iterable[Place], used: set[tuple[AgentId, str]]) -> list[Place]:
        """The places without repeated devices and without those in `used`, to which the devices found are added. CPUs,
        and devices whose host allows it, may repeat.
        """
        found = []
        for place in places:
            device = self._device(place)
            if device[1] == "cpu" or self._slot(place).repeats or device not in used:
                used.add(device)
                found.append(place)
        return found

    @staticmethod
    def _groups(places: Iterable[Place], spec: JobSpec) -> list[tuple[Place, ...]]:
        hosts: dict[AgentId, list[Place]] = {}
        for place in places:
            hosts.setdefault(place.agent_id, []).append(place)
        group_size = spec.group_size
        fullest = max(hosts.values(), key=len, default=[])  # a loop's ranks find each other over loopback
        return [
            tuple(places[start : start + group_size])
            for places in ([fullest] if spec.is_loop else hosts.values())
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
                labels=agent.labels,
                problem=agent.problem,
            )
            for agent_id, agent in self.agents.items()
        ]

    def give_back(self, place: Place) -> None:
        """Frees the slot."""
        self.taken.pop(place, None)

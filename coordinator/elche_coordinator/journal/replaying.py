"""Replays a journal: gives its events to a new core and compares the core's answers with the recorded ones."""

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from elche_coordinator.core.coordinator import Coordinator
from elche_coordinator.core.messages.commands import Command
from elche_coordinator.core.messages.events import Event, QuotasSet
from elche_coordinator.core.messages.ids import AgentId, JobId, Rank
from elche_coordinator.core.messages.spec import JobSpec, Slot
from elche_coordinator.core.records.fleet import AgentRecord, Fleet, Place
from elche_coordinator.journal.coding import EVENTS, FORMER_EVENTS, decode, encode
from elche_coordinator.journal.entries import Elsewhere, Found, FreeSlots, fault_text, kept_command
from elche_coordinator.journal.journals import FORMAT

NOBODY = (JobId("another job"), Rank(0))
"""Stands for the holder of slots that another job had when the journal was recorded."""


class CannotReplay(ValueError):
    """The content is not a journal, or one without its beginning."""


class Differs(AssertionError):
    """The core's answer differs from the recorded one."""


@dataclass(frozen=True, slots=True)
class RecordedEntry:
    """One entry as read: the event decoded, the core's answer (`answer`) as JSON values."""

    at_s: float
    event: Event | Elsewhere
    answer: dict[str, Any]
    found: Found | None


class RecordedFleet(Fleet):
    """Gives an added or restarted rank its recorded slots, since the journal does not contain other jobs' slots."""

    def __init__(self) -> None:
        super().__init__()
        self._given: dict[Rank, tuple[Place, ...]] = {}

    def begin(self, entry: RecordedEntry) -> int | None:
        """Begins the replay of the next entry. Returns the first incarnation that is started in it."""
        starts = [command["StartRank"] for command in entry.answer.get("commands", ()) if "StartRank" in command]
        self._given = {
            Rank(start["rank"]): tuple(
                Place(agent_id=AgentId(start["agent_id"]), slot=slot)
                for slot in (start["slot"], *start.get("more_slots", ()))
            )
            for start in starts
        }
        return min((start["incarnation"] for start in starts), default=None)

    def meets(self, place: Place, conditions: tuple[str, ...]) -> bool:
        """True: the journal contains only slots that meet the conditions."""
        return True

    def _once(self, places: Iterable[Place], used: set[tuple[AgentId, str]]) -> list[Place]:
        """Returns all places: the journal contains each device once."""
        return list(places)

    def take_again(
        self, job_id: JobId, rank: Rank, spec: JobSpec, before: tuple[Place, ...], without: Collection[Place] = ()
    ) -> tuple[Place, ...] | None:
        """The slots that the rank got at this event, if any."""
        places = self._given.get(rank)
        self.taken |= dict.fromkeys(places or (), (job_id, rank))
        return places


def replay(lines: Iterable[str]) -> int:
    """Replays a journal, given as JSON lines, and returns the number of its events.

    Raises `CannotReplay` for content that is not a whole journal, and `Differs` at the first event at which the core's
    answer differs.
    """
    about, entries = read(lines)
    if about["num_dropped"]:
        raise CannotReplay(
            f"the journal of {about['job']} begins after {about['num_dropped']} events that are not in it: "
            "a replay needs all since the job was submitted"
        )
    core = Coordinator()
    core.fleet = fleet = RecordedFleet()
    for index, entry in enumerate(entries):
        if entry.found is not None:
            _offer(core, entry.found)
            core.begin_incarnations_at(entry.found.incarnation)
        if (first := fleet.begin(entry)) is not None:
            core.begin_incarnations_at(first)
        answer = _handle(core, about["job"], entry)
        if answer != entry.answer:
            raise Differs(_difference(index, entry, answer))
    return len(entries)


def read(lines: Iterable[str]) -> tuple[dict[str, Any], list[RecordedEntry]]:
    """The journal's first line and its entries. Raises `CannotReplay` for other content, and for a newer format."""
    try:
        about, *rows = (json.loads(line) for line in lines if line.strip())
        if about["journal"] != FORMAT:
            raise CannotReplay(f"the journal has format {about['journal']}, and this is {FORMAT}")
        return about, [_entry(row) for row in rows]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise CannotReplay(f"this is not a journal: {error}") from error


def _entry(row: dict[str, Any]) -> RecordedEntry:
    event = decode({**EVENTS, **FORMER_EVENTS, "Elsewhere": Elsewhere}, row["event"])
    found = decode({"Found": Found}, {"Found": row["found"]}) if "found" in row else None
    answer: dict[str, Any] = {name: row[name] for name in ("commands", "refusals", "error") if name in row}
    return RecordedEntry(float(row["at"]), event, answer, found)


def _handle(core: Coordinator, job_id: str, entry: RecordedEntry) -> dict[str, Any]:
    """The core's answer to the event, as JSON values."""
    event = entry.event
    if isinstance(event, Elsewhere):  # another job's: the core only looks for free slots
        event = QuotasSet(quotas=core.quotas)
    commands: list[Command] = []
    error = ""
    try:
        commands = core.handle(event, now_s=entry.at_s)
    except Exception as raised:
        error = fault_text(raised)
    answer = {
        "commands": [encode(kept_command(command)) for command in commands if command.job_id == job_id],
        "refusals": [{"state": one.state, "trigger": one.trigger, "why": one.why} for one in core.last_refusals],
        "error": error,
    }
    # As a file gives it: tuples are lists there, and keys texts.
    written: dict[str, Any] = json.loads(json.dumps({name: value for name, value in answer.items() if value}))
    return written


def _offer(core: Coordinator, found: Found) -> None:
    """Makes the fleet one with exactly these free slots."""
    agents, taken = core.fleet.agents, core.fleet.taken
    agents.clear()
    taken.clear()
    for host in found.hosts:
        _add_host(core, host)
    num_others = found.num_slots - sum(len(agent.slots) for agent in agents.values())
    if num_others > 0:
        _add_host(core, FreeSlots(agent_id=AgentId(""), host="", devices={}), num_slots=num_others)


def _add_host(core: Coordinator, host: FreeSlots, num_slots: int = 0) -> None:
    """Adds a host. Slots below and between the free ones count as another job's."""
    num_slots = max(num_slots, max(host.devices, default=-1) + 1)
    slots = tuple(Slot(device=host.devices.get(slot, "")) for slot in range(num_slots))
    core.fleet.agents[host.agent_id] = AgentRecord(host=host.host, slots=slots, folder=host.folder)
    for slot in range(num_slots):
        if slot not in host.devices:
            core.fleet.taken[Place(agent_id=host.agent_id, slot=slot)] = NOBODY


def _difference(index: int, entry: RecordedEntry, answer: dict[str, Any]) -> str:
    return (
        f"event {index}, {type(entry.event).__name__} at {entry.at_s} s:\n"
        f"  the journal has {json.dumps(entry.answer)}\n  the core says   {json.dumps(answer)}"
    )

"""Entries of a journal: all parts of an event and its commands that the core reads, without secrets.

The user's source, arguments and the values of environment variables are left out; long texts lose their middle. The
core passes these on and never reads them, so that a replay gives the same commands, shortened in the same way.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from operator import attrgetter
from sys import getsizeof
from types import UnionType
from typing import Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints
from zlib import crc32

from elche_coordinator.core.coordinator import Coordinator
from elche_coordinator.core.life.job import Job
from elche_coordinator.core.messages.commands import Command, StartRank
from elche_coordinator.core.messages.events import Event, JobSubmitted, LoopAttached
from elche_coordinator.core.messages.ids import AgentId, Incarnation
from elche_coordinator.core.messages.spec import JobSpec
from elche_coordinator.core.records.machine import JobPhase
from elche_coordinator.core.records.outbox import Refusal
from elche_coordinator.journal.coding import COMMANDS, EVENTS
from elche_coordinator.journal.weights import weight

Message = TypeVar("Message")

MAX_TEXT = 2000
"""Longest text that is kept whole, in characters, such as an error, stacks or the end of a log."""
ENTRY_BYTES = 200
"""Size of an entry without its messages."""
HEAD, TAIL = 1200, 600
"""Characters that are kept of the beginning and the end of a longer text."""
WHOLE = frozenset({"resumed"})
"""Text fields that the core reads, which are kept whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Elsewhere:
    """An event of another job that also reached this one."""

    what: str
    """Name of the event's type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeSlots:
    """The slots that a job got, or that were free, on one host."""

    agent_id: AgentId
    host: str
    devices: dict[int, str]
    """Slot to device."""
    folder: str = ""
    """Id of its agent's work folder; empty: unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The slots that a job got, or, if there were too few, those that were free for it."""

    hosts: tuple[FreeSlots, ...]
    num_slots: int
    """Slots of all hosts, free or not."""
    incarnation: Incarnation
    """Lowest incarnation of the job's ranks; 0 when it has none."""


class JournalEntry(NamedTuple):
    """One event, and the core's answer as far as it concerns the job."""

    at_s: float
    """Time by the coordinator's monotonic clock, in seconds."""
    event: Event | Elsewhere
    commands: tuple[Command, ...]
    refusals: tuple[Refusal, ...]
    found: Found | None
    """The slots that the job found; None at events after which it has ranks, and at which it has got none."""
    error: str
    """The exception that the core raised, which is a bug; else empty."""
    num_bytes: int
    """Estimated size in memory."""


def new_entry(
    at_s: float,
    event: Event | Elsewhere,
    commands: Sequence[Command],
    refusals: Sequence[Refusal],
    found: Found | None,
    error: str,
) -> JournalEntry:
    """A new entry with its estimated size; shortens the commands. `event` must be shortened already."""
    num_bytes = ENTRY_BYTES + weight(event)
    kept = tuple(map(kept_command, commands)) if commands else ()
    for command in kept:
        num_bytes += weight(command)
    if found is not None or refusals or error:
        num_bytes += (weight(found) if found else 0) + sum(map(weight, refusals)) + getsizeof(error)
    return JournalEntry(at_s, event, kept, tuple(refusals), found, error, num_bytes)


def found_by(job: Job, core: Coordinator) -> Found:
    """The slots that the job has found, after the core has handled the event."""
    places: dict[tuple[AgentId, str, str], dict[int, str]] = {}
    ranks = [] if job.phase is JobPhase.QUEUED else list(job.ranks.values())
    for record in ranks:
        devices = places.setdefault((record.agent_id, record.host, record.folder), {})
        devices |= dict(zip((record.slot, *record.more_slots), record.slot_devices, strict=False))
    for place in () if ranks or core.is_behind(job.id) else core.fleet.free_for_one(job.spec.conditions):
        agent = core.fleet.agents[place.agent_id]
        places.setdefault((place.agent_id, agent.host, agent.folder), {})[place.slot] = agent.slots[place.slot].device
    return Found(
        hosts=tuple(
            FreeSlots(agent_id=agent_id, host=host, devices=devices, folder=folder)
            for (agent_id, host, folder), devices in places.items()
        ),
        num_slots=core.fleet.num_slots(job.spec.conditions),
        incarnation=min((record.incarnation for record in ranks), default=Incarnation(0)),
    )


def kept_event(event: Event) -> Event:
    """The event without secrets and with long texts shortened."""
    if type(event) in AS_THEY_ARE:
        return event
    if isinstance(event, JobSubmitted | LoopAttached):
        return replace(event, spec=_kept_spec(event.spec))
    return cut(event)


def kept_command(command: Command) -> Command:
    """The command as a journal keeps it and a replay compares it."""
    if type(command) in AS_THEY_ARE:
        return command
    if isinstance(command, StartRank):
        named = JobSpec(name=command.spec.name, source_hash="", file_name=command.spec.file_name)
        return replace(command, spec=named)
    return cut(command)


def fault_text(error: BaseException) -> str:
    """The exception of the core, as text."""
    return cut_text(f"{type(error).__name__}: {error}")


def _kept_spec(spec: JobSpec) -> JobSpec:
    return replace(
        spec,
        arguments=("",) * len(spec.arguments),
        requirements=("",) * len(spec.requirements),
        environment=dict.fromkeys(spec.environment, ""),
    )


def cut_text(text: str) -> str:
    """The text, without its middle if it is long. Idempotent."""
    if len(text) <= MAX_TEXT:
        return text
    checksum = crc32(text.encode("utf-8", "surrogatepass"))
    return f"{text[:HEAD]}\n[of {len(text)} characters, crc32 {checksum:08x}]\n{text[-TAIL:]}"


def cut(message: Message) -> Message:
    """The message with its long texts shortened; the same object if it has none."""
    changes: dict[str, Any] = {}
    kind: Any = type(message)
    for name, get in _texts(kind):
        part = get(message)
        if isinstance(part, str):
            if len(part) > MAX_TEXT:
                changes[name] = cut_text(part)
        elif part is not None and (shorter := cut(part)) is not part:
            changes[name] = shorter
    return replace(message, **changes) if changes else message  # type: ignore[type-var]  # a message is a dataclass


@cache
def _texts(kind: Any) -> tuple[tuple[str, Callable[[Any], Any]], ...]:
    """The fields of a message class that are texts or contain some, each with its getter."""
    hints = get_type_hints(kind)
    return tuple((field.name, attrgetter(field.name)) for field in fields(kind) if _has_text(field.name, hints))


def _has_text(name: str, hints: Mapping[str, Any]) -> bool:
    """True if the field is a text, or a message that contains one, but not for sequences and mappings, which
    are short.
    """
    hint = hints[name]
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    messages: list[Any] = [kind for kind in kinds if is_dataclass(kind)]
    return (hint is str and name not in WHOLE) or any(map(_texts, messages))


AS_THEY_ARE = frozenset(
    kind
    for kind in (*EVENTS.values(), *COMMANDS.values())
    if not _texts(kind) and kind not in (JobSubmitted, LoopAttached, StartRank)
)
"""Message classes without long texts or secrets, which are kept as they are: among them the most frequent ones."""

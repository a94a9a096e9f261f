"""One entry of a journal, and what is kept of an event and of commands: all that the core reads, and nothing secret.

The user's source, arguments and the values of environment variables are left out; long texts are cut in the middle. The
core passes these on and never reads them, so that a replay gives the same commands, cut in the same way.
"""

import json
import marshal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from sys import getsizeof
from types import UnionType
from typing import Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints
from zlib import crc32

from elche_coordinator.core.coordinator import Coordinator, JobFault
from elche_coordinator.core.jobs.job import Job
from elche_coordinator.core.messages.commands import Command, Persist, StartRank
from elche_coordinator.core.messages.events import Event, JobSubmitted, LoopAttached
from elche_coordinator.core.messages.ids import AgentId, Incarnation
from elche_coordinator.core.messages.spec import JobSpec
from elche_coordinator.core.records.outbox import Refusal
from elche_coordinator.journal.coding import COMMANDS, EVENTS
from elche_coordinator.journal.weights import weight

Message = TypeVar("Message")

MAX_TEXT = 2000
"""Characters of an error, a traceback, stacks or the end of a log."""
ENTRY_BYTES = 200
"""Of an entry without its messages."""
HEAD, TAIL = 1200, 600
"""What is kept of a longer one."""
WHOLE = frozenset({"resumed"})
"""Texts that the core reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Elsewhere:
    """An event of another job, which reached this one."""

    what: str
    """Its type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeSlots:
    """Slots of one host."""

    agent_id: AgentId
    host: str
    devices: dict[int, str]
    """Slot to device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a job found when it asked for slots: what it got, or what was free when that was too little."""

    hosts: tuple[FreeSlots, ...]
    num_slots: int
    """Of all hosts, free or not."""
    incarnation: Incarnation
    """Of its first rank; 0 when it got none."""


class Entry(NamedTuple):
    """One event, and what came of it for the job."""

    at_s: float
    """By the coordinator's monotonic clock."""
    event: Event | Elsewhere
    commands: tuple[Command, ...]
    refusals: tuple[Refusal, ...]
    found: Found | None
    """For events at which the job had no ranks before."""
    error: str
    """What the core raised, which is a bug; else empty."""
    num_bytes: int
    """In memory, about."""


def new_entry(
    at_s: float,
    event: Event | Elsewhere,
    commands: Sequence[Command],
    refusals: Sequence[Refusal],
    found: Found | None,
    error: str,
) -> Entry:
    """An entry with what is kept of the commands; the event is one that is to be kept as it is."""
    num_bytes = ENTRY_BYTES + weight(event)
    kept = tuple(map(kept_command, commands)) if commands else ()
    for command in kept:
        num_bytes += weight(command)
    if found is not None or refusals or error:
        num_bytes += (weight(found) if found else 0) + sum(map(weight, refusals)) + getsizeof(error)
    return Entry(at_s, event, kept, tuple(refusals), found, error, num_bytes)


def found_by(job: Job, core: Coordinator) -> Found:
    """What the job has found, as the event left it."""
    places: dict[tuple[AgentId, str], dict[int, str]] = {}
    for record in job.ranks.values():
        devices = places.setdefault((record.agent_id, record.host), {})
        devices |= dict(zip((record.slot, *record.more_slots), record.slot_devices, strict=False))
    for place in () if job.ranks else core.fleet.free_places():
        agent = core.fleet.agents[place.agent_id]
        places.setdefault((place.agent_id, agent.host), {})[place.slot] = agent.slots[place.slot].device
    return Found(
        hosts=tuple(
            FreeSlots(agent_id=agent_id, host=host, devices=devices) for (agent_id, host), devices in places.items()
        ),
        num_slots=sum(len(agent.slots) for agent in core.fleet.agents.values()),
        incarnation=min((record.incarnation for record in job.ranks.values()), default=Incarnation(0)),
    )


def kept_event(event: Event) -> Event:
    """What a journal keeps of an event."""
    if type(event) in AS_THEY_ARE:
        return event
    if isinstance(event, JobSubmitted | LoopAttached):
        return replace(event, spec=_kept_spec(event.spec))
    return cut(event)


def kept_command(command: Command) -> Command:
    """What a journal keeps of a command, and what a replay compares."""
    if type(command) in AS_THEY_ARE:
        return command
    if isinstance(command, Persist):
        spec: dict[str, object] | None = None if command.spec is None else {}
        return Persist(job_id=command.job_id, record={"crc32": _checksum(command.record)}, spec=spec)
    if isinstance(command, StartRank):
        named = JobSpec(name=command.spec.name, source="", file_name=command.spec.file_name)
        return replace(command, spec=named)
    return cut(command)


def fault_text(error: BaseException) -> str:
    """What the core has raised, which is a bug."""
    cause = error.__cause__ if isinstance(error, JobFault) and error.__cause__ else error
    return cut_text(f"{type(cause).__name__}: {cause}")


def _kept_spec(spec: JobSpec) -> JobSpec:
    return replace(
        spec,
        source=f"({len(spec.source)} characters)" if spec.source else "",
        arguments=("",) * len(spec.arguments),
        environment=dict.fromkeys(spec.environment, ""),
    )


def _checksum(record: Mapping[str, Any]) -> int:
    """Of a durable record; of one that may hold a traceback, as a journal keeps that."""
    if record.get("result") is None and len(str(record.get("reason"))) <= MAX_TEXT:
        try:
            return crc32(marshal.dumps({**record, "phase": str(record["phase"])}, 2))
        except (ValueError, KeyError):
            pass  # it holds what only JSON takes
    return crc32(json.dumps(_cut_all(record), default=repr).encode())


def _cut_all(value: Any) -> Any:
    if isinstance(value, str):
        return cut_text(str(value))
    if isinstance(value, Mapping):
        return {name: _cut_all(one) for name, one in value.items()}
    return [_cut_all(one) for one in value] if isinstance(value, list | tuple) else value


def cut_text(text: str) -> str:
    """A text without its middle, when it is long; what is cut once stays as it is."""
    if len(text) <= MAX_TEXT:
        return text
    checksum = crc32(text.encode("utf-8", "surrogatepass"))
    return f"{text[:HEAD]}\n[of {len(text)} characters, crc32 {checksum:08x}]\n{text[-TAIL:]}"


def cut(message: Message) -> Message:
    """The message with its long texts cut; itself when it has none."""
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
    """The fields of a class of messages that are texts, or have some."""
    hints = get_type_hints(kind)
    return tuple((field.name, _getter(field.name)) for field in fields(kind) if _has_text(field.name, hints))


def _has_text(name: str, hints: Mapping[str, Any]) -> bool:
    """Whether it is a text, or a message with some; sequences and mappings of texts are short."""
    hint = hints[name]
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    messages: list[Any] = [kind for kind in kinds if is_dataclass(kind)]
    return (hint is str and name not in WHOLE) or any(map(_texts, messages))


def _getter(name: str) -> Callable[[Any], Any]:
    return lambda message: getattr(message, name)


AS_THEY_ARE = frozenset(
    kind
    for kind in (*EVENTS.values(), *COMMANDS.values())
    if not _texts(kind) and kind not in (JobSubmitted, LoopAttached, Persist, StartRank)
)
"""Messages that are kept whole: the most, and the hottest."""

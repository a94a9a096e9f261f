"""The commands that one event leads to: where it changes the durable record, writing that comes first."""

from collections.abc import Callable
from dataclasses import dataclass

from elche_coordinator.core.messages.commands import Command, Persist
from elche_coordinator.core.messages.ids import JobId


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """An event, or a part of it, that had no place in the job's state and so changed nothing."""

    job_id: JobId
    state: str
    """What the job, the rank or the round is, in words."""
    trigger: str
    """What was to change it: a trigger of a phase table, or the event's type."""
    why: str


class Outbox:
    """Collects one job's commands between two calls of `take`."""

    def __init__(self, job_id: JobId, spec: dict[str, object] | None = None) -> None:
        self._job_id = job_id
        self._spec = spec
        """What is made durable with the first record, and never again."""
        self._commands: list[Command] = []
        self._refusals: list[Refusal] = []
        self._is_changed = False

    def add(self, command: Command) -> None:
        """One more thing to do, after those before it."""
        self._commands.append(command)

    def change(self) -> None:
        """The job's durable record has changed: what is collected now waits until it is on disk."""
        self._is_changed = True

    def refuse(self, trigger: object, state: str, why: str) -> None:
        """The trigger, an event or its name, has no place in the state."""
        name = trigger if isinstance(trigger, str) else type(trigger).__name__
        self._refusals.append(Refusal(job_id=self._job_id, state=state, trigger=name, why=why))

    def take_refusals(self) -> list[Refusal]:
        """All refusals since the last call."""
        if not self._refusals:
            return []
        refusals, self._refusals = self._refusals, []
        return refusals

    def take(self, record: Callable[[], dict[str, object]]) -> list[Command]:
        """All commands since the last call. If the record has changed, a `Persist` with `record()` comes first."""
        commands, self._commands = self._commands, []
        if self._is_changed:
            self._is_changed = False
            commands.insert(0, Persist(job_id=self._job_id, record=record(), spec=self._spec))
            self._spec = None
        return commands

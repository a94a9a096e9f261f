"""The commands that one event leads to, and what of the event was refused."""

from dataclasses import dataclass

from elche_coordinator.core.messages.commands import Command
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

    def __init__(self, job_id: JobId) -> None:
        self._job_id = job_id
        self._commands: list[Command] = []
        self._refusals: list[Refusal] = []

    def add(self, command: Command) -> None:
        """One more thing to do, after those before it."""
        self._commands.append(command)

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

    def take(self) -> list[Command]:
        """All commands since the last call."""
        commands, self._commands = self._commands, []
        return commands

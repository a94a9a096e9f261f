"""The commands and refusals of one event."""

from dataclasses import dataclass

from elche_coordinator.core.messages.commands import Command, Publish
from elche_coordinator.core.messages.ids import JobId
from elche_coordinator.core.messages.reports import Report


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """An event, or a part of it, that did not fit the job's state and so changed nothing."""

    job_id: JobId
    state: str
    """The state of the job, the rank or the round, as text."""
    trigger: str
    """The trigger of a phase table, or the event's type."""
    why: str


class Outbox:
    """Collects one job's commands, in the order in which they must be carried out, until `take`."""

    def __init__(self, job_id: JobId) -> None:
        self.job_id = job_id
        self._commands: list[Command] = []
        self._refusals: list[Refusal] = []

    def add(self, command: Command) -> None:
        """Appends a command."""
        self._commands.append(command)

    def publish(self, report: Report) -> None:
        """Appends the publication of a report."""
        self.add(Publish(job_id=self.job_id, report=report))

    def refuse(self, trigger: object, state: str, why: str) -> None:
        """Records that the trigger, an event or its name, does not fit the state and so changed nothing."""
        name = trigger if isinstance(trigger, str) else type(trigger).__name__
        self._refusals.append(Refusal(job_id=self.job_id, state=state, trigger=name, why=why))

    def take_refusals(self) -> list[Refusal]:
        """Removes and returns the refusals since the last call."""
        if not self._refusals:
            return []
        refusals, self._refusals = self._refusals, []
        return refusals

    def take(self) -> list[Command]:
        """Removes and returns the commands since the last call."""
        commands, self._commands = self._commands, []
        return commands

"""The commands that one event leads to, with the durable record before whatever shows it."""

from collections.abc import Callable

from elche_coordinator.core.messages.commands import Command, Persist
from elche_coordinator.core.messages.ids import JobId


class Outbox:
    """Collects one job's commands between two calls of `take`."""

    def __init__(self, job_id: JobId, spec: dict[str, object] | None = None) -> None:
        self._job_id = job_id
        self._spec = spec
        """What is made durable with the first record, and never again."""
        self._commands: list[Command] = []
        self._is_changed = False

    def add(self, command: Command) -> None:
        """One more thing to do, after those before it."""
        self._commands.append(command)

    def change(self) -> None:
        """The job's durable record has changed: what is collected now waits until it is on disk."""
        self._is_changed = True

    def take(self, record: Callable[[], dict[str, object]]) -> list[Command]:
        """All commands since the last call; the first makes `record()` durable when it has changed."""
        commands, self._commands = self._commands, []
        if self._is_changed:
            self._is_changed = False
            commands.insert(0, Persist(job_id=self._job_id, record=record(), spec=self._spec))
            self._spec = None
        return commands

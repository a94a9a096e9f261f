"""A simulation whose core keeps a journal."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from elche_coordinator.core.messages.commands import Command
from elche_coordinator.core.messages.events import Event
from elche_coordinator.journal.journals import JournalLimits, Journals
from support.watched import WatchedCoordinator, WatchedSimulation

NO_BOUNDS = JournalLimits(num_entries=10**9, num_bytes=10**12, total_bytes=10**12)


class JournalledCoordinator(WatchedCoordinator):
    """A core that tells its journals everything, as the driver does."""

    def __init__(self, bounds: JournalLimits = NO_BOUNDS) -> None:
        super().__init__()
        self.journals = Journals(bounds)

    def handle(self, event: Event, *, now_s: float) -> list[Command]:
        """As the core does."""
        commands = super().handle(event, now_s=now_s)
        self.journals.note(self, now_s, event, commands)
        return commands

    def lines(self, job_id: str = "job", num_entries: int | None = None) -> Sequence[str]:
        """The job's journal as it is dumped."""
        extract = self.journals.extract(job_id, 0.0, num_entries)
        assert extract is not None
        return list(extract.lines())


@dataclass(kw_only=True)
class JournalledSimulation(WatchedSimulation):
    """A simulation over such a core."""

    core: JournalledCoordinator = field(default_factory=JournalledCoordinator)

"""Whether a job's ranks can train together: they must have read the same settings, model and checkpoint."""

import json
from collections.abc import Mapping
from typing import Any

from elche.settings import first_invalid_setting
from elche_coordinator.core.messages.events import RankReady
from elche_coordinator.core.messages.ids import Attempt, Rank
from elche_coordinator.core.messages.reports import Checkpoint
from elche_coordinator.core.messages.spec import Architecture, first_disagreement, whole_number
from elche_coordinator.core.records.failure import Failure
from elche_coordinator.core.records.ranks import RankRecords


class Startup:
    """Compares the ranks' settings, models and loaded checkpoints."""

    def __init__(self, past_attempts: int, kept: list[Checkpoint]) -> None:
        """`kept`: the checkpoints of the attempt before."""
        self._past_attempts = past_attempts
        self.kept = kept
        self.attempt = Attempt(past_attempts + 1)
        """One more than the checkpoint's, and than any before it of this job."""
        self.resumed: Mapping[str, Any] | None = None
        """The training's state in the checkpoint that the job goes on from."""
        self._architecture: Architecture | None = None
        """Of the first rank that was ready."""
        self._difference: str | None = None
        """Between that and another rank's, or between checkpoints."""

    def add(self, rank: Rank, event: RankReady) -> None:
        """Adds what one rank has reported."""
        architecture = Architecture(rank=rank, layout_hash=event.settings.layout_hash, tensors=event.tensors)
        if self._architecture is None:
            self._architecture = architecture
        self._difference = self._difference or self._architecture.difference(architecture)
        if event.resumed:
            self._add_resumed(event.resumed)

    def _add_resumed(self, text: str) -> None:
        """Compares the training state of the checkpoint that the rank has loaded with that of the ranks before it."""
        try:
            resumed = json.loads(text)
            self.attempt = Attempt(max(self._past_attempts, whole_number(resumed["attempt"], "attempt")) + 1)
        except (ValueError, KeyError, TypeError, RecursionError):
            self._difference = self._difference or "the checkpoint says nothing of its training; is it elche's?"
            return
        if self.resumed is not None and self.resumed != resumed:
            self._difference = self._difference or "the ranks have read different checkpoints; name one that all reach"
        self.resumed = resumed

    def failure(self, ranks: RankRecords) -> Failure | None:
        """Why the ranks cannot train together; None when they can. Every rank must have been added."""
        settings = {rank: record.settings for rank, record in ranks.items() if record.settings is not None}
        why = (
            self._difference or first_disagreement(settings) or first_invalid_setting(next(reversed(settings.values())))
        )
        return Failure(why, invalid=True) if why is not None else None

"""Decides which rounds become checkpoints, and which checkpoints are kept."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from elche.settings import AgreedSettings
from elche_coordinator.core.messages.events import CheckpointFailed, CheckpointSaved
from elche_coordinator.core.messages.ids import Attempt, Epoch, Rank, Version
from elche_coordinator.core.messages.reports import Checkpoint, UserEvent

MAX_WRITING = 2
"""Most checkpoints that one rank has in memory until they are written."""


def failure_report(event: CheckpointFailed, host: str) -> UserEvent:
    """The report of a checkpoint that cannot be written: the first one since the newest that was. Those that follow are
    only counted, as there may be many until somebody makes room.
    """
    text = f"{event.reason}, on {host}: training goes on, and would go back further if its ranks were lost"
    return UserEvent(rank=event.rank, text=text)


@dataclass(slots=True)
class Checkpoints:
    """A job's checkpoints. A round can become one if its writer has captured the state for it."""

    settings: AgreedSettings
    attempt: Attempt
    """The job's present attempt, which is part of the folders' names: an earlier one may have written the same step."""
    first_after_s: float | None = None
    """Time of training after which the first one is made at the latest; None: the settings alone decide."""
    kept: list[Checkpoint] = field(default_factory=list)
    """Complete checkpoints, oldest first."""
    num_failures: int = 0
    """Checkpoints that were not written: failed, lost with their writer, or refused because it had too many."""
    is_failing: bool = False
    """True if a writer could not write one since the newest that is complete."""
    saved_at_s: float | None = None
    """Time at which the newest one was complete."""
    _writing: dict[Version, tuple[Rank, Checkpoint]] = field(default_factory=dict)
    """Checkpoints that are being written, each with its writer."""
    _writers: dict[Version, Rank] = field(default_factory=dict)
    """The writer of each checkpoint that was begun, also after it is complete."""
    _before: Checkpoint | None = None
    """The best checkpoint of the training that this one resumes."""
    _is_requested: bool = False
    """True if the next round should become a checkpoint whatever the settings say."""
    _since_s: float = 0.0
    """Time at which the last checkpoint, or training, began."""
    _has_started: bool = False
    """True once training has begun."""

    def start(self, now_s: float) -> None:
        """Starts the clock of checkpoints at the beginning of training."""
        self._since_s, self._has_started = now_s, True

    def first_of_next(self, now_s: float) -> float | None:
        """`first_after_s` of the attempt that follows if this one ends now: half of the time since the last one began,
        so that attempts come further even if all of them are short.
        """
        return (now_s - self._since_s) / 2 if self._has_started else self.first_after_s

    def request(self) -> None:
        """Requests that the next round becomes a checkpoint, for a client."""
        self._is_requested = True

    def wants(self, now_s: float, epochs: list[Epoch]) -> bool:
        """True if a round that completes these epochs should become a checkpoint."""
        every_s = self.settings.checkpoint_every_s
        dues_s = [one for one in (every_s, self.first_after_s) if one is not None]
        is_time = bool(dues_s) and now_s - self._since_s >= min(dues_s)
        return self._is_requested or is_time or self.wants_end_of(epochs)

    def wants_end_of(self, epochs: list[Epoch]) -> bool:
        """True if the end of one of these epochs should become a checkpoint."""
        every = 1 if self.settings.monitor is not None else self.settings.checkpoint_every_epochs
        return every is not None and any((epoch + 1) % every == 0 for epoch in epochs)

    def begin(self, checkpoint: Checkpoint, rank: Rank, now_s: float) -> bool:
        """Registers a checkpoint for the rank to write. Returns False if the rank has too many to write, except if a
        metric is monitored: then each may be the best.
        """
        # Also if it is refused below: else each further round would try, and count one more failure.
        self._is_requested, self._since_s = False, now_s
        self.first_after_s = None
        if len(self._writing) >= MAX_WRITING and self.settings.monitor is None:
            self.num_failures += 1
            return False
        self._writing[Version(checkpoint.version)] = (rank, checkpoint)
        self._writers[Version(checkpoint.version)] = rank
        return True

    def name(self, version: Version, epoch: int, global_step: int) -> str:
        """The folder's name, with the progress of training; unique for every version of every attempt."""
        attempt = f"-attempt-{self.attempt}" if self.attempt > 1 else ""
        name = f"epoch-{epoch:04d}-step-{global_step:08d}{attempt}"
        taken = [one.name for one in (*self.kept, *(begun for _, begun in self._writing.values()))]
        return f"{name}-version-{version}" if name in taken else name

    def set_metrics(self, version: Version, metrics: dict[str, float]) -> None:
        """Adds the metrics of a version to its checkpoint, if it has one."""
        self.kept = [replace(one, metrics=metrics) if one.version == version else one for one in self.kept]
        if version in self._writing:
            rank, begun = self._writing[version]
            self._writing[version] = (rank, replace(begun, metrics=metrics))

    def names_to_keep(self, best: Version | None) -> tuple[str, ...]:
        """Names of the checkpoints to keep once one more is complete."""
        num_others = self.settings.keep_checkpoints - 1
        # With 0, [-0:] would be all of them.
        newest = self.kept[-num_others:] if num_others else []
        writing = [checkpoint for _, checkpoint in self._writing.values()]
        there = [*self.kept, *writing] if self._before is None else [self._before, *self.kept, *writing]
        wanted = [one.name for one in there if one in newest or one.version == best or one in writing]
        return tuple(dict.fromkeys(wanted))

    @property
    def is_regular(self) -> bool:
        """True if the settings ask for checkpoints."""
        return self.settings.checkpoint_every_s is not None or self.settings.checkpoint_every_epochs is not None

    @property
    def is_awaited(self) -> bool:
        """True if a checkpoint is being written or requested."""
        return self._is_requested or not self.is_idle

    @property
    def is_idle(self) -> bool:
        """True if no checkpoint is being written."""
        return not self._writing

    @property
    def newest_version(self) -> Version:
        """Version of the newest checkpoint that is complete or being written; 0 if there is none."""
        return max([Version(one.version) for one in self.kept] + list(self._writing), default=Version(0))

    def take_saved(
        self,
        rank: Rank,
        event: CheckpointSaved,
        best: Version | None,
        now_s: float,
        *,
        host: str = "",
        work_folder: str = "",
    ) -> Checkpoint | None:
        """Records a complete checkpoint and returns it; None for a stale report."""
        writer, begun = self._writing.get(event.version, (None, None))
        if begun is None or writer != rank:
            return None
        del self._writing[event.version]
        self.saved_at_s = now_s
        self.is_failing = False
        saved = replace(
            begun,
            path=event.path,
            size_bytes=event.size_bytes,
            duration_s=event.duration_s,
            host=host,
            work_folder=work_folder,
        )
        stay = self.names_to_keep(best)
        kept = [one for one in self.kept if one.name in stay] + [saved]
        self.kept = sorted(kept, key=lambda one: one.version)  # two ranks may end in another order than they began
        return saved

    def take_failed(self, rank: Rank, event: CheckpointFailed) -> bool:
        """Records that a rank cannot write a checkpoint. Returns False for a stale report.

        A writer that got the order too late to capture the state has not failed: the next round becomes the checkpoint.
        """
        if self._writing.get(event.version, (None, None))[0] != rank:
            return False
        del self._writing[event.version]
        self._is_requested |= event.is_late
        self.num_failures += not event.is_late
        self.is_failing |= not event.is_late
        return True

    def lose_writer(self, rank: Rank) -> None:
        """Requests a checkpoint again that a lost rank was writing."""
        lost = [version for version, (writer, _) in self._writing.items() if writer == rank]
        for version in lost:
            del self._writing[version]
            self.num_failures += 1
            self._is_requested = True

    def writer_of(self, version: Version | None) -> Rank | None:
        """The rank that has written the version, or will."""
        return None if version is None else self._writers.get(version)

    def of(self, version: Version | None) -> Checkpoint | None:
        """The checkpoint of a version, possibly of the training that this one resumes."""
        there = [*self.kept, self._before] if self._before else self.kept
        return next((one for one in there if one.version == version), None)

    def restore_best(self, fields: Mapping[str, Any] | None) -> None:
        """Restores the best checkpoint so far from the one that training resumes."""
        self._before = Checkpoint(**fields) if fields else None

    def adopt(self, kept: list[Checkpoint], version: Version) -> None:
        """Takes over the previous attempt's checkpoints up to the version from which training resumes."""
        self.kept = [one for one in kept if one.version <= version]

    def shown(self, best: Version | None) -> tuple[Checkpoint, ...]:
        """The kept checkpoints, with the best one marked."""
        return tuple(replace(one, is_best=one.version == best) for one in self.kept)

"""Checks that a job's ranks can train together: they must have the same settings, model and checkpoint."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elche.errors import MISSING
from elche.samples import are_alike
from elche.settings import first_invalid_setting
from elche_coordinator.core.messages.events import RankReady
from elche_coordinator.core.messages.ids import Attempt, Incarnation, Rank
from elche_coordinator.core.messages.reports import Checkpoint
from elche_coordinator.core.messages.spec import Architecture, JobSpec, SampleRead, first_disagreement, whole_number
from elche_coordinator.core.records.failure import Failure
from elche_coordinator.core.records.ranks import RankRecord, RankRecords, present

MAX_KEPT_FIGURES = 1000
"""Most figures of samples in a checkpoint: of four samples, unless each has many values."""
OTHER_DATA = (
    "the data set has changed since the checkpoint: its sample {} is another. Training goes on with the present data; "
    "if their order has changed, too, some samples of this epoch count twice, and others never"
)


class Startup:
    """Compares the ranks' settings, models and loaded checkpoints."""

    def __init__(self, spec: JobSpec, past_attempts: int, kept: list[Checkpoint]) -> None:
        """`kept`: the checkpoints of the attempt before."""
        self._spec = spec
        self._past_attempts = past_attempts
        self.kept = kept
        self.attempt = Attempt(past_attempts + 1)
        """One more than the attempt of the checkpoint, and than all earlier ones of this job."""
        self.resumed: Mapping[str, Any] | None = None
        """The training's state in the checkpoint from which the job resumes."""
        self._architecture: Architecture | None = None
        """The model of the first rank that was ready, with which those of the others are compared."""
        self._checkpoints: dict[Rank, Mapping[str, Any] | str] = {}
        """The training's state in the checkpoint that each rank's newest process has loaded, or why it has none."""
        self._read: dict[Rank, _Read] = {}
        """The samples that the newest process of each rank has read."""
        self._difference: str | None = None
        """The first difference found between ranks' models or checkpoints."""

    @property
    def has_gone_back(self) -> bool:
        """True if the job resumes a checkpoint of its own earlier attempt."""
        return self._past_attempts > 0 and self.resumed is not None

    def add(self, rank: Rank, event: RankReady) -> None:
        """Adds one rank's report."""
        architecture = Architecture(rank=rank, layout_hash=event.settings.layout_hash, tensors=event.tensors)
        if self._architecture is None:
            self._architecture = architecture
        self._difference = self._difference or self._architecture.difference(architecture)
        self._read[rank] = _Read.of(event)
        self._checkpoints.pop(rank, None)
        if event.resumed:
            self._add_resumed(rank, event.resumed)

    def _add_resumed(self, rank: Rank, text: str) -> None:
        """Adds the training's state in the rank's checkpoint."""
        try:
            resumed = json.loads(text)
            if (missing := resumed.get(MISSING)) is None:
                self.attempt = Attempt(max(self._past_attempts, whole_number(resumed["attempt"], "attempt")) + 1)
                whole_number(resumed["version"], "version")
            self._checkpoints[rank] = resumed if missing is None else str(missing)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            self._difference = self._difference or "the checkpoint has no training state; was it written by elche?"

    def behind(self) -> dict[Rank, str]:
        """Ranks whose hosts lack the checkpoint with which others can begin, with the reason. Of a job that has gone
        back, that is the newest one of its own which a rank has read; of another, the one that was named.
        """
        read = {rank: one for rank, one in self._checkpoints.items() if not isinstance(one, str)}
        if not read:
            return {}
        newest = max(read.values(), key=_place)
        lack = {rank: one for rank, one in self._checkpoints.items() if isinstance(one, str)}
        older = {
            rank: f"the newest checkpoint there has version {one['version']}, and another host's {newest['version']}"
            for rank, one in read.items()
            if self._past_attempts and _place(one) != _place(newest)
        }
        return lack | older

    def _other_checkpoint(self, ranks: RankRecords) -> str | None:
        """Notes what the ranks resume; returns why they cannot, None if they can."""
        for rank, one in self._checkpoints.items():
            if rank not in ranks:
                continue
            if isinstance(one, str):
                where = f"{one} (rank {rank} on {ranks[rank].host})"
                return f"{where}: is the host with it away, or its folder not in its place?"
            if self.resumed is not None and self.resumed != one:
                return "the ranks have read different checkpoints; name one that all reach"
            self.resumed = one
        if self._past_attempts and (older := self.older_than_known):
            return f"{older}: put a whole copy of it there; elche resume begins from what is found"
        return None

    @property
    def older_than_known(self) -> str:
        """Says which newer checkpoint is known than the one that the ranks have read; empty if none is."""
        known = self._spec.resume_version
        if self.resumed is None or self.resumed["version"] >= known:
            return ""
        return (
            f"the newest checkpoint that its ranks find has version {self.resumed['version']}, but one of version "
            f"{known} was written, in {self._spec.resume} on {self._spec.resume_host}"
        )

    def failure(self, ranks: RankRecords) -> Failure | None:
        """Returns why the ranks cannot train together; None when they can. Call it once every rank was added."""
        settings = {rank: record.settings for rank, record in ranks.items() if record.settings is not None}
        why = (
            self._difference
            or self._other_checkpoint(ranks)
            or first_disagreement(settings)
            or first_invalid_setting(next(reversed(settings.values())))
            or self._other_data(ranks)
        )
        return Failure(why, invalid=True) if why is not None else None

    def other_data(self, ranks: RankRecords, rank: Rank, event: RankReady) -> str | None:
        """Describes a sample that a joining rank has read differently; None if it has the same data."""
        self._read[rank] = _Read.of(event)
        return self._other_data(ranks)

    @property
    def samples_read(self) -> list[list[Any]]:
        """Some samples of the data set, for checkpoints: position and figures of each; none if they are random."""
        reads = [read for _, read in sorted(self._read.items())]
        kept: list[list[Any]] = []
        num_figures = 0
        for sample in reads[0].samples if reads and not any(read.are_random for read in reads) else ():
            num_figures += sum(len(one.figures) for one in sample.values)
            if num_figures <= MAX_KEPT_FIGURES:
                kept.append([sample.index, [list(one.figures) for one in sample.values]])
        return kept

    @property
    def other_data_than_before(self) -> str:
        """Says which sample is not that of the training that has written the checkpoint; empty if none is."""
        now = dict(self.samples_read)
        try:
            then = dict(self.resumed["samples_read"]) if self.resumed is not None else {}
            other = next((at for at, figures in then.items() if at in now and not are_alike(figures, now[at])), None)
        except (KeyError, TypeError, ValueError, OverflowError):  # of an older version, or damaged
            return ""
        return "" if other is None else OTHER_DATA.format(other)

    def _other_data(self, ranks: RankRecords) -> str | None:
        """Describes the first sample that a rank has read differently from the lowest rank; None if there is none, or
        if a rank's samples differ at each reading. Forgets ranks that are gone.
        """
        there = present(ranks)
        self._read = {rank: read for rank, read in sorted(self._read.items()) if read.is_of(there.get(rank))}
        if not self._read or any(read.are_random for read in self._read.values()):
            return None
        (lowest, first), *others = self._read.items()
        for rank, read in others:
            samples = {sample.index: sample for sample in read.samples}
            for sample in first.samples:
                if sample.index in samples and not sample.is_like(samples[sample.index]):
                    where = f"rank {rank} on {ranks[rank].host}", f"rank {lowest} on {ranks[lowest].host}"
                    return _difference_text(sample.index, *where)
        return None


def _place(state: Mapping[str, Any]) -> tuple[int, int]:
    """Where the training was: later attempts have gone back over what earlier ones had beyond."""
    return state["attempt"], state["version"]


@dataclass(frozen=True, slots=True)
class _Read:
    """The samples of its data set that one process of a rank has read."""

    incarnation: Incarnation
    samples: tuple[SampleRead, ...]
    are_random: bool

    @classmethod
    def of(cls, event: RankReady) -> "_Read":
        return cls(event.incarnation, event.samples, event.are_samples_random)

    def is_of(self, record: RankRecord | None) -> bool:
        return record is not None and record.incarnation == self.incarnation


def _difference_text(index: int, one: str, other: str) -> str:
    return (
        f"ranks have different data: sample {index} of {one} is not that of {other}. All need the same data set, in "
        "the same order: copy the same files to each host, sort what has no order, such as os.listdir(), and seed what "
        "is drawn at random"
    )

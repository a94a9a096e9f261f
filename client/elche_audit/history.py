"""Puts the ranks' files together: which rounds made which versions, and of what samples."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from elche_audit.coverage import CoveredPiece, Ranges, joined, ranges_of
from elche_audit.rank_file import Entered, RankFile, Received, TrainedBatch
from elche_audit.run_folder import RunFolder


@dataclass(slots=True)
class Part:
    """The contribution of one rank process to a committed round."""

    file: RankFile
    """The process's file."""
    batches: list[TrainedBatch]
    """Batches that it had trained since the last committed round."""
    is_left_out: bool = False
    """True if its part was left out of the average; its samples are committed all the same."""

    @property
    def samples(self) -> int:
        """Samples of its batches."""
        return sum(batch.size for batch in self.batches)

    def pieces(self, version: int) -> list[CoveredPiece]:
        """The positions of its batches."""
        return [_piece(batch, f"{self.file.who} in version {version}") for batch in self.batches]


@dataclass(slots=True)
class AuditedRound:
    """One averaging, as far as files contain it."""

    attempt: int
    generation: int
    number: int
    entries: dict[str, Entered] = field(default_factory=dict)
    """By file name."""
    results: dict[str, Received] = field(default_factory=dict)
    parts: list[Part] = field(default_factory=list)
    """The ranks' contributions, in rank order; empty unless it is committed."""

    @property
    def words(self) -> str:
        """The round for people."""
        return f"round {self.number} of generation {self.generation}"

    @property
    def result(self) -> Received:
        """The result, as one of the ranks has received it."""
        return next(iter(self.results.values()))

    @property
    def version(self) -> int:
        """The version that it made."""
        return self.result.version

    @property
    def is_whole(self) -> bool:
        """True if the files of all its ranks are there."""
        return len(self.entries) >= self.result.num_rows

    def pieces(self) -> list[CoveredPiece]:
        """All positions that it has booked."""
        return [piece for part in self.parts for piece in part.pieces(self.version)]


@dataclass(slots=True)
class Attempt:
    """A training from its beginning, or from a checkpoint, until it ends or goes back."""

    number: int
    base: int
    """The version with which it began."""
    base_samples: int
    """Samples in that version."""
    files: list[RankFile]
    rounds: dict[int, AuditedRound] = field(default_factory=dict)
    """The committed rounds, by version."""
    booked: dict[str, int] = field(default_factory=dict)
    """By file: its batches that are in committed rounds."""
    rivals: list[AuditedRound] = field(default_factory=list)
    """Further rounds that were committed with the same version as another one."""

    @property
    def last(self) -> int:
        """The last committed version."""
        return max(self.rounds, default=self.base)


@dataclass(slots=True)
class Evidence:
    """The facts by which a round is known to be committed."""

    told: set[tuple[str, int, int]]
    """File, round and version of each round that the coordinator has said to be committed."""
    kept: set[tuple[int, int]]
    """Version and samples of the attempt's checkpoints, and of that with which the next attempt began."""
    gone_on: set[tuple[str, int]] = field(default_factory=set)
    """File and version of each model with which a rank has entered a committed round."""

    @classmethod
    def of(cls, run: RunFolder, attempt: Attempt, following: Attempt | None) -> "Evidence":
        """The evidence for the rounds of one attempt."""
        kept = {(books.version, books.samples) for books in run.checkpoints if books.attempt == attempt.number}
        return cls(
            told={(file.name, commit.round, commit.version) for file in attempt.files for commit in file.commits},
            kept=kept | ({(following.base, following.base_samples)} if following is not None else set()),
        )

    def shows(self, one: AuditedRound, num_rivals: int) -> bool:
        """True if a checkpoint has the round's result, or if a rank that has it was told that the round is committed,
        or has entered a later committed round with it. A later round that is not committed shows nothing: the rank may
        have been left out with both.
        """
        # Without rivals a checkpoint of this version is of this round, whatever its number of samples.
        is_alone = not num_rivals and any(version == one.version for version, _ in self.kept)
        return (
            is_alone
            or (one.version, one.result.samples) in self.kept
            or any((name, one.number, result.version) in self.told for name, result in one.results.items())
            or any((name, result.version) in self.gone_on for name, result in one.results.items())
        )

    def add(self, one: AuditedRound) -> None:
        """Takes in a round that is known to be committed: so are those from which its ranks went on."""
        self.gone_on |= {(name, entry.version) for name, entry in one.entries.items()}


def attempts_of(run: RunFolder) -> list[Attempt]:
    """The attempts in the folder, oldest first, with their committed rounds. If no rank has entered a round, one, whose
    model is what its ranks began with.
    """
    numbers = sorted({file.attempt for file in run.files if file.attempt}) or [0]
    attempts = [_begun(run, number) for number in numbers]
    record = deque((one.generation, one.parts) for one in run.rounds or ())
    for attempt, following in zip_longest(attempts, attempts[1:]):
        _decide(run, attempt, following, record)
    return attempts


def _begun(run: RunFolder, number: int) -> Attempt:
    """The attempt, of whose rounds nothing is decided yet."""
    files = [file for file in run.files if file.attempt == number]
    loaded = [file for file in files if file.start.resume] or files  # a rank that joins later begins at version 0
    first = min(loaded, key=lambda file: (file.start.version, file.start.incarnation)).start
    return Attempt(number, first.version, first.samples, files)


def _decide(run: RunFolder, attempt: Attempt, following: Attempt | None, record: deque[Any]) -> None:
    """Decides which of the attempt's rounds are committed. `record` has the generation and parts of rounds in the
    coordinator's record; those of this attempt are taken from it.
    """
    candidates: dict[int, list[AuditedRound]] = {}
    for one in _rounds(attempt.files):
        if one.results:
            candidates.setdefault(one.version, []).append(one)
    evidence = Evidence.of(run, attempt, following)
    shown: dict[int, list[AuditedRound]] = {}
    # Newest first, since a committed round shows those before it to be committed.
    for version in sorted(candidates, reverse=True):
        rounds = candidates[version]
        shown[version] = [one for one in rounds if evidence.shows(one, len(rounds) - 1)]
        for one in shown[version]:
            evidence.add(one)
    # In this order, since each committed round takes the batches that those before it have left.
    for version in sorted(candidates):
        committed = shown[version] or _recorded(candidates[version], attempt, record)
        _book(attempt, version, committed)
        # A watcher that was away lacks rounds; those that it has are in order.
        if committed and record and record[0] == (committed[0].generation, contents(committed[0].parts)):
            record.popleft()


def _rounds(files: Iterable[RankFile]) -> list[AuditedRound]:
    found: dict[tuple[int, int], AuditedRound] = {}
    # In rank order, as the parts of a round are in the coordinator's record.
    for file in sorted(files, key=lambda file: (file.start.rank, file.start.incarnation)):
        for entry in file.rounds:
            key = (entry.generation, entry.round)
            one = found.setdefault(key, AuditedRound(entry.attempt, *key))
            one.entries[file.name] = entry
            if key in file.results:
                one.results[file.name] = file.results[key]
    return list(found.values())


def _recorded(candidates: Sequence[AuditedRound], attempt: Attempt, record: Sequence[Any]) -> list[AuditedRound]:
    """The round that comes next in the coordinator's record. It comes last, since it is itself to be checked."""
    # Only the next: another attempt may train the same positions in a generation with the same number.
    return [one for one in candidates if record and record[0] == (one.generation, contents(_parts(one, attempt)))]


def _book(attempt: Attempt, version: int, committed: Sequence[AuditedRound]) -> None:
    """Books the parts of the committed round with this version; of several, the first one's."""
    if committed:
        attempt.rounds[version] = committed[0]
        attempt.rivals += committed[1:]
        committed[0].parts = _parts(committed[0], attempt)
        attempt.booked |= {name: entry.step for name, entry in committed[0].entries.items()}


def contents(parts: Sequence[Part]) -> tuple[tuple[tuple[int, int, int], ...], ...]:
    """The parts as the coordinator's record has them: of ranks with samples, in rank order."""
    return tuple(tuple(joined(map(_piece, part.batches))) for part in parts if part.batches)


def _parts(one: AuditedRound, attempt: Attempt) -> list[Part]:
    """The batches of each rank since the last committed round that it was in."""
    files = {file.name: file for file in attempt.files}
    parts = []
    for name, entry in one.entries.items():
        batches = files[name].batches[attempt.booked.get(name, 0) : entry.step]
        parts.append(Part(files[name], batches, name in one.results and one.results[name].is_left_out))
    _mark_silent(one, parts)
    return parts


def _mark_silent(one: AuditedRound, parts: list[Part]) -> None:
    """Marks as left out what ranks brought that died before they had the result: all of it if that makes the number of
    samples that were left out, else one part that does.
    """
    rest = one.result.left_out - sum(part.samples for part in parts if part.is_left_out)
    silent = [part for part in parts if part.file.name not in one.results]
    chosen = silent if rest == sum(part.samples for part in silent) else [p for p in silent if p.samples == rest][:1]
    if rest > 0:
        for part in chosen:
            part.is_left_out = True


def _piece(batch: TrainedBatch, source: str = "") -> CoveredPiece:
    return CoveredPiece(batch.epoch, batch.offset, batch.offset + batch.size, source)


def positions(rounds: Iterable[AuditedRound], before: Iterable[CoveredPiece] = ()) -> Ranges:
    """All positions that the rounds have booked, and those of `before`, by epoch."""
    return ranges_of([*before, *(piece for one in rounds for piece in one.pieces())])

"""Reads a job's journal: which leases the coordinator gave, and which headers ranks reported to it."""

import gzip
import json
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elche_audit.coverage import CoveredPiece, words
from elche_audit.rank_file import Damaged, RankFile

FORMAT = 2
MAX_BYTES = 256 << 20
"""Largest journal, unpacked. The coordinator keeps 8 MiB in memory, as text about twice as much."""
Row = tuple[int, int, int]
"""Of a header, what it says of one rank: its samples since its last round, its cut and its batches."""


@dataclass(slots=True)
class Journal:
    """What a journal says of the leases and rounds of a job's processes."""

    name: str
    is_whole: bool = False
    """True if it has the job's events from the first one on."""
    leases: dict[tuple[int, int], CoveredPiece] = field(default_factory=dict)
    """By incarnation and lease: the positions that were leased."""
    headers: dict[tuple[int, int, int], tuple[Row, ...]] = field(default_factory=dict)
    """By incarnation, generation and round: the header that the process has reported."""
    problems: list[str] = field(default_factory=list)
    """Entries that contradict earlier ones."""


def read_journal(folder: Path, job: str) -> Journal | None:
    """The journal of a run that did not succeed, or one that was put into its folder; None if there is none. Raises
    `Damaged`.
    """
    packed, plain = folder / "coordinator" / "journals" / f"{job}.jsonl.gz", folder / "journal.jsonl"
    path = packed if packed.exists() else plain
    try:
        with gzip.open(path) if path is packed else path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return None
    except (OSError, EOFError, zlib.error) as error:
        raise Damaged(f"{path.name}, the journal, cannot be read: {error}") from None
    if len(data) > MAX_BYTES:
        raise Damaged(f"{path.name}, the journal, has more than {MAX_BYTES >> 20} MiB")
    return _parsed(path.name, data.splitlines(), job)


def _parsed(name: str, lines: list[bytes], job: str) -> Journal:
    journal, number = Journal(name), 1
    try:
        head = json.loads(lines[0])
        if head["journal"] != FORMAT:
            raise Damaged(f"{name} has format {head['journal']}, and this version of elche reads {FORMAT}")
        if head["job"] != job:
            raise Damaged(f"{name} is the journal of job {str(head['job'])[:80]}, not of {job}")
        journal.is_whole = head["num_dropped"] == 0
        for line in lines[1:]:
            number += 1
            entry = json.loads(line)
            _take_event(journal, entry["event"])
            for command in entry.get("commands", ()):
                if "SendLease" in command:
                    _take_lease(journal, command["SendLease"])
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError):
        raise Damaged(f"{name}, the journal, is damaged in line {number}") from None
    return journal


def _take_lease(journal: Journal, command: dict[str, Any]) -> None:
    lease, rank = command["lease"], command.get("rank", 0)
    start = int(lease.get("offset", 0))
    key = int(command["incarnation"]), int(lease["id"])
    given = CoveredPiece(int(lease.get("epoch", 0)), start, start + int(lease["size"]))
    if journal.leases.setdefault(key, given) != given:
        journal.problems.append(f"{journal.name} has lease {key[1]} of rank {rank} with two contents")


def _take_event(journal: Journal, event: dict[str, Any]) -> None:
    for kind in ("ResultReceived", "HeaderReported"):
        if (told := event.get(kind)) and (header := told.get("header")):
            rows = tuple((int(row["weight"]), int(row["cut"]), int(row["local_step"])) for row in header)
            journal.headers[int(told["incarnation"]), int(told["generation"]), int(told["round"])] = rows


def faults(journal: Journal, files: Sequence[RankFile]) -> list[str]:
    """What ranks have trained and the coordinator has not leased, and headers of rounds that lack what a rank has
    brought or differ from those of others, a line each.
    """
    found = list(journal.problems)
    for file in files:
        found += _lease_faults(journal, file)
    return found + _header_faults(journal, files)


def _header_faults(journal: Journal, files: Sequence[RankFile]) -> list[str]:
    found, first = list[str](), dict[tuple[int, int, int], tuple[Row, ...]]()
    attempts = {file.start.incarnation: file.attempt for file in files}
    for (incarnation, generation, number), rows in journal.headers.items():
        # Each attempt counts its generations anew.
        if first.setdefault((attempts.get(incarnation, 0), generation, number), rows) != rows:
            found.append(f"{journal.name} has {_round(generation, number)} with two headers")
    left = {key: Counter(rows) for key, rows in first.items()}
    for file in files:
        for one in file.rounds:
            known, row = left.get((one.attempt, one.generation, one.round)), (one.weight, one.cut, one.step)
            if known is None:
                continue
            known[row] -= 1  # two ranks may bring the same, and then have a row each
            if known[row] < 0:
                brought = f"{one.weight} samples, up to {one.cut} in {one.step} batches"
                where = f"the header of {_round(one.generation, one.round)} in {journal.name}"
                found.append(f"{where} lacks what {file.who} has brought: {brought}")
    return found


def _lease_faults(journal: Journal, file: RankFile) -> Iterator[str]:
    for number in dict.fromkeys(batch.lease for batch in file.batches):
        given = journal.leases.get((file.start.incarnation, number))
        if given is None:
            if journal.is_whole:
                yield f"{file.who} has trained samples of lease {number}, which {journal.name} has not"
            continue
        for batch in file.batches:
            start, end = batch.offset, batch.offset + batch.size
            is_inside = batch.epoch == given.epoch and given.start <= start and end <= given.end
            if batch.lease == number and not is_inside:
                trained = f"{file.who} has trained {words(batch.epoch, start, end)} of lease {number}"
                yield f"{trained}, and in {journal.name} that has {words(given.epoch, given.start, given.end)}"
                break


def _round(generation: int, number: int) -> str:
    return f"round {number} of generation {generation}"

"""Reads a run's folder: the files of its ranks, the record of its rounds, its result and its checkpoints."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from elche.v1 import job_pb2
from elche_audit.coverage import CoveredPiece, Ranges, joined, ranges_of
from elche_audit.journal import Journal, read_journal
from elche_audit.rank_file import MAX_EPOCHS, Damaged, RankFile, read

AUDIT, CADENCE, RECORD, RUN = "audit", "cadence.binpb", "record.json", "run.json"
ENDS = ("succeeded", "failed", "cancelled")
"""The states of a job that has ended."""
REPLAY_TAG = 14 << 3 | 2
"""The tag of `JobSpec.replay`, of which the record of rounds consists."""


@dataclass(frozen=True, slots=True)
class ReportedRound:
    """A committed round, as the coordinator has reported it."""

    generation: int
    parts: tuple[tuple[tuple[int, int, int], ...], ...]
    """Of each rank that had any samples, in rank order, its contribution as (epoch, start, end)."""
    batches: tuple[int, ...]
    """The batches of each of these."""


@dataclass(frozen=True, slots=True)
class CheckpointBooks:
    """The data of a checkpoint that must agree with the ranks' files."""

    name: str
    job: str
    attempt: int
    version: int
    samples: int
    global_step: int
    epoch: int
    """The first epoch that is not complete in it."""
    books: Ranges
    """The committed positions of later epochs."""
    sizes: tuple[Any, Any] = (None, None)
    """Samples of its data set, and of an epoch."""
    seed: Any = None
    """What the order of the samples in an epoch depends on."""
    places: tuple[CoveredPiece, ...] = ()
    """All positions that its ledger has, committed, free and leased, of later epochs."""
    leases: tuple[tuple[int, int], ...] = ()
    """Rank and id of each lease that is not all committed."""
    next_lease: int | None = None
    """The id of the lease that is given next."""

    def ranges(self, full_size: int) -> Ranges:
        """All committed positions."""
        whole = {epoch: [(0, full_size)] for epoch in range(self.epoch)}
        return {**self.books, **whole}


@dataclass(slots=True)
class RunFolder:
    """The content of a run's folder."""

    folder: Path
    job: str = ""
    files: list[RankFile] = field(default_factory=list)
    has_all_files: bool = True
    """False if a file of a rank is damaged."""
    rounds: list[ReportedRound] | None = None
    """The coordinator's record; None if there is none."""
    result: dict[str, Any] | None = None
    """The job's result; None if it has not ended, or was not run by `elche run`."""
    checkpoints: list[CheckpointBooks] = field(default_factory=list)
    journal: Journal | None = None
    missing: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_run(folder: Path, *others: Path) -> RunFolder:
    """Reads what is there; `missing` says what is not, or is damaged. `others` are the job's folders of other hosts."""
    run, folders = RunFolder(folder), (folder, *others)
    run.missing += [f"there is no folder {one}" for one in folders if not one.is_dir()]
    if run.missing:
        return run
    jobs = sorted({path.name for one in folders for path in (one / AUDIT).glob("*") if path.is_dir()})
    if len(jobs) != 1:
        has = f"audit files of {len(jobs)} jobs" if jobs else "no audit files; run the job with --audit true"
        run.missing.append(f"{folder / AUDIT}: it has {has}")
        return run
    run.job = jobs[0]
    _read_files(sorted(path for one in folders for path in (one / AUDIT / run.job).glob("rank-*.bin")), run)
    _check_same_job(run)
    _read_record(folder, run)
    _read_rounds(folder, run)
    try:
        run.journal = read_journal(folder, run.job)
    except Damaged as error:
        run.missing.append(str(error))
    for path in sorted(path for one in folders for path in (one / "checkpoints" / run.job).glob("*/manifest.json")):
        # Such a folder is a checkpoint that is still being written, or whose writer was killed.
        if not path.parent.name.startswith("."):
            _read_checkpoint(path, run)
    return run


def _read_files(paths: Iterable[Path], run: RunFolder) -> None:
    """Reads each rank process's file. Copies of one, as where a folder is named twice, are one file."""
    found: dict[str, tuple[RankFile, Path]] = {}
    lacking: dict[str, None] = {}
    for path in paths:
        try:
            file = read(path)
        except Damaged as error:
            lacking[str(error)] = None
            continue
        first, place = found.setdefault(path.name, (file, path.parent))
        if first != file:
            lacking[f"{path.name} differs between {place} and {path.parent}: name the folder that has the whole"] = None
    run.files += [file for file, _ in found.values()]
    run.missing += lacking
    run.has_all_files = run.has_all_files and not lacking


def _check_same_job(run: RunFolder) -> None:
    if not run.files and not run.missing:
        run.missing.append(f"there is no file of any rank in {AUDIT}/{run.job}")
    for file in run.files:
        if file.start.job != run.job:
            run.missing.append(f"{file.name} is a file of job {file.start.job}, not of {run.job}")
            run.has_all_files = False
        if file.torn_bytes:
            there = f"{file.who} ends within a record, of which {file.torn_bytes} bytes are there"
            run.notes.append(f"{there}: its process was killed, or its disk was full")


def _read_record(folder: Path, run: RunFolder) -> None:
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        if record.get("job_id", run.job) != run.job:
            run.missing.append(f"{RECORD} is that of job {record['job_id']}, not of {run.job}")
            return
        state, samples = str(record["state"]), [int(one) for one in record["committed_samples"]]
        if state not in ENDS:
            run.missing.append(f"{RECORD} says that the job is {state[:40]}: has it ended?")
            return
        told: dict[str, Any] = {"state": state, "committed_samples": samples}
        told |= {one: str(record.get(one, "")) for one in ("ended_early", "model_is")}
        told |= {one: int(record[one]) for one in ("rounds", "discarded", "dataset_size") if one in record}
        told["checkpoints"] = [
            (str(one["path"]), int(one["version"]), int(one["global_step"])) for one in record.get("checkpoints", ())
        ]
        told["round_reports"] = [
            (int(one["round"]), int(one["version"]), int(one["samples"])) for one in record.get("round_reports", ())
        ]
        run.result = told
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        run.missing.append(f"{RECORD} is damaged, or cannot be read")


def _read_rounds(folder: Path, run: RunFolder) -> None:
    try:
        data = (folder / CADENCE).read_bytes()
    except OSError:
        if (folder / RUN).exists():
            run.missing.append(f"{CADENCE}, the record of rounds, is missing")
        return
    run.rounds, at = [], 0
    try:
        while at < len(data):
            tag, body = _varint(data, at)
            size, body = _varint(data, body)
            if tag != REPLAY_TAG:
                raise ValueError
            if body + size > len(data):
                run.notes.append(f"{CADENCE} ends within a round: `elche run` was killed")
                return
            run.rounds.append(_recorded(job_pb2.RecordedRound.FromString(data[body : body + size])))
            at = body + size
    except (DecodeError, ValueError):
        run.missing.append(f"{CADENCE} is damaged at byte {at}")
    except IndexError:
        run.notes.append(f"{CADENCE} ends within a round: `elche run` was killed")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number of protobuf's wire format, and the position after it. Raises `IndexError` at the end of the data."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at


def _recorded(message: job_pb2.RecordedRound) -> ReportedRound:
    parts = [
        joined(CoveredPiece(one.epoch, one.offset, one.offset + one.size) for one in part.slices)
        for part in message.parts
    ]
    batches = tuple(one.num_batches for one, part in zip(message.parts, parts, strict=True) if part)
    return ReportedRound(message.generation, tuple(tuple(part) for part in parts if part), batches)


def _read_checkpoint(path: Path, run: RunFolder) -> None:
    try:
        books = read_books(path)
    except Damaged as error:
        if str(error) not in run.missing:
            run.missing.append(str(error))
        return
    if books.job != run.job:
        run.missing.append(f"checkpoint {books.name} is of job {books.job[:80]}, not of {run.job}")
    elif books not in run.checkpoints:
        run.checkpoints.append(books)


def read_books(path: Path) -> CheckpointBooks:
    """Reads a manifest. Raises `Damaged`."""
    name = path.parent.name
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if "checksum" in manifest and manifest["checksum"] != _checksum(manifest):
            raise Damaged(f"checkpoint {name}: its manifest is damaged: the checksum does not match")
        training = manifest["training"]
        ledger = training["ledger"]
        if not 0 <= (epoch := int(ledger["epoch"])) <= MAX_EPOCHS:  # each becomes an entry of a dictionary
            raise ValueError(epoch)
        books = ranges_of(
            CoveredPiece(int(epoch), int(start), int(end))
            for epoch, book in ledger["books"].items()
            for start, end in book["committed"]
        )
        return CheckpointBooks(
            name=name,
            job=str(manifest["job"]),
            attempt=int(training["attempt"]),
            version=int(training["version"]),
            samples=int(training["samples"]),
            global_step=int(training["global_step"]),
            epoch=epoch,
            books=books,
            sizes=(training.get("dataset_size"), training.get("epoch_size")),
            seed=training.get("seed"),
            places=tuple(_places(ledger)),
            leases=tuple((int(rank), int(lease[0])) for rank, lease in _leases(ledger)),
            next_lease=int(ledger["next_lease"]) if "next_lease" in ledger else None,
        )
    except OSError as error:
        raise Damaged(f"checkpoint {name}: its manifest cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise Damaged(f"checkpoint {name}: its manifest is damaged, or that of a loop of the user's own") from None


def _leases(ledger: dict[str, Any]) -> Iterable[tuple[str, Any]]:
    """Each rank's leases, as id, epoch, first position and size."""
    return ((rank, lease) for rank, has in ledger.get("rank_leases", {}).items() for lease in has["leases"])


def _places(ledger: dict[str, Any]) -> Iterable[CoveredPiece]:
    """All positions of the ledger, with what they are."""
    for epoch, book in ledger["books"].items():
        for kind in ("committed", "free"):
            yield from (CoveredPiece(int(epoch), int(start), int(end), kind) for start, end in book.get(kind, ()))
    for rank, (number, epoch, offset, size) in _leases(ledger):
        yield CoveredPiece(int(epoch), int(offset), int(offset) + int(size), f"lease {number} of rank {rank}")


def _checksum(manifest: dict[str, Any]) -> str:
    said = {name: value for name, value in manifest.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(said, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

"""The folder that a rank leaves when it stops while no coordinator answers; its worker hands it in (protocol P19.7)."""

import json
import os
from base64 import b64decode
from dataclasses import asdict, dataclass
from pathlib import Path

from google.protobuf.message import DecodeError

from elche.v1 import rank_pb2
from elche_worker.session.outbound import Pending

FOLDER = "stopped"
"""Folder in an output folder, which jobs may share; each has a folder of its records in it. Earlier versions had the
records in this folder itself.
"""


def folder_of(output_dir: Path, job_id: str) -> Path:
    """The folder of a job's records."""
    return output_dir / FOLDER / job_id


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppedRank:
    """One process's record. It has the rank's secret, and is readable by its user alone."""

    job_id: str
    rank: int
    incarnation: int
    secret: str
    store: str
    """Id of the coordinator's store."""
    num_sent: int
    num_heard: int
    """Number of the last command received; records have this key."""
    messages: list[str]
    """Messages that may not be durable at the coordinator, serialised, in base64."""
    round: int
    """The round whose result is in the draft; 0: none."""
    draft: str
    """Folder of the draft of a checkpoint; empty: none."""

    @property
    def pending(self) -> Pending[rank_pb2.ConverseRequest]:
        """The messages that the coordinator did not have durably."""
        messages = (rank_pb2.ConverseRequest.FromString(b64decode(one)) for one in self.messages)
        return Pending(self.num_sent, self.num_heard, tuple(messages))

    def check(self) -> None:
        """Raises `ValueError`, `TypeError` or `DecodeError` for a record that no rank can have written."""
        numbers = (self.rank, self.incarnation, self.round, self.num_sent, self.num_heard)
        if not all(type(one) is int and 0 <= one < 2**63 for one in numbers):
            raise ValueError
        if not all(isinstance(one, str) and one.isascii() for one in (self.secret, self.store)):
            raise ValueError
        if "\0" in self.draft:
            raise ValueError
        self.pending  # noqa: B018  # raises if a message cannot be decoded

    def save(self, output_dir: Path) -> None:
        """Writes the record, whole or not at all. Raises `OSError`."""
        path = folder_of(output_dir, self.job_id) / f"rank-{self.rank}.{self.incarnation}.json"
        _make(path.parent)
        draft = path.with_suffix(".draft")
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            json.dump(asdict(self), file)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)


def stopped_ranks(output_dir: Path, job_id: str) -> list[StoppedRank]:
    """The job's records in its output folder. Raises `OSError`, and `ValueError` for a damaged one."""
    folder = folder_of(output_dir, job_id)
    for path in folder.parent.glob("*.json"):  # of an earlier version
        if _read(path).job_id == job_id:
            _make(folder)
            path.replace(folder / path.name)
    return [_read(path) for path in sorted(folder.glob("*.json"))]


def _read(path: Path) -> StoppedRank:
    try:
        rank = StoppedRank(**json.loads(path.read_text(encoding="utf-8")))
        rank.check()
    except (DecodeError, ValueError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{path} is damaged; remove it to have the others handed in") from None
    return rank


def claim(output_dir: Path, job_id: str, attempt: int, round_id: int) -> bool:
    """True for the job's first rank that asks in this folder: it writes the result for all. Raises `OSError`."""
    folder = folder_of(output_dir, job_id)
    _make(folder)
    try:
        (folder / f"attempt-{attempt}-round-{round_id}").mkdir()
    except FileExistsError:
        return False
    return True


def _make(folder: Path) -> None:
    for one in (folder.parent, folder):
        one.mkdir(mode=0o700, parents=True, exist_ok=True)

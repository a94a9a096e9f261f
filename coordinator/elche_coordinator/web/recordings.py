"""Recordings of jobs as files, so that the page can show them after a restart of the coordinator."""

import json
import logging
import os
from array import array
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import isfinite, nan
from pathlib import Path
from typing import Any

from elche_coordinator.limits.sharing import Owner, remove_crowded_out
from elche_coordinator.storage.trouble import Trouble
from elche_coordinator.web.recorder import (
    MAX_EVENTS,
    MAX_NAMES,
    MAX_POINTS,
    RANK_FIGURES,
    JobEvent,
    JobRecording,
    Table,
)

log = logging.getLogger(__name__)

FORMAT = 1
"""The files' format; one of another number is not read."""
MAX_FILES = 100
"""Files that are kept; of more, the oldest of the user who has most are removed."""
MAX_HALVINGS = 64
"""Most halvings of a table that are read from a file, so that a damaged one makes no huge number."""
MAX_BYTES = 8 << 20
"""Largest file that is read; a recording is at most a tenth of that."""


@dataclass(slots=True)
class SavedRecording:
    """The content of a file."""

    recording: JobRecording = field(default_factory=JobRecording)
    shown: dict[str, Any] = field(default_factory=dict)
    """The page's values of the job at its end, or when it was saved."""


class Recordings:
    """The folder of recordings. Its methods block on files: call them on a thread."""

    def __init__(self, folder: Path, owner: Owner = lambda job_id: "") -> None:
        self._folder = folder
        self._owner = owner
        self._trouble = Trouble(
            log,
            logging.WARNING,
            f"what the page shows of jobs cannot be saved in {folder}, and is lost when this coordinator ends",
            f"what the page shows of jobs is saved in {folder} again",
        )

    def save(self, job_id: str, recording: JobRecording, ranks: Iterable[int], shown: Mapping[str, Any]) -> None:
        """Writes the recording of a job, atomically. Of an `OSError` the log has a warning."""
        content = {"format": FORMAT, "shown": shown, **_to_json(recording, ranks)}
        text = json.dumps(content, separators=(",", ":"), allow_nan=False)
        path, new = self._path(job_id), self._path(job_id).with_suffix(".new")
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            # What a crash has left; with `O_EXCL` nothing is written through somebody's link.
            new.unlink(missing_ok=True)
            with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
                file.write(text)
            new.replace(path)
            self._remove_old()
            self._trouble.succeeded()
        except OSError as error:
            self._trouble.failed(error.strerror or str(error))

    def load(self, job_id: str) -> SavedRecording | None:
        """The recording of a job; None when there is none. A damaged file is renamed to end in .damaged."""
        path = self._path(job_id)
        try:
            if path.stat().st_size > MAX_BYTES:
                raise ValueError(f"it is larger than {MAX_BYTES >> 20} MiB")
            return _from_json(json.loads(path.read_bytes()))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError, OSError) as error:
            log.warning("job=%s its recording is damaged and is set aside: %s", job_id, str(error)[:200])
            self._set_aside(path)
            return None

    def _set_aside(self, path: Path) -> None:
        try:
            # Resuming needs only the database, so a damaged recording costs its charts and nothing else.
            path.replace(path.with_suffix(".damaged"))
        except OSError as error:
            log.warning("%s cannot be set aside: %s", path, error)

    def _remove_old(self) -> None:
        files = sorted((path.stat().st_mtime, path) for path in self._folder.iterdir())
        remove_crowded_out(((path, path.stem, 1) for _, path in files), self._owner, MAX_FILES)

    def _path(self, job_id: str) -> Path:
        """The file of a job. Job ids consist of letters, digits and dashes."""
        return self._folder / f"{Path(job_id).name}.json"


def _to_json(recording: JobRecording, ranks: Iterable[int]) -> dict[str, Any]:
    kept = (rank for rank in ranks if rank in recording.ranks)
    return {
        "ended_at": recording.ended_at,
        "moments": _table_to_json(recording.moments),
        "ranks": {str(rank): _columns(recording.ranks[rank]) for rank in kept},
        "epochs": _table_to_json(recording.epochs),
        "evaluations": _table_to_json(recording.evaluations),
        "events": [[one.number, one.at, one.kind, one.text] for one in recording.events],
    }


def _table_to_json(table: Table) -> dict[str, Any]:
    places = {"at": list(table.at), "step": list(table.step), "epoch": list(table.epoch)}
    return {**places, "figures": _columns(table.figures), "halvings": table.halvings}


def _columns(columns: "Mapping[str, array[float]]") -> dict[str, list[float | None]]:
    return {
        name: [float(f"{value:.6g}") if isfinite(value) else None for value in column]
        for name, column in columns.items()
    }


def _from_json(content: Any) -> SavedRecording:
    """Parses a recording. Raises `ValueError`, `KeyError` and others for content that `save` has not written."""
    if content["format"] != FORMAT:
        raise ValueError(f"its format is {content['format']!r}, and {FORMAT} is known")
    moments = _table(content["moments"])
    events = [JobEvent(int(number), float(at), str(kind), str(text)) for number, at, kind, text in content["events"]]
    ranks = {
        int(rank): {name: _column(columns[name], len(moments.at)) for name in RANK_FIGURES}
        for rank, columns in content["ranks"].items()
    }
    ended_at, shown = content["ended_at"], content["shown"]
    if not isinstance(shown, dict):
        raise ValueError("it does not say what was shown")
    recording = JobRecording(
        moments=moments,
        ranks=ranks,
        epochs=_table(content["epochs"]),
        evaluations=_table(content["evaluations"]),
        events=deque(events, maxlen=MAX_EVENTS),
        ended_at=None if ended_at is None else float(ended_at),
    )
    recording.num_batches = int(recording.epochs.step[-1]) if recording.epochs.step else 0
    return SavedRecording(recording=recording, shown=shown)


def _table(content: Any) -> Table:
    size, halvings = len(content["at"]), int(content["halvings"])
    if size > MAX_POINTS or len(content["figures"]) > MAX_NAMES:
        raise ValueError("a table is too long")
    return Table(
        at=_place(content["at"], size),
        step=_place(content["step"], size),
        epoch=_place(content["epoch"], size),
        figures={name: _column(column, size) for name, column in content["figures"].items()},
        halvings=halvings,
        num_offered=size << min(max(0, halvings), MAX_HALVINGS),
    )


def _place(values: Any, size: int) -> "array[float]":
    if len(values) != size or not all(isfinite(value) for value in values):
        raise ValueError("a column of positions is incomplete")
    return array("d", values)


def _column(values: Any, size: int) -> "array[float]":
    if len(values) != size:
        raise ValueError(f"a column has {len(values)} values, and its table {size} rows")
    return array("f", [nan if value is None else value for value in values])

"""Backups of a coordinator's folder, made while it runs.

A backup has the database as of one moment, and the jobs' folders; not charts, timelines, journals and the audit log.
"""

import fcntl
import json
import os
import shutil
import sqlite3
import tempfile
import time
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

from elche.folders import keep_out
from elche_coordinator.config import CannotStart
from elche_coordinator.lifecycle.standby import DATABASE, LOCK, take_folder
from elche_coordinator.storage.bundles import WHOLE
from elche_coordinator.storage.sql.database import REVISION
from elche_coordinator.storage.tape import BACKED_UP

ABOUT = "backup.json"
"""File in the copy with the time at which it was made, the revision of its tables, and its number of jobs."""
STORE = "ELCHE_STORE"
"""Environment variable of a coordinator whose database is not in its folder."""
BUNDLES = "bundles"
"""Folder of bundles, in a coordinator's folder and in its copy."""


def back_up(data: Path, to: Path) -> str:
    """Copies a coordinator's folder into a new one, which appears when it is complete. Returns a line on its contents.
    Raises `CannotStart`.
    """
    if os.environ.get(STORE):  # a file of before may be in the folder, too
        raise CannotStart(f"{STORE} names a PostgreSQL database: back that up with pg_dump")
    if not (data / DATABASE).is_file():
        raise CannotStart(
            f"{data} has no database of a coordinator: name its folder with --data, or use pg_dump for PostgreSQL"
        )
    if to.exists():
        raise CannotStart(f"{to} exists: name a folder that does not")
    draft: Path | None = None
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{to.name}.", dir=to.parent))
        with closing(sqlite3.connect(data / DATABASE)) as source, closing(sqlite3.connect(draft / DATABASE)) as copy:
            # Before the copy: a coordinator that stops during it has told its ranks more than the copy knows.
            is_used = _is_used(data)
            source.backup(copy)  # in one step: page by page it would start over at each write
            if is_used:
                _end_states(copy)
        _copy_bundles(data / BUNDLES, draft / BUNDLES)
        num_jobs, tables = _contents(draft / DATABASE)
        about = {"made_at": datetime.now(UTC).isoformat(timespec="seconds"), "tables": tables, "jobs": num_jobs}
        (draft / ABOUT).write_text(json.dumps(about) + "\n", encoding="utf-8")
        draft.rename(to)
    except (OSError, sqlite3.Error) as error:
        if draft is not None:
            shutil.rmtree(draft, ignore_errors=True)
        raise CannotStart(f"{data} cannot be backed up into {to}: {error}") from error
    return f"{to} has {num_jobs} jobs as they are now, with tables {tables}"


def restore(backup: Path, data: Path) -> str:
    """Restores a backup into a folder without a coordinator. Returns a line on the next steps. Raises `CannotStart`."""
    if not (backup / DATABASE).is_file():
        raise CannotStart(f"{backup} is not a backup: it has no {DATABASE}")
    try:
        num_jobs, tables = _contents(backup / DATABASE)
        if tables > REVISION:
            raise CannotStart(
                f"{backup} is of a newer version (tables {tables}; this one knows {REVISION}): restore it with that"
            )
        data.mkdir(parents=True, exist_ok=True)
        keep_out(data)
        take_folder(data)
        if (data / DATABASE).exists():
            raise CannotStart(f"{data} has a database: move it away, or name another folder with --data")
        _copy_bundles(backup / BUNDLES, data / BUNDLES)
        draft = data / f"{DATABASE}.part"
        shutil.copyfile(backup / DATABASE, draft)
        draft.chmod(0o600)
        with closing(sqlite3.connect(draft)) as copy:
            _leave_out_incarnations(copy)
        draft.rename(data / DATABASE)
    except (OSError, sqlite3.Error) as error:
        raise CannotStart(f"{backup} cannot be restored into {data}: {error}") from error
    return f"{data} has {num_jobs} jobs: start a coordinator on it; those that ran go on from their newest checkpoints"


def _is_used(data: Path) -> bool:
    """True if a coordinator runs on the folder."""
    try:
        with (data / LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _end_states(copy: sqlite3.Connection) -> None:
    """Makes the copy's saved states unusable, so that a coordinator on it resumes jobs from checkpoints. Ranks have
    received more from the running coordinator since, and would refuse one that is behind.
    """
    copy.execute("UPDATE states SET code = ?", (BACKED_UP,))
    copy.commit()


def _leave_out_incarnations(copy: sqlite3.Connection) -> None:
    """If the coordinator ran on after the copy, has one on the copy begin its incarnations at the present time in
    milliseconds. The first has given out incarnations that the copy does not know, and ranks with secrets made of them
    may still run.
    """
    first = time.time_ns() // 1_000_000
    copy.execute(
        "UPDATE jobs SET record = json_set(record, '$.incarnation', ?) "
        "WHERE json_valid(record) AND EXISTS (SELECT 1 FROM states WHERE code = ?)",
        (first, BACKED_UP),
    )
    copy.commit()


def _copy_bundles(source: Path, target: Path) -> None:
    target.mkdir(mode=0o700, exist_ok=True)
    for path in sorted(source.glob(f"*{WHOLE}")):
        try:
            shutil.copyfile(path, target / path.name)
        except FileNotFoundError:  # removed meanwhile, since no job needs it
            continue
        os.utime(target / path.name)


def _contents(path: Path) -> tuple[int, str]:
    """The number of jobs in a database, and the revision of its tables. Raises `CannotStart` if it is damaged."""
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
        (found,) = database.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise CannotStart(f"{path} is damaged: {found}")
        (num_jobs,) = database.execute("SELECT count(*) FROM jobs").fetchone()
        (tables,) = database.execute("SELECT version_num FROM alembic_version").fetchone()
    return num_jobs, tables

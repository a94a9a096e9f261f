"""Where jobs' logs and models are: kept in the work folder, so that the next agent there can deliver them, too."""

import logging
import os
import re
import secrets
import tempfile
from contextlib import suppress
from itertools import islice
from pathlib import Path

from elche.errors import ElcheError
from elche.folders import keep_out
from elche_worker.agent.identity import FOLDER

log = logging.getLogger(__name__)

ID_FILE = "work-folder"
"""File with the id of the work folder."""
RECORDS = "jobs"
"""Folder with a file for each job, named by its id: the job's output folder, relative to the work folder if inside."""
NEEDED_BYTES = 1 << 16
"""Room that a worker needs at least to begin: for a job's file and its first lines of output."""
MOST_TOLD = 500
"""Most jobs, the newest ones, that a coordinator is told. It finds older ones by the id of the work folder."""


def check_writable(work_dir: Path) -> None:
    """Raises `ElcheError` if nothing can be written there: every job that such a worker was given would fail."""
    if problem := problem_of(work_dir):
        raise ElcheError(
            f"{problem}, and every job here would fail: make room, give it to this user, or name another folder"
        )


def problem_of(work_dir: Path) -> str:
    """Why no rank can be started: work folder or temporary folder, which PyTorch needs, is not writable; or ""."""
    try:
        work_dir.mkdir(parents=True, exist_ok=True)
        _write(work_dir)
    except OSError as error:
        return f"--work-dir {work_dir} cannot be written ({error.strerror})"
    try:
        _write(Path(tempfile.gettempdir()))
    except OSError as error:
        return f"{tempfile.tempdir or 'TMPDIR'}, for temporary files, cannot be written ({error.strerror})"
    return ""


def _write(folder: Path) -> None:
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(NEEDED_BYTES))


class JobFolders:
    """The output folders of jobs whose ranks ran here, under this agent or another that had the work folder."""

    def __init__(self, work_dir: Path) -> None:
        self._work_dir = work_dir.absolute()
        self._kept = self._work_dir / FOLDER
        self._known: dict[str, Path] = {}
        self.id = ""
        """Id of the work folder; empty where it cannot be stored."""
        try:
            self.id = self._read_or_make_id()
        except (OSError, ValueError) as error:
            log.warning("once this worker has ended, logs and models are not found by `elche`: %s", error)

    def remember(self, job_id: str, folder: Path) -> None:
        """Records that ranks of the job write into this folder."""
        folder = folder.absolute()
        if self._known.get(job_id) == folder:
            return
        self._known[job_id] = folder
        # Relative, so that a work folder may be moved to another disk or host.
        text = str(folder.relative_to(self._work_dir) if folder.is_relative_to(self._work_dir) else folder)
        try:
            (self._kept / RECORDS).mkdir(parents=True, exist_ok=True)
            self._draft(text).replace(self._kept / RECORDS / job_id)
        except (OSError, ValueError) as error:
            log.warning("job=%s is not found by the next worker in %s: %s", job_id, self._work_dir, error)

    def find(self, job_id: str) -> Path | None:
        """The job's output folder; None when no rank of it ran here."""
        if job_id not in self._known and Path(job_id).name == job_id:
            with suppress(OSError, ValueError):
                self._known[job_id] = self._work_dir / (self._kept / RECORDS / job_id).read_text(encoding="utf-8")
        return self._known.get(job_id)

    def newest(self) -> list[str]:
        """Jobs whose folders are there, at most `MOST_TOLD`, the newest first."""
        try:
            with os.scandir(self._kept / RECORDS) as entries:
                records = sorted(entries, key=lambda entry: entry.stat().st_mtime, reverse=True)
        except OSError:
            return []
        there = (one.name for one in records if (folder := self.find(one.name)) is not None and folder.is_dir())
        return list(islice(there, MOST_TOLD))

    def _read_or_make_id(self) -> str:
        """Returns the id in the work folder. The first process that needs it makes it, and it never changes. Raises
        `OSError`, or `ValueError` if the file is damaged.
        """
        path = self._kept / ID_FILE
        if not path.exists():
            self._kept.mkdir(parents=True, exist_ok=True)
            keep_out(self._kept)
            draft = self._draft(secrets.token_hex(16))
            # `link`, not `rename`, which would replace the id that another agent has made meanwhile.
            with suppress(FileExistsError):  # another agent was first
                os.link(draft, path)
            draft.unlink()
        text = path.read_text(encoding="utf-8")
        if not re.fullmatch("[0-9a-f]{32}", text):
            raise ValueError(f"{path} is damaged; remove it")
        return text

    def _draft(self, text: str) -> Path:
        """Writes the text under a draft's name, to be renamed or linked: readers never find half of it."""
        draft = self._kept / f"{secrets.token_hex(8)}.draft"
        with draft.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        return draft

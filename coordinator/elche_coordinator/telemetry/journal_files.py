"""Serves journals: of jobs of this run from memory, and of jobs that did not succeed from disk."""

import asyncio
import gzip
import json
import logging
import zlib
from collections.abc import AsyncIterator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

from elche.errors import InvalidJob
from elche_coordinator.core.messages.ids import JobId
from elche_coordinator.core.messages.reports import JobResult, Outcome, Report
from elche_coordinator.driver import Driver
from elche_coordinator.journal.journals import Extract
from elche_coordinator.limits.sharing import Owner, remove_crowded_out

log = logging.getLogger(__name__)

MAX_FILES = 100
"""Journals on disk; of more, the oldest of the user who has most are removed."""
CHUNK_BYTES = 1 << 20
LINES = 500
"""Lines that are encoded at once on a thread; more would keep the event loop waiting for the interpreter."""


class JournalFiles:
    """Writes the journal of a job that has failed or was cancelled, on a thread of its own."""

    def __init__(self, folder: Path, driver: Driver, owner: Owner = lambda job_id: "") -> None:
        self._folder = folder
        self._driver = driver
        self._owner = owner
        self._writer = ThreadPoolExecutor(1, "journals")
        driver.watchers.on_published(self._take_report)

    async def chunks(self, job_id: str, num_events: int | None = None) -> AsyncIterator[bytes]:
        """The job's journal, or its newest events. Raises `InvalidJob` when there is none."""
        extract = self._extract(job_id, num_events)
        lines = extract.lines() if extract is not None else await asyncio.to_thread(self._read, job_id, num_events)
        while part := await asyncio.to_thread(lambda: "".join(f"{line}\n" for line in islice(lines, LINES))):
            data = part.encode()
            for start in range(0, len(data), CHUNK_BYTES):
                yield data[start : start + CHUNK_BYTES]

    def _extract(self, job_id: str, num_events: int | None = None) -> Extract | None:
        return self._driver.journals.extract(job_id, self._driver.now_s, num_events)

    def _take_report(self, job_id: JobId, report: Report) -> None:
        if isinstance(report, JobResult) and report.outcome is not Outcome.SUCCEEDED:
            extract = self._extract(job_id)
            if extract is not None:
                self._writer.submit(self._write, extract)

    def _write(self, extract: Extract) -> None:
        """Writes the journal and removes old ones. Errors are logged; the job's end does not depend on it."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            draft = self._path(extract.job_id).with_suffix(".draft")
            with gzip.open(draft, "wt", encoding="utf-8") as file:
                file.writelines(f"{line}\n" for line in extract.lines())
            # By a draft: a journal of which the disk took only a part would be replayed as if it were whole.
            draft.replace(self._path(extract.job_id))
            files = sorted((path.stat().st_mtime, path) for path in self._folder.iterdir())
            remove_crowded_out(((path, path.name.partition(".")[0], 1) for _, path in files), self._owner, MAX_FILES)
        except OSError as error:
            log.warning("job=%s its journal cannot be written: %s", extract.job_id, error)
        except Exception:
            log.exception("job=%s its journal cannot be written; this is a bug", extract.job_id)

    def _read(self, job_id: str, num_events: int | None) -> Iterator[str]:
        try:
            with gzip.open(self._path(job_id), "rt", encoding="utf-8") as file:
                return iter(newest(file.read().splitlines(), num_events))
        except FileNotFoundError:
            raise InvalidJob(
                f"job {job_id} has no journal: it is kept while the coordinator runs, and on disk when the job has "
                "failed or was cancelled"
            ) from None
        except (OSError, EOFError, ValueError, LookupError, TypeError, RecursionError, zlib.error) as error:
            raise InvalidJob(f"the journal of job {job_id} cannot be read: {error}") from None

    def _path(self, job_id: str) -> Path:
        """The file of a job. Job ids consist of letters, digits and dashes."""
        return self._folder / f"{Path(job_id).name}.jsonl.gz"


def newest(lines: list[str], num_events: int | None) -> Iterable[str]:
    """The journal's first line and its newest events."""
    about, events = json.loads(lines[0]), lines[1:]
    kept = events if num_events is None else events[max(0, len(events) - num_events) :]
    about["num_dropped"] += len(events) - len(kept)
    return [json.dumps(about, separators=(",", ":")), *kept]

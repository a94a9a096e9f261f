"""The newest entries of every job, within bounds of number and memory."""

import json
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from elche_coordinator.core.coordinator import Coordinator
from elche_coordinator.core.messages.commands import Command, StartRank
from elche_coordinator.core.messages.events import Event, JobSubmitted, LoopAttached, RankReady
from elche_coordinator.core.messages.ids import JobId
from elche_coordinator.core.records.machine import JobPhase
from elche_coordinator.core.records.outbox import Refusal
from elche_coordinator.journal.coding import encode, plain
from elche_coordinator.journal.entries import Elsewhere, JournalEntry, found_by, kept_event, new_entry

FORMAT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalLimits:
    """Limits of what is kept."""

    num_entries: int = 10_000
    """Entries of one job."""
    num_bytes: int = 8 << 20
    """Estimated bytes of one job's entries in memory (`weight`)."""
    total_bytes: int = 128 << 20
    """Estimated bytes of all journals. Beyond it, journals of ended jobs are dropped, oldest first, then the oldest
    entries of the journal that grows.
    """


@dataclass(slots=True)
class Journal:
    """One job's entries, oldest first."""

    job_id: JobId
    entries: deque[JournalEntry] = field(default_factory=deque)
    num_bytes: int = 0
    num_dropped: int = 0
    """Older entries that were dropped."""
    layout_hash: int | None = None
    """Layout hash of the first rank that was ready."""

    def drop_oldest(self) -> int:
        """Drops the oldest entry; returns its bytes."""
        num_bytes = self.entries.popleft().num_bytes
        self.num_bytes -= num_bytes
        self.num_dropped += 1
        return num_bytes


@dataclass(frozen=True, slots=True)
class Extract:
    """A journal at one moment, safe to be written by any thread: entries never change."""

    job_id: JobId
    num_dropped: int
    entries: tuple[JournalEntry, ...]
    wall_s: float
    """Seconds since 1970 at time 0 of the entries."""

    def lines(self) -> Iterator[str]:
        """The journal as JSON lines: a line about the journal, then one for each entry."""
        about = {"journal": FORMAT, "job": self.job_id, "num_dropped": self.num_dropped, "wall_s": self.wall_s}
        yield _as_line(about)
        for entry in self.entries:
            yield _as_line(_encode_entry(entry))


class Journals:
    """The journals of all jobs. `note` runs for each event, so it copies nothing that is short."""

    def __init__(self, bounds: JournalLimits | None = None) -> None:
        self._bounds = bounds or JournalLimits()
        self._journals: dict[JobId, Journal] = {}
        self._ended: dict[JobId, None] = {}
        """Jobs that have ended and have a journal, in the order of their ends."""
        self.num_bytes = 0
        """Estimated bytes of all journals."""

    def note(
        self,
        core: Coordinator,
        at_s: float,
        event: Event,
        commands: Sequence[Command],
        fault: tuple[str, str] | None = None,
    ) -> None:
        """Adds an event that the core has just handled, and its commands. `fault` is (job, exception) if handling it
        has raised, which is a bug.
        """
        reached = core.last_touched or ([JobId(fault[0])] if fault is not None else ())
        for job_id in reached:
            if job_id not in core.jobs:
                continue
            # Nearly every event reaches one job, and then nothing has to be looked through.
            mine, refusals = commands, core.last_refusals
            if len(reached) > 1:
                mine = [command for command in commands if command.job_id == job_id]
                refusals = [refusal for refusal in refusals if refusal.job_id == job_id]
            journal = self._journals.get(job_id) or self._begin(job_id, event, refusals)
            job = core.jobs[job_id]
            is_without = job.phase is JobPhase.QUEUED or not job.ranks
            gets_ranks = isinstance(event, LoopAttached) or any(type(command) is StartRank for command in mine)
            found = found_by(job, core) if is_without or gets_ranks else None
            error = fault[1] if fault is not None and fault[0] == job_id else ""
            self._add(journal, new_entry(at_s, _kept_of(journal, event), mine, refusals, found, error))
            if core.jobs[job_id].result is not None:
                self._ended.setdefault(job_id)

    def extract(self, job_id: str, clock_s: float, num_entries: int | None = None) -> Extract | None:
        """The journal, or its newest entries, at the time `clock_s` by the clock of the entries; None when there is
        none.
        """
        journal = self._journals.get(JobId(job_id))
        if journal is None:
            return None
        entries = tuple(journal.entries)
        newest = entries if num_entries is None else entries[max(0, len(entries) - num_entries) :]
        num_dropped = journal.num_dropped + len(entries) - len(newest)
        return Extract(journal.job_id, num_dropped, newest, time.time() - clock_s)

    def _begin(self, job_id: JobId, event: Event, refusals: Sequence[Refusal]) -> Journal:
        """A new journal. That of a job which exists already counts as without its beginning."""
        is_first = isinstance(event, JobSubmitted | LoopAttached) and not refusals
        journal = self._journals[job_id] = Journal(job_id, num_dropped=0 if is_first else 1)
        return journal

    def _add(self, journal: Journal, entry: JournalEntry) -> None:
        journal.entries.append(entry)
        journal.num_bytes += entry.num_bytes
        self.num_bytes += entry.num_bytes
        bounds = self._bounds
        while len(journal.entries) > bounds.num_entries or journal.num_bytes > bounds.num_bytes:
            self.num_bytes -= journal.drop_oldest()
        if self.num_bytes > bounds.total_bytes:
            self._make_room(journal)

    def _make_room(self, journal: Journal) -> None:
        """Makes room for the journal's newest entry: drops journals of ended jobs, else its own oldest entries."""
        while self.num_bytes > self._bounds.total_bytes:
            ended = next((job_id for job_id in self._ended if job_id != journal.job_id), None)
            if ended is not None:
                del self._ended[ended]
                self.num_bytes -= self._journals.pop(ended).num_bytes
            elif journal.entries:
                self.num_bytes -= journal.drop_oldest()
            else:
                return


def _kept_of(journal: Journal, event: Event) -> Event | Elsewhere:
    """The event as the journal keeps it."""
    if getattr(event, "job_id", journal.job_id) != journal.job_id:
        return Elsewhere(what=type(event).__name__)
    if isinstance(event, RankReady):
        layout_hash = event.settings.layout_hash
        if layout_hash == journal.layout_hash:  # the same model is not described again
            event = replace(event, tensors=())
        elif journal.layout_hash is None:
            journal.layout_hash = layout_hash
    return kept_event(event)


def _encode_entry(entry: JournalEntry) -> dict[str, Any]:
    line: dict[str, Any] = {"at": entry.at_s, "event": encode(entry.event)}
    if entry.commands:
        line["commands"] = [encode(command) for command in entry.commands]
    if entry.refusals:
        line["refusals"] = [{"state": one.state, "trigger": one.trigger, "why": one.why} for one in entry.refusals]
    if entry.found is not None:
        line["found"] = plain(entry.found)
    return {**line, "error": entry.error} if entry.error else line


def _as_line(content: dict[str, Any]) -> str:
    return json.dumps(content, separators=(",", ":"))

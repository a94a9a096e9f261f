"""Timelines: times of each rank's work and of the coordinator's messages to it, as a file of JSON lines per job.

A line has spans of a rank (`spans`), the offset of its clock (`clock`), a message to a rank (`told`), or an event of
the job (`event`). Times are seconds since 1970 by the coordinator's clock; those of spans are by the rank's clock.
"""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from elche.errors import InvalidJob, TooMuch
from elche.v1 import rank_pb2
from elche_coordinator.core.messages import commands, reports
from elche_coordinator.core.messages.ids import JobId
from elche_coordinator.driver import Driver
from elche_coordinator.limits.budgets import MAX_TIMELINES_BYTES, MAX_TIMELINES_BYTES_OF_USER, Held
from elche_coordinator.limits.sharing import Owner, remove_crowded_out
from elche_coordinator.storage.trouble import Trouble
from elche_coordinator.streams.report_text import describe_report

log = logging.getLogger(__name__)

MAX_BYTES = 256 << 20
"""Largest size of one timeline; later lines are dropped."""
MAX_TOTAL_BYTES = 2 << 30
"""Most bytes of ended jobs' timelines; beyond, the oldest of the user who has most are removed."""
MAX_WAITING_BYTES = 64 << 20
"""Most bytes of lines that are not written yet, as when the disk is slow."""
CHUNK_BYTES = 1 << 16
"""Bytes that are read at once, for each client that fetches a timeline."""
EVERY_S = 0.5
"""Seconds between two writes of waiting lines."""
CLOCK_EVERY_S = 2.0
"""Seconds between two messages with the coordinator's clock to each rank."""
NAMES: dict[type[reports.Report], str] = {
    reports.RoundReport: "round",
    reports.StallReport: "stall",
    reports.MembershipReport: "membership",
    reports.EpochReport: "epoch",
    reports.EvaluationReport: "evaluation",
    reports.Checkpoint: "checkpoint",
    reports.UserEvent: "user event",
    reports.JobResult: "end",
}
TOLD: dict[type[commands.SessionCommand], tuple[str, tuple[str, ...]]] = {
    commands.SendSyncNow: ("sync now", ("round", "after_step", "count")),
    commands.SendPermit: ("begin the reserve", ("num_samples",)),
    commands.SendRecall: ("give the reserve back", ()),
    commands.SendOutcome: ("round committed", ("round", "version")),
    commands.SendFormGroup: ("form a group", ("generation", "world_size")),
    commands.SendAbandon: ("give a generation up", ("generation",)),
    commands.SendShutdown: ("leave", ("reason",)),
    commands.SendMakeMetrics: ("make metrics", ("epoch",)),
}
"""Names of commands that concern when ranks train, and the facts of each, for the timeline."""


@dataclass(slots=True)
class _Open:
    """The timeline of an open job."""

    user: str
    """The job's submitter."""
    lines: list[str] = field(default_factory=list)
    """Lines that are not written yet."""
    num_bytes: int = 0
    is_full: bool = False


class Timelines:
    """Collects the lines of all timelines on the event loop and writes them on a thread."""

    def __init__(self, folder: Path, driver: Driver, owner: Owner = lambda job_id: "") -> None:
        self._folder = folder
        self._owner = owner
        self._trouble = Trouble(
            log,
            logging.WARNING,
            f"timelines cannot be written in {folder}, and lack what is not",
            f"timelines are written in {folder} again",
        )
        self._driver = driver
        self._open: dict[str, _Open] = {}
        """Timelines by job."""
        self._held = Held("timelines of jobs that go on", MAX_TIMELINES_BYTES_OF_USER, MAX_TIMELINES_BYTES)
        self._num_waiting = 0
        """Bytes of the lines that are not written yet."""
        self._anchors: dict[str, int] = {}
        """Each job's anchor after its last round."""
        self._writing = asyncio.Lock()
        driver.on_performed(self._take_command)
        driver.watchers.on_published(self._take_report)

    def begin(self, job_id: str, rank: int) -> None:
        """Begins the job's timeline, if it has not begun, since one of its ranks will send spans."""
        self._begin(job_id)
        self._add(job_id, {"event": "ready", "at": time.time(), "text": f"rank {rank} has loaded the file"})
        self._send_clock(job_id, time.time())

    def take_spans(self, job_id: str, rank: int, spans: rank_pb2.Spans) -> None:
        """Adds a rank's spans, and the offset of its clock if the rank has received the coordinator's.

        They may be the first of the timeline that this coordinator receives, if a previous one has begun it.
        """
        now_s = time.time()
        self._begin(job_id)
        if spans.clock_sent_s:
            # As in NTP: the offset is half the difference of the two ways, and its error at most half the round trip.
            # A reader of the timeline takes the offset of the quickest exchange.
            there_s, back_s = spans.clock_received_s - spans.clock_sent_s, now_s - spans.sent_s
            ahead = {"clock": rank, "ahead_s": (there_s - back_s) / 2, "round_trip_s": there_s + back_s}
            self._add(job_id, ahead)
        if spans.kinds or spans.num_dropped:
            row = {
                "spans": rank,
                "base_us": spans.base_us,
                "kinds": list(spans.kinds),
                "starts_us": list(spans.starts_us),
                "durations_us": list(spans.durations_us),
                "details": list(spans.details),
                "dropped": spans.num_dropped,
            }
            self._add(job_id, row)

    def _begin(self, job_id: str) -> None:
        """Opens the job's timeline, unless the job has ended. The present size of its file counts."""
        spec = self._driver.core.spec(JobId(job_id))
        # One of a job that has ended would be ended by nothing, and count forever.
        if job_id in self._open or spec is None or self._driver.core.result(JobId(job_id)) is not None:
            return
        path = self._path(job_id)
        self._open[job_id] = _Open(spec.submitted_by)
        self._require_room(job_id, self._open[job_id], path.stat().st_size if path.exists() else 0, waits=False)

    async def chunks(self, job_id: str) -> AsyncIterator[bytes]:
        """Yields chunks of the timeline so far. Raises `InvalidJob` when there is none."""
        await self._flush()
        path = self._path(job_id)
        if not path.exists():
            raise InvalidJob(f"job {job_id} has no timeline: submit it with --timeline true")
        with path.open("rb") as file:
            while data := await asyncio.to_thread(file.read, CHUNK_BYTES):
                yield data

    async def write(self) -> None:
        """Writes new lines, and sends the clock to ranks, until it is cancelled; then writes the rest."""
        clock_s = 0.0
        try:
            while True:
                await self._flush()
                now_s = time.time()
                if not 0 <= now_s - clock_s < CLOCK_EVERY_S:  # also when the clock was set back
                    clock_s = now_s
                    for job_id in self._open:
                        self._send_clock(job_id, clock_s)
                await asyncio.sleep(EVERY_S)
        finally:
            async with self._writing:  # waits for a write that a reader of the timeline has begun
                self._write(self._take())

    def _send_clock(self, job_id: str, now_s: float) -> None:
        """Sends the coordinator's clock to every rank of a job."""
        message = rank_pb2.ConverseResponse(clock=rank_pb2.Clock(sent_s=now_s))
        for stream in self._driver.streams.ranks.get(JobId(job_id), {}).values():
            stream.pass_on(message)

    def _take_command(self, command: commands.SessionCommand, why: str) -> None:
        if command.job_id in self._open and (described := _described(command)) is not None:
            name, details = described
            row = {"told": command.rank, "at": time.time(), "name": name, **details}
            self._add(command.job_id, {**row, "why": why} if isinstance(command, commands.SendSyncNow) else row)

    def _take_report(self, job_id: str, report: reports.Report) -> None:
        if job_id not in self._open:
            return
        row = {"event": NAMES[type(report)], "at": time.time(), "text": describe_report(report)}
        if isinstance(report, reports.RoundReport):
            row |= {"round": report.round, "anchor": report.anchor, "batches": list(report.rank_batches)}
            row |= {"averaging_ms": report.sync_ms, "waited_ms": list(report.rank_waited_ms)}
            self._take_anchor(job_id, report)
        self._add(job_id, row)
        if isinstance(report, reports.JobResult):
            asyncio.get_running_loop().create_task(self._end(job_id))

    def _take_anchor(self, job_id: str, report: reports.RoundReport) -> None:
        before = self._anchors.get(job_id, report.anchor)
        self._anchors[job_id] = report.anchor
        if before != report.anchor:
            text = f"anchor {before} → {report.anchor} batches of the slowest rank"
            self._add(job_id, {"event": "anchor changed", "at": time.time(), "text": text, "to": report.anchor})

    async def _end(self, job_id: str) -> None:
        await self._flush()
        self._anchors.pop(job_id, None)
        if (one := self._open.pop(job_id, None)) is not None:
            self._held.change(one.user, -one.num_bytes)
        await asyncio.to_thread(self._make_room, set(self._open))

    def _add(self, job_id: str, row: Mapping[str, object]) -> None:
        one = self._open.get(job_id)
        if one is None or one.is_full:
            return
        line = json.dumps(row, separators=(",", ":"))
        if self._require_room(job_id, one, len(line) + 1):
            one.lines.append(line)
            self._num_waiting += len(line) + 1

    def _require_room(self, job_id: str, one: _Open, num_bytes: int, *, waits: bool = True) -> bool:
        """Counts `num_bytes` more of a timeline; returns False if there is no room, from then on always."""
        why = ""
        if one.num_bytes + num_bytes > MAX_BYTES:
            why = f"it is full, with {MAX_BYTES >> 20} MiB"
        elif waits and self._num_waiting + num_bytes > MAX_WAITING_BYTES:
            why = f"more comes than is written: {MAX_WAITING_BYTES >> 20} MiB wait for the disk"
        else:
            try:
                self._held.change(one.user, num_bytes)
                one.num_bytes += num_bytes
            except TooMuch as error:
                why = str(error)
        one.is_full = bool(why)
        if why:
            log.warning("job=%s the rest of its timeline is not recorded: %s", job_id, why)
        return not why

    async def _flush(self) -> None:
        async with self._writing:
            if taken := self._take():
                # Lines that were taken are written, also if who asked for it is cancelled.
                await asyncio.shield(asyncio.to_thread(self._write, taken))

    def _take(self) -> dict[str, list[str]]:
        """Removes and returns the lines that are not written yet, by job."""
        taken = {job_id: one.lines for job_id, one in self._open.items() if one.lines}
        for job_id in taken:
            self._open[job_id].lines = []
        self._num_waiting = 0
        return taken

    def _write(self, taken: dict[str, list[str]]) -> None:
        """Appends lines to the files. Drops those that cannot be written, and the log has a warning."""
        for job_id, lines in taken.items():
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                with self._path(job_id).open("a", encoding="utf-8") as file:
                    file.write("\n".join(lines) + "\n")
                self._trouble.succeeded()
            except OSError as error:
                self._trouble.failed(error.strerror or str(error))

    def _make_room(self, in_use: Collection[str]) -> None:
        found = [(path.stat(), path) for path in self._folder.glob("*.jsonl") if path.stem not in in_use]
        found.sort(key=lambda one: one[0].st_mtime)
        remove_crowded_out(((path, path.stem, stat.st_size) for stat, path in found), self._owner, MAX_TOTAL_BYTES)

    def _path(self, job_id: str) -> Path:
        return self._folder / f"{job_id}.jsonl"


def _described(command: commands.SessionCommand) -> tuple[str, dict[str, object]] | None:
    """A command's name and facts for the timeline; None for one that does not concern when ranks train."""
    match command:
        case commands.SendThrottle():
            return "throttle", {"limit_step": min(command.limit_step, 2**53)}
        case commands.SendLease():
            lease = command.lease
            name = "lease in reserve" if command.is_reserve else "lease"
            return name, {"epoch": lease.epoch, "offset": lease.offset, "size": lease.size}
        case commands.SendEpochMetrics():
            return "epoch metrics", {"epoch": command.report.epoch}
    if (known := TOLD.get(type(command))) is None:
        return None
    name, facts = known
    return name, {fact: getattr(command, fact) for fact in facts}

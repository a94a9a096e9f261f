"""The output of ranks as lines: from the chunks that a coordinator streams, or from the log files of a local run."""

import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

from elche_client.events import LogLine

POLL_S = 0.1
"""Seconds between two looks at the logs."""
STAMP_BYTES = 20
"""Length of the time before each line."""
MAX_LINES = 50
"""Most lines of all ranks that are shown per poll, the newest; others are only counted. So the display keeps up with
ranks that print megabytes."""
MAX_LINE_CHARS = 1000
"""Longest line that is shown; of a longer one, its beginning."""
MAX_OPEN_BYTES = 64 * 1024
"""Most bytes that are kept of an incomplete line."""
CHUNK_BYTES = 1 << 20
"""Bytes that are read of a log at once."""
EXIT_NOTE = b"elche: this rank "
"""Prefix of a rank's note on its exit, which is not shown, since the run reports exits itself."""
TRACEBACK = b"Traceback (most recent call last):"


def split(data: bytes) -> list[str]:
    """Splits into lines; of a line that a progress bar rewrites with carriage returns, keeps the last state."""
    return [_shown(line) for line in data.split(b"\n")]


def _line(rank: int, line: bytes) -> LogLine:
    """Parses a line that may begin with its time (`SendLog`)."""
    stamp, space, text = line[:STAMP_BYTES], line[STAMP_BYTES : STAMP_BYTES + 1], line[STAMP_BYTES + 1 :]
    if space == b" ":
        try:
            return LogLine(rank=rank, text=_shown(text), at=datetime.fromisoformat(stamp.decode("ascii")))
        except ValueError:
            if stamp == b" " * STAMP_BYTES:
                return LogLine(rank=rank, text=_shown(text))
    return LogLine(rank=rank, text=_shown(line))


def _shown(line: bytes) -> str:
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", "replace")


@dataclass(slots=True, kw_only=True)
class LogPosition:
    """A line's beginning in a rank's log."""

    rank: int
    log: str
    offset: int


class RankLines:
    """Assembles lines from chunks of several ranks' logs, with times."""

    def __init__(self) -> None:
        self._open: dict[int, bytes] = {}
        self._positions: dict[int, LogPosition] = {}
        """Of the first line that is not complete, in each log of which the coordinator has said where it begins."""
        self._num_cut: dict[int, int] = {}
        """Bytes that are not kept of the incomplete line."""

    @property
    def can_go_on(self) -> bool:
        """False if a log has come of which nobody has said where in it that was: it would come once more."""
        return self._open.keys() <= self._positions.keys()

    def positions(self) -> list[LogPosition]:
        """Where the lines begin that have not come."""
        return list(self._positions.values())

    def begin(self, position: LogPosition) -> Iterator[LogLine]:
        """Notes where a rank's next chunk begins. What there was of an incomplete line comes again; from another log it
        does not, so that it is given now.
        """
        before, rest = self._positions.get(position.rank), self._open.get(position.rank, b"")
        if before is not None and before.log != position.log and rest:
            yield _line(position.rank, rest)
        self._positions[position.rank] = position
        self._open[position.rank], self._num_cut[position.rank] = b"", 0

    def add(self, rank: int, data: bytes) -> Iterator[LogLine]:
        """The lines that are complete with this chunk."""
        whole, newline, rest = (self._open.pop(rank, b"") + data).rpartition(b"\n")
        num_cut = self._num_cut.pop(rank, 0)
        self._open[rank] = rest[-MAX_OPEN_BYTES:]
        self._num_cut[rank] = max(0, len(rest) - MAX_OPEN_BYTES) + (0 if newline else num_cut)
        if newline:
            lines = whole.split(b"\n")
            if rank in self._positions:
                self._positions[rank].offset += num_cut + sum(len(line) - STAMP_BYTES for line in lines)
            yield from (_line(rank, line) for line in lines)

    def rest(self) -> Iterator[LogLine]:
        """The incomplete last lines, at the end of the stream."""
        yield from (_line(rank, data) for rank, data in sorted(self._open.items()) if data)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOutput:
    """Output of a rank of a local run since the last poll."""

    rank: str
    lines: tuple[str, ...]
    """The newest lines."""
    num_dropped: int = 0
    """Number of lines before them that were dropped."""


@dataclass(slots=True)
class _Log:
    """One rank's log file, with the read position."""

    rank: str
    file: Any
    rest: bytes = b""
    """The incomplete last line."""
    in_traceback: bool = False
    """True if the next lines belong to the traceback of an exit note."""

    def read(self, limit: int, *, is_last: bool) -> RankOutput | None:
        """The new lines, at most `limit` of them; None when there are none."""
        newest: deque[bytes] = deque(maxlen=limit)
        num_lines = 0
        if self.file.tell() > os.fstat(self.file.fileno()).st_size:
            self.file.seek(0)  # the file was truncated to its end because it had become too long
            if self.rest:
                num_lines += self._take(b"\n", newest)  # the rest of that line is gone, and another one follows
        while data := self.file.read(CHUNK_BYTES):
            num_lines += self._take(data, newest)
        if is_last and self.rest:
            num_lines += self._take(b"\n", newest)
        if not num_lines:
            return None
        lines = tuple(_shown(line)[:MAX_LINE_CHARS] for line in newest)
        return RankOutput(rank=self.rank, lines=lines, num_dropped=num_lines - len(lines))

    def _take(self, data: bytes, newest: deque[bytes]) -> int:
        """Adds the lines that are complete with the data to `newest`; returns their number."""
        whole, newline, rest = (self.rest + data).rpartition(b"\n")
        self.rest = rest[-MAX_OPEN_BYTES:]
        if not newline:
            return 0
        lines = whole.split(b"\n")
        if self.in_traceback or EXIT_NOTE in whole:
            lines = [line for line in lines if not self._is_exit_note(line)]
        newest.extend(lines)
        return len(lines)

    def _is_exit_note(self, line: bytes) -> bool:
        """True if the line belongs to a rank's exit note. Lines after the note are shown."""
        if line.startswith(EXIT_NOTE):
            self.in_traceback = TRACEBACK in line
            return True
        if not self.in_traceback:
            return False
        self.in_traceback = line.startswith((b" ", b"\t"))  # the line that is not indented names the exception
        return True


@dataclass(slots=True)
class LogTail:
    """Polls the log files in a run's folder on a thread and puts a `RankOutput` for new lines into a queue."""

    folder: Path
    queue: SimpleQueue[Any]
    _logs: dict[Path, _Log] = field(default_factory=dict)
    _stopped: Event = field(default_factory=Event)
    _thread: Thread | None = None

    def start(self) -> None:
        self._thread = Thread(target=self._run, name="ranks' logs", daemon=True)
        self._thread.start()

    def stop(self) -> list[RankOutput]:
        """Ends the thread; returns output that is not in the queue. Call it when all ranks have exited."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
        late = list(self._read(is_last=True))
        for log in self._logs.values():
            log.file.close()
        return late

    def _run(self) -> None:
        while not self._stopped.wait(POLL_S):
            for printed in self._read():
                self.queue.put(printed)

    def _read(self, *, is_last: bool = False) -> Iterator[RankOutput]:
        for path in sorted(self.folder.glob("rank-*.log")):
            if path not in self._logs:
                rank = path.name.removeprefix("rank-").removesuffix(".log")
                self._logs[path] = _Log(rank, path.open("rb"))
        limit = max(1, MAX_LINES // max(1, len(self._logs)))
        found = (log.read(limit, is_last=is_last) for log in self._logs.values())
        yield from (one for one in found if one is not None)

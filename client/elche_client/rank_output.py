"""What ranks print, as lines: of the parts that a coordinator sends, or of the logs of a run on this machine."""

import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

from elche_client.events import LogLine

LOOK_EVERY_S = 0.1
MAX_LINES = 50  # of all ranks each time; the newest are shown, and how many more there were
MAX_LINE_CHARS = 1000
MAX_OPEN_BYTES = 64 * 1024  # of a line whose end is not there yet
CHUNK_BYTES = 1 << 20
LAST_WORDS = b"elche: this rank "  # with this a rank begins to say how it ends, which the run tells itself


def split(data: bytes) -> list[str]:
    """Whole lines as texts; of what a progress bar has written over and over, what was there last."""
    return [_shown(line) for line in data.split(b"\n")]


def _shown(line: bytes) -> str:
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", "replace")


class RankLines:
    """Lines of several ranks' logs, of which parts come one after the other."""

    def __init__(self) -> None:
        self._open: dict[int, bytes] = {}

    def add(self, rank: int, data: bytes) -> Iterator[LogLine]:
        """The lines that are whole with this part."""
        whole, newline, rest = (self._open.pop(rank, b"") + data).rpartition(b"\n")
        self._open[rank] = rest[-MAX_OPEN_BYTES:]
        if newline:
            yield from (LogLine(rank=rank, text=text) for text in split(whole))

    def rest(self) -> Iterator[LogLine]:
        """What has no end."""
        yield from (LogLine(rank=rank, text=_shown(data)) for rank, data in sorted(self._open.items()) if data)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOutput:
    """What a rank of this run has printed since the last time."""

    rank: str
    lines: tuple[str, ...]  # the newest
    num_dropped: int = 0  # those before them: more than anybody can read


@dataclass(slots=True)
class _Log:
    """One rank's log, as far as it is read."""

    rank: str
    file: Any
    rest: bytes = b""  # a line without its end
    is_over: bool = False

    def read(self, limit: int, *, is_last: bool) -> RankOutput | None:
        """What is new, at most `limit` lines of it; None for nothing."""
        newest: deque[bytes] = deque(maxlen=limit)
        num_lines = 0
        if self.file.tell() > os.fstat(self.file.fileno()).st_size:
            self.file.seek(0)  # it had become too long, and only its end was kept
        while data := self.file.read(CHUNK_BYTES):
            num_lines += self._take(data, newest)
        if is_last and self.rest:
            num_lines += self._take(b"\n", newest)
        if not num_lines:
            return None
        lines = tuple(_shown(line)[:MAX_LINE_CHARS] for line in newest)
        return RankOutput(rank=self.rank, lines=lines, num_dropped=num_lines - len(lines))

    def _take(self, data: bytes, newest: deque[bytes]) -> int:
        """Adds the lines that are whole now to the newest; how many there were."""
        whole, newline, rest = (self.rest + data).rpartition(b"\n")
        self.rest = rest[-MAX_OPEN_BYTES:]
        if not newline or self.is_over:
            return 0
        own, last_words, _ = (b"\n" + whole).partition(b"\n" + LAST_WORDS)
        self.is_over = bool(last_words)
        newest.extend(own.rsplit(b"\n", newest.maxlen or 0)[1:][-(newest.maxlen or 0) :])
        return own.count(b"\n")


@dataclass(slots=True)
class LogTail:
    """Follows the logs of a run's ranks in its folder, on a thread, and puts what is new into a queue."""

    folder: Path
    queue: SimpleQueue[Any]
    _logs: dict[Path, _Log] = field(default_factory=dict)
    _stopped: Event = field(default_factory=Event)
    _thread: Thread | None = None

    def start(self) -> None:
        self._thread = Thread(target=self._run, name="ranks' logs", daemon=True)
        self._thread.start()

    def stop(self) -> list[RankOutput]:
        """What is left, when all ranks have ended."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
        return list(self._read(is_last=True))

    def _run(self) -> None:
        while not self._stopped.wait(LOOK_EVERY_S):
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

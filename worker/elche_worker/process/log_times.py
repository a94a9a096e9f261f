"""Times of the lines of a rank's log: a file beside the log records its size and the time, at most once a second.

The log itself is as the rank has written it. When it is read, each line gets the time of the newest entry before it.
"""

import os
import re
import time
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from elche_worker.process.rank_files import RankFiles

EVERY_S = 1.0
"""Least time in seconds between two entries."""
MAX_BYTES = 4 << 20
"""Size from which the file is emptied."""
MAX_READ_BYTES = 4 * MAX_BYTES
"""Most bytes of the file that are read at once; a rank may have written anything into it."""
MAX_TIME_S = 2**37
"""The latest time that is shown: in some thousands of years."""
STAMP = "%Y-%m-%dT%H:%M:%SZ"
NO_STAMP = b" " * 20
"""Shown for a line that is older than the known times."""


def times_path(log_path: str | Path) -> Path:
    """The file with the times of a log."""
    return Path(f"{log_path}.times")


class TimesWriter:
    """Notes when a rank writes; in the rank's process."""

    def __init__(self, log_path: str) -> None:
        # To append: once the file was emptied, a write goes to its new end.
        self._file = os.open(times_path(log_path), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._noted_s = -EVERY_S

    def note(self, log: int) -> None:
        """Records the time before a write to the log with this descriptor. Never raises."""
        now_s = time.time()
        # Also when the clock was set back: lines would have a time of the future until it has caught up.
        if not 0 <= now_s - self._noted_s < EVERY_S:
            self._noted_s = now_s
            with suppress(OSError):
                os.write(self._file, b"%d %.0f\n" % (os.fstat(log).st_size, now_s))


def shorten_times(log_path: str, *, is_cut: bool) -> None:
    """Empties the file of times if the log was cut, or the file is too large."""
    with suppress(OSError):
        path = times_path(log_path)
        if is_cut or path.stat().st_size > MAX_BYTES:
            os.truncate(path, 0)


class TimesReader:
    """Puts the time before each line of a log that is read from an offset; on the rank's host."""

    def __init__(self, log_path: Path, files: RankFiles) -> None:
        self._path = times_path(log_path)
        self._files = files
        self._sizes: list[int] = []
        self._times: list[int] = []
        self._num_read = 0
        self._begins_line = True

    def stamped(self, offset: int, data: bytes) -> bytes:
        """The bytes at an offset of the log, with 20 characters and a space before each line."""
        self._update()
        return b"".join(self._lines(offset, data))

    def _lines(self, offset: int, data: bytes) -> Iterator[bytes]:
        for line in re.findall(rb"[^\n]*\n|[^\n]+", data):  # a carriage return stays within a line
            if self._begins_line:
                yield self._stamp(offset) + b" "
            yield line
            offset += len(line)
            self._begins_line = line.endswith(b"\n")

    def _stamp(self, offset: int) -> bytes:
        at = bisect_right(self._sizes, offset)
        return time.strftime(STAMP, time.gmtime(self._times[at - 1])).encode() if at else NO_STAMP

    def _update(self) -> None:
        """Reads new entries."""
        with suppress(OSError, ValueError), self._files.read(self._path) as file:
            if os.fstat(file.fileno()).st_size < self._num_read:
                self._sizes, self._times, self._num_read = [], [], 0
            file.seek(self._num_read)
            whole = file.read(MAX_READ_BYTES).rpartition(b"\n")[0]
            for line in whole.splitlines():
                size, at_s = map(int, line.split())
                # Sorted in any case, as `bisect` needs them: a rank may have written anything into the file.
                self._sizes.append(max(size, self._sizes[-1] if self._sizes else 0))
                self._times.append(min(max(0, at_s), MAX_TIME_S))
            self._num_read += len(whole) + (1 if whole else 0)

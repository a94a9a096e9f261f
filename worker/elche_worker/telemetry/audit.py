"""Writes what a rank has trained, and into which rounds it went, for `elche audit` and for replays. The format is in
docs/audit.md.

Records are collected in memory and written to the system when a round is entered and when its result has arrived, so
that the records of every committed round outlive the process.
"""

import errno
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from struct import pack
from typing import Any
from zlib import crc32

from elche.output import notice

MAGIC, FORMAT = b"ELCHEAUD", 2
"""First bytes of the file, and the version of its format."""
BATCH, ENTERED, RECEIVED, LOST, COMMITTED, ENDED, SKIPPED, JOINED, EVALUATED, LOST_LATE, DECIDED = range(1, 12)
"""Kinds of records, as their first byte."""
LEFT_OUT, NOT_FINITE, HAS_DIGEST = 1, 2, 4
"""Flags of a record of kind RECEIVED."""
LEVEL_BIT = 4
"""From this bit on the flags have the level of compression."""
MAX_BUFFERED_BYTES = 4096
"""Bytes from which batches are written before the next round: without rounds the buffer would grow without end."""


class AuditLog:
    """The audit file of one rank process. Training goes on if it cannot be written, and the rank's log says so."""

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        """Creates the file and writes `about`, the rank's own data, as JSON."""
        self._path = path
        self._file: Any = None
        text = json.dumps(about, sort_keys=True).encode()
        self._buffer = bytearray(MAGIC + pack("<HHI", FORMAT, 0, len(text)) + text)
        self._crc = crc32(self._buffer)
        self._buffer += pack("<I", self._crc)
        draft = path.with_name(f"{path.name}.new")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
            # Unbuffered: what Python still held would be lost with a process that is killed.
            self._file = draft.open("wb", buffering=0)
            self.flush()
            draft.rename(path)  # whole: a process may be killed at any moment, and one that has no head is damaged
        except OSError as error:
            self._give_up(error)

    def batch(self, *, lease: int, epoch: int, offset: int, size: int, step: int, is_skipped: bool = False) -> None:
        """Adds a batch that was trained, or skipped because it is None: positions of the epoch from `offset`, the
        rank's batch number `step`, from 1.
        """
        self._add(pack("<BQIQIQ", SKIPPED if is_skipped else BATCH, lease, epoch, offset, size, step))
        if len(self._buffer) > MAX_BUFFERED_BYTES:
            self.flush()

    def entered(
        self, *, attempt: int, generation: int, round_id: int, version: int, cut: int, step: int, weight: int
    ) -> None:
        """Adds a round and what the rank brings: `cut` samples and `step` batches in all, `weight` new samples."""
        self._add(pack("<BQQQQQQQ", ENTERED, attempt, generation, round_id, version, cut, step, weight))
        self.flush()

    def received(
        self,
        *,
        generation: int,
        round_id: int,
        version: int,
        samples: int,
        left_out: int,
        num_rows: int,
        is_left_out: bool,
        is_finite: bool,
        header: int,
        digest: int | None,
        level: int = 0,
    ) -> None:
        """Adds a round's result: its version, the job's samples in it, those of them whose values were left out of the
        average, digests of header and parameters, and with `compress="auto"` the level of compression, at most 15.
        """
        # A digest may be 0: the flag says if there is one.
        flags = LEFT_OUT * is_left_out | NOT_FINITE * (not is_finite) | HAS_DIGEST * (digest is not None)
        flags |= level << LEVEL_BIT
        result = pack("<QQQQQI", generation, round_id, version, samples, left_out, num_rows)
        self._add(pack("<B", RECEIVED) + result + pack("<BQQ", flags, header, digest or 0))
        self.flush()

    def lost(self, *, generation: int, round_id: int, has_header: bool = False) -> None:
        """Adds a round without a result here, beyond its header perhaps: its work goes into the next one."""
        self._add(pack("<BQQ", LOST_LATE if has_header else LOST, generation, round_id))

    def joined(self, *, attempt: int, generation: int, position: int, world_size: int, is_relayed: bool) -> None:
        """Adds that the rank's next rounds are those of another generation, and its place in it."""
        self._add(pack("<BQQIIB", JOINED, attempt, generation, position, world_size, is_relayed))

    def evaluated(self, *, round_id: int, epoch: int, offset: int, size: int) -> None:
        """Adds that the rank evaluates a round's result, or its part of that: the job's functions may draw random
        numbers, which training does not get then.
        """
        self._add(pack("<BQIQQ", EVALUATED, round_id, epoch, offset, size))

    def committed(self, *, round_id: int, version: int, global_step: int) -> None:
        """Adds that the coordinator has said that a round is committed."""
        self._add(pack("<BQQQ", COMMITTED, round_id, version, global_step))

    def decided(self, outcome: int) -> None:
        """Adds that the job's outcome is decided, as a number of docs/audit.md: no further round is committed."""
        self._add(pack("<BB", DECIDED, outcome))

    def end(self, step: int) -> None:
        """Adds that the process ends in order, and closes the file."""
        self._add(pack("<BQ", ENDED, step))
        self.flush()
        if self._file is None:
            return
        try:
            self._file.close()  # some file systems say only now that there is no room
        except OSError as error:
            self._give_up(error)
        self._file = None

    def flush(self) -> None:
        """Writes what was collected to the operating system, not to the disk."""
        if self._file is None:
            self._buffer.clear()
            return
        try:
            # An unbuffered write may write a part only, without an error.
            if self._file.write(self._buffer) != len(self._buffer):
                raise OSError("no space is left")
        except OSError as error:
            with suppress(OSError):
                self._file.close()
            self._give_up(error)
        self._buffer.clear()

    def _add(self, record: bytes) -> None:
        """Adds a record and the CRC-32 of the whole file so far: a record that was removed or changed is found."""
        self._crc = crc32(record, self._crc)
        self._buffer += record + pack("<I", self._crc)

    def _give_up(self, error: OSError) -> None:
        self._file = None
        text = f"the audit file {self._path} cannot be written ({error.strerror or error}): this rank trains on"
        notice(f"{text}, and `elche audit` cannot judge the run")

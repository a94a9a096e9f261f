"""What a rank writes for `elche audit`: in the documented format, in time, and without harm where it cannot."""

import errno
import io
import json
import resource
import struct
from collections.abc import Callable
from pathlib import Path
from zlib import crc32

import pytest

from elche_worker.telemetry.audit import HAS_DIGEST, MAX_BUFFERED_BYTES, AuditLog

RESULT = {"generation": 2, "round_id": 3, "version": 4, "samples": 5, "left_out": 6, "num_rows": 7}


def test_records_are_in_the_documented_format(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "a" / "rank-0-1.bin", {"rank": 0})
    log.batch(lease=1, epoch=2, offset=3, size=4, step=5)
    log.entered(attempt=1, generation=2, round_id=3, version=4, cut=5, step=6, weight=7)
    log.received(**RESULT, is_left_out=True, is_finite=False, header=9, digest=10)
    log.received(**RESULT, is_left_out=False, is_finite=True, header=9, digest=None)
    log.lost(generation=1, round_id=2)
    log.lost(generation=1, round_id=2, has_header=True)
    log.joined(attempt=1, generation=2, position=3, world_size=4, is_relayed=True)
    log.evaluated(round_id=1, epoch=2, offset=3, size=4)
    log.committed(round_id=1, version=2, global_step=3)
    log.batch(lease=1, epoch=2, offset=3, size=4, step=5, is_skipped=True)
    log.decided(4)
    log.end(9)
    text = json.dumps({"rank": 0}).encode()
    records = [
        b"ELCHEAUD" + struct.pack("<HHI", 2, 0, len(text)) + text,
        b"\1" + struct.pack("<QIQIQ", 1, 2, 3, 4, 5),
        b"\2" + struct.pack("<QQQQQQQ", *range(1, 8)),
        b"\3" + struct.pack("<QQQQQIBQQ", 2, 3, 4, 5, 6, 7, 1 | 2 | 4, 9, 10),
        b"\3" + struct.pack("<QQQQQIBQQ", 2, 3, 4, 5, 6, 7, 0, 9, 0),
        b"\4" + struct.pack("<QQ", 1, 2),
        b"\12" + struct.pack("<QQ", 1, 2),
        b"\10" + struct.pack("<QQIIB", 1, 2, 3, 4, 1),
        b"\11" + struct.pack("<QIQQ", 1, 2, 3, 4),
        b"\5" + struct.pack("<QQQ", 1, 2, 3),
        b"\7" + struct.pack("<QIQIQ", 1, 2, 3, 4, 5),
        b"\13" + struct.pack("<B", 4),
        b"\6" + struct.pack("<Q", 9),
    ]
    expected, crc = b"", 0
    for record in records:
        crc = crc32(record, crc)
        expected += record + struct.pack("<I", crc)
    assert (tmp_path / "a" / "rank-0-1.bin").read_bytes() == expected


def note_entry(log: AuditLog) -> None:
    log.entered(attempt=1, generation=2, round_id=3, version=4, cut=5, step=6, weight=7)


def note_result(log: AuditLog) -> None:
    log.received(**RESULT, is_left_out=False, is_finite=True, header=9, digest=None)


def test_a_process_that_is_killed_before_its_head_is_written_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has trained nothing; a file without a head is damaged, and the run could not be judged."""

    def die(_: AuditLog) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(AuditLog, "flush", die)
    with pytest.raises(KeyboardInterrupt):
        AuditLog(tmp_path / "rank-0-1.bin", {})
    assert list(tmp_path.glob("*.bin")) == []


@pytest.mark.parametrize("note", [note_entry, note_result], ids=lambda one: one.__name__)
def test_a_killed_process_has_written_what_others_may_have_committed(
    tmp_path: Path, note: Callable[[AuditLog], None]
) -> None:
    """What it was to say to others next is on file before; a batch alone waits in memory."""
    path = tmp_path / "rank-0-1.bin"
    log = AuditLog(path, {})
    begun = path.stat().st_size
    log.batch(lease=1, epoch=2, offset=3, size=4, step=5)
    assert path.stat().st_size == begun
    note(log)
    assert path.stat().st_size > begun + 37 + 16


def test_what_is_collected_stays_small(tmp_path: Path) -> None:
    path = tmp_path / "rank-0-1.bin"
    log = AuditLog(path, {})
    for step in range(1, 1001):
        log.batch(lease=1, epoch=0, offset=4 * step, size=4, step=step)
    assert path.stat().st_size > 32_000


def test_a_full_disk_is_said_once_and_training_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rank-0-1.bin").touch()
    log = AuditLog(tmp_path / "rank-0-1.bin", {})
    note_entry(log)
    log.end(0)
    assert capsys.readouterr().err.count("cannot be written (File exists): this rank trains on") == 1
    full = AuditLog(tmp_path / "rank-1-2.bin", {})
    full._file = Path("/dev/full").open("wb", buffering=0)  # noqa: SIM115
    note_entry(full)
    note_entry(full)
    assert capsys.readouterr().err.count("rank-1-2.bin cannot be written (No space left on device)") == 1


def test_after_a_record_of_which_a_part_was_written_there_is_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A disk that has room for some bytes more takes those, and says only by their number that it is full."""
    path = tmp_path / "rank-0-1.bin"
    log = AuditLog(path, {})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = path.stat().st_size + 10
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        note_entry(log)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    note_entry(log)
    assert path.stat().st_size == size
    assert capsys.readouterr().err.count("cannot be written (no space is left): this rank trains on") == 1


def test_of_a_file_that_cannot_be_written_nothing_is_kept_in_memory(tmp_path: Path) -> None:
    (tmp_path / "rank-0-1.bin").touch()
    log = AuditLog(tmp_path / "rank-0-1.bin", {})
    for step in range(1, 1001):
        log.batch(lease=1, epoch=0, offset=4 * step, size=4, step=step)
    assert len(log._buffer) <= MAX_BUFFERED_BYTES


@pytest.mark.parametrize(("digest", "is_told"), [(None, False), (0, True), (7, True)])
def test_a_digest_is_told_whatever_number_it_is(tmp_path: Path, digest: int | None, is_told: bool) -> None:
    log = AuditLog(tmp_path / "rank-0-1.bin", {})
    log.received(**RESULT, is_left_out=False, is_finite=True, header=8, digest=digest)
    flags = (tmp_path / "rank-0-1.bin").read_bytes()[-struct.calcsize("<BQQI")]
    assert flags == HAS_DIGEST * is_told


class FullAtClose(io.BytesIO):
    """A file whose data are lost when it is closed, as on NFS without room."""

    def close(self) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")


class Full(FullAtClose):
    """It takes no data either."""

    def write(self, data: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(("file", "reason"), [(FullAtClose, "Disk quota exceeded"), (Full, "No space left on device")])
def test_a_file_that_cannot_be_closed_ends_no_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: type[FullAtClose], reason: str
) -> None:
    log = AuditLog(tmp_path / "rank-0-1.bin", {})
    log._file = file()
    note_entry(log)
    log.end(0)
    assert capsys.readouterr().err.count(f"rank-0-1.bin cannot be written ({reason}): this rank trains on") == 1

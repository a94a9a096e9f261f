"""What a rank unpacks, and what it refuses."""

import gzip
import io
import tarfile
import tracemalloc
from pathlib import Path

import pytest

from elche.errors import InvalidJob
from elche_worker.rank import bundle
from elche_worker.rank.bundle import unpack


def archive(*members: tarfile.TarInfo | str, size: int = 3) -> io.BytesIO:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as tar:
        for member in members:
            info = tarfile.TarInfo(member) if isinstance(member, str) else member
            info.size = size if info.isreg() else 0
            tar.addfile(info, io.BytesIO(b"x" * size))
    file.seek(0)
    return file


def of_type(kind: bytes, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo("odd")
    info.type, info.linkname = kind, link
    return info


def test_files_are_unpacked_for_their_owner_alone(tmp_path: Path) -> None:
    tool = tarfile.TarInfo("bin/tool")
    tool.mode = 0o4777
    unpack(archive("train.py", tool), tmp_path)
    assert (tmp_path / "train.py").read_text() == "xxx"
    assert (tmp_path / "bin/tool").stat().st_mode & 0o7777 == 0o700
    assert (tmp_path / "train.py").stat().st_mode & 0o7777 == 0o600


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x", "a//b", "./x", "a\\..\\x", "C:\\x"])
def test_no_path_leaves_the_folder(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "inner"
    folder.mkdir()
    with pytest.raises(InvalidJob, match="not a path within a folder"):
        unpack(archive(name), folder)
    assert list(tmp_path.iterdir()) == [folder]
    assert list(folder.iterdir()) == []


def test_a_file_in_too_many_folders_is_refused(tmp_path: Path) -> None:
    """2,000 of them ended the job with the words of a RecursionError."""
    with pytest.raises(InvalidJob, match="is in 2000 folders, and 100 is the limit"):
        unpack(archive("d/" * 2000 + "x"), tmp_path)
    unpack(archive("d/" * 100 + "x"), tmp_path)


def test_a_header_with_words_for_numbers_is_refused(tmp_path: Path) -> None:
    odd = tarfile.TarInfo("odd")
    odd.pax_headers = {"GNU.sparse.map": "a,b", "GNU.sparse.size": "1"}
    with pytest.raises(InvalidJob, match="not an archive that"):
        unpack(archive(odd), tmp_path)


@pytest.mark.parametrize(
    "member",
    [
        of_type(tarfile.SYMTYPE, "/etc"),
        of_type(tarfile.LNKTYPE, "/etc/passwd"),
        of_type(tarfile.FIFOTYPE),
        of_type(tarfile.CHRTYPE),
        of_type(tarfile.DIRTYPE),
    ],
    ids=["symlink", "hardlink", "fifo", "device", "folder"],
)
def test_only_regular_files_are_unpacked(tmp_path: Path, member: tarfile.TarInfo) -> None:
    with pytest.raises(InvalidJob, match="'odd', which is not a regular file"):
        unpack(archive(member), tmp_path)


def test_the_same_path_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidJob, match="not an archive that"):
        unpack(archive("a", "a"), tmp_path)
    with pytest.raises(InvalidJob, match="not an archive that"):
        unpack(archive("b", "b/c"), tmp_path)


@pytest.mark.parametrize(("limit", "value"), [("MAX_FILES", 2), ("MAX_UNPACKED_BYTES", 2999)])
def test_an_archive_that_unpacks_to_too_much_ends_before_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    monkeypatch.setattr(bundle, limit, value)
    with pytest.raises(InvalidJob, match="has more than"):
        unpack(archive("a", "b", "c", size=1000), tmp_path)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("data", [b"", b"no archive", archive("a").getvalue()[:-20]], ids=["empty", "text", "cut off"])
def test_what_is_no_archive_is_said(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(InvalidJob, match="not an archive that `elche submit` makes"):
        unpack(io.BytesIO(data), tmp_path)


def entry(kind: bytes, size: int, name: str = "x") -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, size
    return info.tobuf(tarfile.GNU_FORMAT)


def pax(text: str) -> bytes:
    """A header with one record of PAX, of less than 90 bytes."""
    record = f"{len(text) + 5} {text}\n".encode()
    return entry(tarfile.XHDTYPE, len(record)) + record.ljust(512, b"\0")


def zipped(*parts: bytes) -> io.BytesIO:
    return io.BytesIO(gzip.compress(b"".join(parts) + bytes(1024)))


MIB = 1 << 20


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME])
def test_a_header_that_never_ends_takes_no_memory(kind: bytes, tmp_path: Path) -> None:
    """64 MiB of them are 64 KiB of archive, and took four times as much of the rank's memory."""
    bomb = zipped(entry(kind, 64 * MIB), bytes(64 * MIB), entry(tarfile.REGTYPE, 0))
    tracemalloc.start()
    try:
        with pytest.raises(InvalidJob, match=r"which is not a regular file|has a header of 67108864 bytes"):
            unpack(bomb, tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 40 * MIB, "tarfile unpacks 10 KiB of the archive at once"
    finally:
        tracemalloc.stop()


def test_sparse_files_are_refused_before_their_parts_are_read(tmp_path: Path) -> None:
    """20 kB of archive listed ten million parts, in a GB of the rank's memory."""
    keys = ("major=1", "minor=0", "name=x", "realsize=0")
    records = "".join(f"{len(key) + 15} GNU.sparse.{key}\n" for key in keys).encode()
    parts = b"1000000\n" + b"0\n" * 2_000_000
    head = entry(tarfile.XHDTYPE, len(records)) + records.ljust(512, b"\0")
    tracemalloc.start()
    try:
        with pytest.raises(InvalidJob, match="the folder of the job has a sparse file"):
            unpack(zipped(head, entry(tarfile.REGTYPE, len(parts)), parts), tmp_path)
        with pytest.raises(InvalidJob, match="'x', which is not a regular file"):
            unpack(zipped(entry(tarfile.GNUTYPE_SPARSE, 0)), tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 20 * MIB
    finally:
        tracemalloc.stop()


def test_headers_of_headers_are_no_archive(tmp_path: Path) -> None:
    """The job ended with the words of a RecursionError."""
    with pytest.raises(InvalidJob, match="not an archive that `elche submit` makes"):
        unpack(zipped(pax("comment=odd") * 3000, entry(tarfile.REGTYPE, 0)), tmp_path)


def test_a_file_of_less_than_no_bytes_makes_no_room_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "MAX_UNPACKED_BYTES", MIB)
    odd = pax("GNU.sparse.size=-1000000000") + entry(tarfile.REGTYPE, 0, "odd")
    large = [entry(tarfile.REGTYPE, MIB, f"file-{number}") + bytes(MIB) for number in range(4)]
    with pytest.raises(InvalidJob, match="more than"):
        unpack(zipped(odd, *large), tmp_path)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= MIB

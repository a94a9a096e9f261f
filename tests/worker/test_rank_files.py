"""What ranks have put where their files are to be leads the agent nowhere."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from elche_worker.process.rank_files import RankFiles


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """What ranks may change."""
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "token").write_text("a secret")
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


def test_plain_files_are_read_and_written(work: Path) -> None:
    for files in (RankFiles(), RankFiles([work])):
        log = work / "job" / "inner" / "rank-0.log"
        files.make_folder(log.parent)
        files.empty(log)
        with files.append(log) as file:
            file.write(b"one")
        with files.append(log) as file:
            file.write(b" two")
        with files.read(log) as file:
            assert file.read() == b"one two"
        assert (log.parent / ".gitignore").read_text() == "*\n"
        assert oct(log.parent.stat().st_mode)[-3:] == "700"


def test_what_ranks_may_change_can_itself_be_named_by_a_link(work: Path) -> None:
    named = work.with_name("named")
    named.symlink_to(work)
    files = RankFiles([work])
    files.make_folder(named / "job")
    files.empty(named / "job" / "rank-0.log")
    assert (work / "job" / "rank-0.log").exists()


TRICKS: dict[str, Callable[[Path, Path], object]] = {
    "a link to the file": lambda work, private: (work / "token").symlink_to(private / "token"),
    "a pipe": lambda work, private: os.mkfifo(work / "token"),
    "a folder": lambda work, private: (work / "token").mkdir(),
}


@pytest.mark.parametrize("trick", TRICKS)
def test_what_is_no_plain_file_is_refused_at_once(work: Path, trick: str) -> None:
    private = work.with_name("private")
    TRICKS[trick](work, private)
    files = RankFiles([work])
    for use in (files.read, files.append, files.empty):
        with pytest.raises(OSError):
            use(work / "token")
    assert (private / "token").read_text() == "a secret"
    if trick != "a link to the file":
        with pytest.raises(OSError):
            RankFiles().read(work / "token")


def test_folders_that_are_links_are_not_entered(work: Path) -> None:
    private = work.with_name("private")
    (work / "job").symlink_to(private)
    files = RankFiles([work])
    with pytest.raises(OSError):
        files.read(work / "job" / "token")
    with pytest.raises(OSError):
        files.append(work / "job" / "new")
    with pytest.raises(OSError):
        files.make_folder(work / "job" / "inner")
    assert os.listdir(private) == ["token"]


def test_other_places_are_refused(work: Path) -> None:
    files = RankFiles([work])
    for path in (work.with_name("private") / "token", work / ".." / "private" / "token"):
        with pytest.raises(PermissionError, match="--writable"):
            files.read(path)
    with pytest.raises(PermissionError, match="--writable"):
        files.make_folder(work.with_name("elsewhere"))

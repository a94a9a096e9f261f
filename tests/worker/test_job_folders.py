"""A work folder has an id and knows its jobs' folders, whichever agent has it."""

import errno
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from elche.errors import ElcheError
from elche_worker.agent.identity import FOLDER
from elche_worker.agent.job_folders import ID_FILE, MOST_TOLD, RECORDS, JobFolders, check_writable


def made(folders: JobFolders, job_id: str, folder: Path) -> Path:
    folder.mkdir(parents=True)
    folders.remember(job_id, folder)
    return folder


def test_the_next_agent_finds_the_folders_of_the_one_before(tmp_path: Path) -> None:
    first = JobFolders(tmp_path / "work")
    inside, outside = made(first, "a", tmp_path / "work" / "a"), made(first, "b", tmp_path / "elsewhere")
    second = JobFolders(tmp_path / "work")
    assert second.id == first.id != ""
    assert (second.find("a"), second.find("b"), second.find("c")) == (inside, outside, None)
    assert sorted(second.newest()) == ["a", "b"]


def test_an_agent_finds_what_another_with_the_same_folder_has_begun_since(tmp_path: Path) -> None:
    one, other = JobFolders(tmp_path), JobFolders(tmp_path)
    folder = made(one, "a", tmp_path / "a")
    assert other.find("a") == folder


def test_agents_that_begin_together_have_one_id(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        ids = {one.id for one in pool.map(lambda _: JobFolders(tmp_path), range(64))}
    assert len(ids) == 1
    assert not list((tmp_path / FOLDER).glob("*.draft"))


def test_a_folder_that_has_moved_has_its_jobs_still(tmp_path: Path) -> None:
    before = JobFolders(tmp_path / "before")
    made(before, "a", tmp_path / "before" / "a")
    shutil.move(tmp_path / "before", tmp_path / "after")
    after = JobFolders(tmp_path / "after")
    assert after.id == before.id
    assert after.find("a") == tmp_path / "after" / "a"
    assert after.newest() == ["a"]


def test_the_newest_are_told_whose_folders_are_there_and_no_more_than_a_message_holds(tmp_path: Path) -> None:
    folders = JobFolders(tmp_path)
    for number in range(MOST_TOLD + 2):
        made(folders, f"job-{number}", tmp_path / f"job-{number}")
        os.utime(tmp_path / FOLDER / RECORDS / f"job-{number}", (number, number))
    (tmp_path / f"job-{MOST_TOLD}").rmdir()
    told = [f"job-{number}" for number in (MOST_TOLD + 1, *reversed(range(1, MOST_TOLD)))]
    assert folders.newest() == JobFolders(tmp_path).newest() == told


def test_no_name_leads_out_of_the_records(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("/etc", encoding="utf-8")
    folders = JobFolders(tmp_path)
    made(folders, "a", tmp_path / "a")
    for name in ("", "..", "../../secret", str(tmp_path / "secret")):
        assert folders.find(name) is None


def test_a_folder_that_cannot_keep_an_id_serves_its_own_jobs_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FOLDER).write_text("not a folder", encoding="utf-8")
    folders = JobFolders(tmp_path)
    folder = made(folders, "a", tmp_path / "a")
    assert (folders.id, folders.find("a"), folders.newest()) == ("", folder, [])
    assert len(caplog.records) == 2


def test_a_damaged_id_is_named_and_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    JobFolders(tmp_path)
    (tmp_path / FOLDER / ID_FILE).write_text("", encoding="utf-8")
    assert JobFolders(tmp_path).id == ""
    (record,) = caplog.records
    assert f"{ID_FILE} is damaged; remove it" in record.getMessage()


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_a_work_folder_that_cannot_be_written_is_named_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    check_writable(tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == []

    def fail(**where: Any) -> None:
        raise OSError(code, os.strerror(code), str(where["dir"]))

    monkeypatch.setattr("tempfile.TemporaryFile", fail)
    with pytest.raises(ElcheError, match=rf"--work-dir .*new cannot be written \({os.strerror(code)}\)"):
        check_writable(tmp_path / "new")


def test_a_full_disk_is_found_though_empty_files_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def __enter__(self) -> "Full":
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def write(self, data: bytes) -> None:
            if data:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("tempfile.TemporaryFile", lambda **where: Full())
    with pytest.raises(ElcheError, match="No space left on device"):
        check_writable(tmp_path)

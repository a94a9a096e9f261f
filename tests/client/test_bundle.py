"""The folder that is sent with a job's file: what is in it, what is not, and that it is always the same."""

import os
import tarfile
from pathlib import Path

import pytest

from elche.errors import InvalidJob
from elche.folders import keep_out
from elche_client.local.job_run import make_folder
from elche_client.transport import bundle
from elche_client.transport.bundle import packed
from elche_client.transport.upload import entry_of, file_of_module, folder_of


def put(folder: Path, **files: str) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def names(folder: Path) -> list[str]:
    with packed(folder) as one, tarfile.open(one.archive) as tar:
        return tar.getnames()


def test_what_is_beside_the_file_is_packed_and_caches_are_not(tmp_path: Path) -> None:
    put(tmp_path, **{"train.py": "1", "models/net.py": "2", "__pycache__/net.pyc": "3", ".git/HEAD": "4", "a.pyc": "5"})
    assert names(tmp_path) == ["train.py", "models/net.py"]


def test_what_git_ignores_is_left_out(tmp_path: Path) -> None:
    put(
        tmp_path,
        **{
            ".gitignore": "data/\n*.bin\n/top.txt\n",
            "train.py": "",
            "data/big": "",
            "weights.bin": "",
            "top.txt": "",
            "sub/top.txt": "",
            "sub/.gitignore": "!keep.bin\nnotes.md\n",
            "sub/keep.bin": "",
            "sub/notes.md": "",
            "notes.md": "",
        },
    )
    assert names(tmp_path) == [".gitignore", "notes.md", "train.py", "sub/.gitignore", "sub/keep.bin", "sub/top.txt"]


def test_what_elche_itself_makes_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's folder holds its token, a coordinator's the source of other jobs."""
    monkeypatch.chdir(tmp_path)
    put(tmp_path, **{"train.py": "", "data/x": "", "mine/x": ""})
    runs = [make_folder(None, "train"), make_folder(Path("named"), "train"), make_folder(Path("mine"), "train")]
    for run in runs:
        put(run, token="secret")
    keep_out(tmp_path / "data")
    assert names(tmp_path) == ["train.py", "mine/token", "mine/x"], "a folder that was there is the user's"
    keep_out(tmp_path / "data")


def test_of_two_runs_that_begin_at_once_one_gets_the_folder(tmp_path: Path) -> None:
    make_folder(tmp_path / "out", "train")
    with pytest.raises(InvalidJob, match="out holds another run"):
        make_folder(tmp_path / "out", "train")


def test_a_file_that_vanishes_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, **{"a.py": "", "draft": "", "z.py": ""})
    listed = bundle._listed

    def then_gone(folder: Path, left_out: list[str]) -> list[str]:
        found = listed(folder, left_out)
        (folder / "draft").unlink()
        return found

    monkeypatch.setattr(bundle, "_listed", then_gone)
    with packed(tmp_path) as one, tarfile.open(one.archive) as tar:
        assert tar.getnames() == ["a.py", "z.py"]


@pytest.mark.parametrize(
    "text", ["job = 1", "from x import job", "from x import *", "if 1:\n  def job(): ...", "import job.y"]
)
def test_a_module_that_may_define_the_job_is_sent(tmp_path: Path, text: str) -> None:
    put(tmp_path, **{"train.py": text})
    assert file_of_module("train:job", tmp_path)[0] == tmp_path / "train.py"


def test_a_module_without_the_job_is_refused(tmp_path: Path) -> None:
    put(tmp_path, **{"train.py": "import x\njib = 'job'"})
    with pytest.raises(InvalidJob, match=r"train.py defines no 'job'"):
        file_of_module("train:job", tmp_path)


def test_elcheignore_counts_more_than_gitignore(tmp_path: Path) -> None:
    files = {".gitignore": "*.bin", ".elcheignore": "!small.bin\nnotebooks/", "small.bin": "", "large.bin": ""}
    put(tmp_path, **files, **{"notebooks/a.ipynb": "", "train.py": ""})
    assert names(tmp_path) == [".elcheignore", ".gitignore", "small.bin", "train.py"]


def test_links_do_not_lead_out_of_the_folder(tmp_path: Path) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "project"
    put(outside, secret="x")
    put(folder, **{"train.py": "", "lib/net.py": "net"})
    (folder / "secret").symlink_to(outside / "secret")
    (folder / "data").symlink_to(outside)
    (folder / "net.py").symlink_to("lib/net.py")
    (folder / "gone").symlink_to("nowhere")
    with packed(folder) as one, tarfile.open(one.archive) as tar:
        assert tar.getnames() == ["net.py", "train.py", "lib/net.py"]
        assert all(info.isreg() for info in tar.getmembers())
        assert one.left_out == (f"data -> {outside}", f"secret -> {outside / 'secret'}")


def test_equal_folders_have_equal_bundles(tmp_path: Path) -> None:
    """Whatever their names, times and owners are; not when a file can be executed in one of them."""
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        put(folder, **{"train.py": "x" * 100_000, "run.sh": "y"})
    os.utime(there / "train.py", (1, 1))
    with packed(here) as one, packed(there) as other:
        assert one.name == other.name
    (there / "run.sh").chmod(0o755)
    with packed(here) as one, packed(there) as other:
        assert one.name != other.name


@pytest.mark.parametrize(
    ("limit", "value", "said"),
    [
        ("MAX_FILES", 2, "2 files"),
        ("MAX_UNPACKED_BYTES", 1 << 20, "1 MiB"),
        ("MAX_ARCHIVE_BYTES", 1 << 20, "1 MiB when"),
    ],
)
def test_a_folder_that_is_too_large_is_said_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: int, said: str
) -> None:
    put(tmp_path, **{"train.py": "", "a": "", "b": ""})
    (tmp_path / "c").write_bytes(os.urandom(2 << 20))
    monkeypatch.setattr(bundle, limit, value)
    with (
        pytest.raises(InvalidJob, match=rf"the folder \S+ has more than {said}.*\.elcheignore.*--folder none"),
        packed(tmp_path),
    ):
        pass


def test_a_folder_that_is_too_deep_is_said_with_what_to_do(tmp_path: Path) -> None:
    """Ranks would not take it."""
    put(tmp_path, **{"train.py": ""})
    (tmp_path / ("d/" * 100)).mkdir(parents=True)
    put(tmp_path / ("d/" * 100), **{"deep.py": ""})
    assert len(names(tmp_path)) == 2
    (tmp_path / ("d/" * 101)).mkdir()
    with pytest.raises(InvalidJob, match=r"is deeper than 100 folders; .*\.elcheignore"), packed(tmp_path):
        pass


def test_what_cannot_be_packed_is_named(tmp_path: Path) -> None:
    put(tmp_path, **{"train.py": ""})
    (tmp_path / os.fsdecode(b"caf\xe9.txt")).write_text("")
    with pytest.raises(InvalidJob, match="is not UTF-8"), packed(tmp_path):
        pass


def test_a_file_is_found_in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ELCHE_FOLDER", raising=False)
    put(tmp_path, **{"project/jobs/train.py": "", "elsewhere.py": ""})
    path = tmp_path / "project/jobs/train.py"
    assert entry_of(path, tmp_path / "project") == "jobs/train.py"
    assert folder_of(path, None) == path.parent
    path.write_text("from .nets import model\n")
    assert folder_of(path, None) == path.parent, "its own package"
    path.write_text("from ..nets import model\n")
    assert folder_of(path, None) == tmp_path.resolve(), "the one around it, too"
    put(tmp_path, **{"project/jobs/__init__.py": "", "project/jobs/nets.py": ""})
    path.write_text("from jobs.nets import model\n")
    assert folder_of(path, None) == (tmp_path / "project").resolve(), "the one that has its package's name"
    assert folder_of(path, "none") is None
    monkeypatch.chdir(path.parent)
    assert folder_of("train.py", "..") == Path("..")
    assert entry_of(Path("train.py"), Path("..")) == "jobs/train.py"
    monkeypatch.setenv("ELCHE_FOLDER", "none")
    assert folder_of(path, None) is None
    with pytest.raises(InvalidJob, match=r"elsewhere\.py is not in the folder"):
        folder_of(tmp_path / "elsewhere.py", tmp_path / "project")
    with pytest.raises(InvalidJob, match="does not exist"):
        folder_of(path, tmp_path / "nowhere")

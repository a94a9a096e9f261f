"""Where the script of a submitted loop is written that was sent without its folder, and how its errors are printed."""

import sys
from pathlib import Path

import pytest
from torch.multiprocessing.spawn import ProcessRaisedException

from elche.errors import Misuse
from elche_worker.rank.script import _written
from elche_worker.session import script as scripts
from elche_worker.session import submitted
from elche_worker.session.launch import Launch
from elche_worker.session.script import run_script
from elche_worker.trainer import checks
from elche_worker.trainer.checks import check_is_main


def written(output: Path, job_id: str, source: str) -> Path:
    launch = Launch(
        coordinator="",
        secret="",
        job_id=job_id,
        rank=0,
        device="cpu",
        label="cpu",
        source=source,
        file_name="/home/anna/loop.py",
        output_dir=str(output),
        is_loop=True,
    )
    return Path(_written(launch))


def test_the_script_overwrites_neither_the_users_files_nor_another_jobs_script(tmp_path: Path) -> None:
    """It was written to OUTPUT_DIR/script/NAME, where a user's own file was replaced."""
    own = tmp_path / "script" / "loop.py"
    own.parent.mkdir()
    own.write_text("own")
    first, second = written(tmp_path, "loop-1", "first"), written(tmp_path, "loop-2", "second")
    assert [one.read_text() for one in (own, first, second)] == ["own", "first", "second"]
    assert first.name == "loop.py"


def test_a_traceback_is_the_scripts_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Eight frames of elche's own and of `runpy` came first, on each rank, and those that had found a misuse last."""
    for name in ("path", "argv", "excepthook"):
        monkeypatch.setattr(sys, name, sys.excepthook if name == "excepthook" else list(getattr(sys, name)))
    script = tmp_path / "train.py"
    misuse = "from elche_worker import Trainer\ntry: main()\nexcept OSError: Trainer.setup(None, None)"
    for rest, lines in (("main()", (3, 2)), (misuse, (5,))):
        script.write_text(f"def main():\n    open('nowhere/best.pt')\n{rest}\n")
        with pytest.raises((FileNotFoundError, Misuse)) as raised:
            run_script(str(script), [], left_alone_code=1)
        raised.value.__context__ = None
        sys.excepthook(raised.type, raised.value, raised.tb)
        files = [line for line in capsys.readouterr().err.splitlines() if line.startswith("  File")]
        assert [line.split(", in ")[0] for line in files] == [f'  File "{script}", line {line}' for line in lines]


@pytest.mark.parametrize(
    ("line", "is_hinted"), [("import mylib", True), ("open('data/x.csv')", True), ("open('/nowhere/x.csv')", False)]
)
def test_a_script_that_lacks_a_file_is_told_that_only_its_folder_was_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str, is_hinted: bool
) -> None:
    """`elche run scripts/train.py` found what is beside `scripts`; `elche submit` said only what is missing."""
    monkeypatch.setattr(submitted, "_launches", [None])
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    script = tmp_path / "train.py"
    script.write_text(line)
    with pytest.raises((FileNotFoundError, ModuleNotFoundError)) as raised:
        run_script(str(script), [], left_alone_code=1)
    sys.excepthook(raised.type, raised.value, raised.tb)
    first, *_, last = capsys.readouterr().err.splitlines()
    assert ("elche submit --folder" in first) == is_hinted
    assert "NotFoundError" in last


def test_a_script_that_spawns_its_ranks_itself_is_told_what_to_write(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ended with "address in use", or trained twice."""
    for name, value in (("ELCHE_RESUME", ""), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    error = ProcessRaisedException("address already in use", 0, 1)
    scripts._print_from_script(type(error), error, None)
    assert capsys.readouterr().err.splitlines()[-1].startswith("elche: the script starts a process for each rank by")
    check_is_main()
    monkeypatch.setattr(checks, "parent_process", object)
    with pytest.raises(Misuse, match="call what it spawns once in each process"):
        check_is_main()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    check_is_main()


@pytest.mark.parametrize(
    ("rank", "size", "local_rank", "local_size", "is_kept"),
    [
        ("1", "2", "1", "2", True),
        ("5", "8", "1", "4", True),
        ("3", "8", "0", "1", True),
        ("0", "1", "0", "1", True),
        ("0", "1", "1", "2", False),
        ("0", "1", "0", "2", False),
        ("0", "2", "1", "2", False),
    ],
)
def test_a_script_that_sets_its_rank_itself_is_told_so(
    monkeypatch: pytest.MonkeyPatch, rank: str, size: str, local_rank: str, local_size: str, is_kept: bool
) -> None:
    """Each of two ranks trained everything alone, and the run succeeded."""
    monkeypatch.setenv("ELCHE_RESUME", "")
    given = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_size}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    if is_kept:
        check_is_main()
    else:
        with pytest.raises(Misuse, match=f"RANK is {rank} and WORLD_SIZE is {size} in process {local_rank} of the 2"):
            check_is_main()


def test_a_scripts_path_is_that_of_its_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint of a script that had changed its working directory had an empty script, and resuming trained
    nothing and succeeded.
    """
    (tmp_path / "outputs").mkdir()
    (tmp_path / "train.py").write_text("import os, sys\nos.chdir('outputs')\nsys.argv[0] = 'other.py'\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(scripts, "_path", "")
    for name in ("path", "argv", "excepthook", "stdin"):
        monkeypatch.setattr(sys, name, list(getattr(sys, name)) if name in ("path", "argv") else getattr(sys, name))
    run_script("train.py", [], left_alone_code=1)
    assert Path.cwd() == tmp_path / "outputs"
    assert scripts.script_path() == tmp_path / "train.py"

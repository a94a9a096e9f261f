"""Hosts and shells as they are found: closed streams, odd names, no home, small folders."""

import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from support.real_processes import Mark

JobFile = Callable[..., Path]


def elche(mark: Mark, folder: Path, words: str, **given: str) -> subprocess.CompletedProcess[str]:
    """What a shell's line does, with `elche` in it."""
    function = f'elche() {{ {shlex.quote(sys.executable)} -m elche_client "$@"; }}'
    return subprocess.run(
        ["sh", "-c", f"{function}; {words}"], cwd=folder, env=mark.environment(given), capture_output=True, text=True,
        timeout=400, check=False,
    )  # fmt: skip


@pytest.mark.long(reason="beside the test below, where all are closed")
@pytest.mark.parametrize("closed", [">&-", "2>&-"])
def test_closed_streams_are_no_files_of_others(mark: Mark, tmp_path: Path, job_file: JobFile, closed: str) -> None:
    """As services and some schedulers start programs. The next file or socket got a stream's number."""
    path = job_file("linear.py")
    done = elche(mark, tmp_path, f"elche run {path} --ranks 2 --epochs 1 --out out {closed}")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "record.json").exists()
    assert "Traceback" not in done.stderr


@pytest.mark.gate
def test_a_run_in_an_empty_environment_with_odd_names_and_closed_streams(
    mark: Mark, tmp_path: Path, job_file: JobFile
) -> None:
    """No home, no user, an encoding that lacks the names' letters, and temporary files too deep for sockets' names."""
    path, folder = job_file("linear.py"), tmp_path / ("long" * 30)
    odd = tmp_path / "-odd näme $x.py"
    odd.write_text(path.read_text())
    folder.mkdir()
    unset = "unset HOME USER LOGNAME PATH"
    done = elche(
        mark, tmp_path, f"{unset}; elche run './-odd näme $x.py' --ranks 2 --epochs 1 --out 'a b ü' <&- >&- 2>&-",
        LC_ALL="C", PYTHONIOENCODING="ascii", PYTHONUTF8="0", TMPDIR=str(folder),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "a b ü" / "record.json").exists()


def test_files_that_may_not_grow_are_one_line(mark: Mark, tmp_path: Path, job_file: JobFile) -> None:
    path = job_file("linear.py")
    done = elche(mark, tmp_path, f"ulimit -f 1; elche run {path} --ranks 2 --out out")
    assert done.returncode == 1, done.stderr
    assert "File too large" in done.stderr
    assert "Traceback" not in done.stderr

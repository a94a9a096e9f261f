"""Commands that a test interrupts while they run: their output goes to a file that it reads meanwhile."""

import subprocess
import sys
from pathlib import Path

from support.real_processes import Mark


def start(mark: Mark, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Starts `elche` in the folder."""
    with (folder / "out").open("w") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "elche_client", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=folder,
            env=mark.environment({"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}),
        )


def text_of(folder: Path) -> str:
    """What the command that was started last in the folder has said so far."""
    return (folder / "out").read_text()

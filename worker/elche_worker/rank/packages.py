"""The packages that a job requires in addition to those of its host: uv installs them once, into a folder of their own.

The host's packages, above all torch, are used as they are. uv is asked what it would install into the agent's
environment with the version of every present package pinned; only that is installed, and its folder comes first in
`sys.path`. Folders are named by the requirements and the host's packages. The least recently used ones are removed when
there are too many.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import distributions
from pathlib import Path
from typing import IO

from elche.errors import ElcheError, InvalidJob
from elche.folders import keep_out
from elche.output import notice

MAX_FOLDERS = 16
"""Most folders of packages that are kept, besides those in use."""
INSTALL_S = 1800.0
"""Limit for an installation, in seconds."""
SHOWN_LINES = 12
"""Lines of uv's error that are shown."""
WOULD = re.compile(r"^ \+ (?P<what>\S+==\S+|\S+ @ .+|\S+)$", re.MULTILINE)
"""A line of uv's dry run: what it would install, as NAME==VERSION or NAME @ ADDRESS."""


def enter_packages(requirements: Sequence[str], cache: Path) -> None:
    """Makes the packages importable, in this process and in those that it starts.

    Raises `InvalidJob` if uv cannot install them beside the host's packages, `ElcheError` if the disk has no room.
    """
    if not requirements:
        return
    found: dict[str, str] = {}
    for one in distributions():  # of duplicate names the first is imported
        if one.name and one.version:
            found.setdefault(_normal(one.name), one.version)
    pins = sorted(f"{name}=={version}" for name, version in found.items())
    key = hashlib.sha256(json.dumps([sorted(requirements), pins, sys.version]).encode()).hexdigest()[:16]
    folder = cache / key
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        keep_out(cache)
        with _lock(folder, ".build", fcntl.LOCK_EX):
            if not folder.is_dir():
                _install(requirements, pins, folder)
            # The time of the last use, by which `_remove_old` chooses.
            os.utime(folder)
            _in_use.append(_lock(folder, ".use", fcntl.LOCK_SH))  # until this process ends
        _remove_old(cache)
    except OSError as error:
        raise ElcheError(f"the job's packages cannot be written to {cache}: {error.strerror}") from error
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))


_in_use: list[IO[str]] = []
"""Locks of folders that this process uses, which keep others from removing them."""


def _lock(folder: Path, kind: str, how: int) -> IO[str]:
    """Takes a lock beside the folder; closing the file releases it."""
    file = folder.with_name(f".{folder.name}{kind}").open("w")
    try:
        fcntl.flock(file, how)
    except BaseException:
        file.close()
        raise
    return file


def _install(requirements: Sequence[str], pins: Sequence[str], folder: Path) -> None:
    """Installs what the host lacks into the folder, which appears complete or not at all."""
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".draft-") as temporary:
        draft, wanted, held = (Path(temporary) / name for name in ("packages", "wanted.txt", "held.txt"))
        wanted.write_text("\n".join(requirements) + "\n")
        held.write_text("\n".join(pins) + "\n")
        asked = _uv("install", "--dry-run", "-r", str(wanted), "-c", str(held))
        given = {_normal(re.split(r"[\s\[<>=!~;@(]", one)[0]): one for one in requirements}
        whats = (match["what"] for match in WOULD.finditer(asked))
        found = [given.get(_normal(what.partition(" ")[0]), what) if " @ " in what else what for what in whats]
        draft.mkdir()
        if found:
            names = ", ".join(what.partition("@")[0].strip() for what in found)  # an address may have a password
            notice(f"installs {names}")
            wanted.write_text("\n".join(found) + "\n")
            _uv("install", "--no-deps", "--target", str(draft), "-r", str(wanted))
        draft.rename(folder)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _uv(*arguments: str) -> str:
    """Runs `uv pip` and returns its output. Raises `InvalidJob` when it fails."""
    try:
        from uv import find_uv_bin

        program = find_uv_bin()
    except (ImportError, FileNotFoundError):
        program = shutil.which("uv") or ""
    if not program:
        raise InvalidJob("the job requires packages, and this host has no uv to install them: pip install uv")
    try:
        done = subprocess.run(
            [program, "pip", *arguments, "--python", sys.executable, "--no-progress", "--color", "never"],
            capture_output=True,
            text=True,
            check=False,
            timeout=INSTALL_S,
        )
    except subprocess.TimeoutExpired:
        raise InvalidJob(f"the packages that the job requires are not installed within {INSTALL_S:.0f} s") from None
    if done.returncode:
        lines = "\n".join(done.stderr.strip().splitlines()[:SHOWN_LINES])
        raise InvalidJob(f"the packages that the job requires cannot be installed beside what this host has:\n{lines}")
    return done.stderr + done.stdout


def _remove_old(cache: Path) -> None:
    """Removes the least recently used folders that no process uses."""
    folders = sorted((one for one in cache.iterdir() if not one.name.startswith(".") and one.is_dir()), key=_used_at)
    for draft in cache.glob(".draft-*"):  # of a process that was killed
        if time.time() - _used_at(draft) > 2 * INSTALL_S:
            shutil.rmtree(draft, ignore_errors=True)
    # Takes both locks: a process that holds `.build` has found the folder and is about to take `.use`.
    now = fcntl.LOCK_EX | fcntl.LOCK_NB
    for folder in folders[: max(0, len(folders) - MAX_FOLDERS)]:
        with suppress(BlockingIOError), _lock(folder, ".build", now), _lock(folder, ".use", now):
            shutil.rmtree(folder, ignore_errors=True)


def _used_at(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except FileNotFoundError:  # another process has removed it
        return 0.0

"""Shows the other ranks of a script on this host, by a locked file, that this one has not exited.

The kernel frees the lock when the process ends, however that is, and forked children do not have it.
"""

import fcntl
import os
from contextlib import suppress
from pathlib import Path
from typing import IO

_held: list[IO[str]] = []
"""The locked file of this process."""
_files: list[str] = []
"""Pattern of the files' paths, for `format`, once this process has one."""


def show_alive(folder: str, job_id: str, rank: int) -> None:
    """Locks this rank's file in a folder that the others see. Where it cannot be written, they only wait."""
    _files[:] = [f"{folder}/.alive-{job_id}-{os.environ.get('MASTER_PORT', '')}-{{}}"]
    path = Path(_files[0].format(rank))
    draft = path.with_name(f"{path.name}.draft")
    with suppress(OSError):
        file = draft.open("w")  # until the process ends
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        draft.rename(path)  # locked before it is seen: without a lock it means that the rank has exited
        _held.append(file)


def has_exited(rank: int) -> bool:
    """True if another rank has locked its file, and has exited."""
    with suppress(OSError, IndexError), Path(_files[0].format(rank)).open("r+") as file:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def remove_own() -> None:
    """Removes this rank's file: the others can see its end in their store."""
    while _held:
        with suppress(OSError):
            Path(_held.pop().name.removesuffix(".draft")).unlink()

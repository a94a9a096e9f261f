"""An agent's name, and the detection of dead agents on this host: each holds the lock of a file in the work folder."""

import fcntl
import os
import secrets
import socket
from contextlib import suppress
from pathlib import Path

from elche.folders import keep_out

FOLDER = "agents"


class AgentIdentity:
    """A new agent's name, with a file that stays locked while its process lives. The kernel releases the lock however
    the process ends, so that no process id, which may be reused, has to be compared.
    """

    def __init__(self, work_dir: Path) -> None:
        self.name = secrets.token_hex(8)
        self.gone: list[str] = []
        """Names of agents that used this folder on this host and were killed, so that they did not report their end."""
        self._file: int | None = None
        # without the file, the coordinator waits longer for this agent's return if it is killed
        with suppress(OSError):
            self._lock(work_dir / FOLDER)

    def _lock(self, folder: Path) -> None:
        """Makes and locks this agent's file; notes the agents of this host whose files are free, and removes these."""
        folder.mkdir(parents=True, exist_ok=True)
        keep_out(folder)
        host = socket.gethostname()
        draft = folder / f"{self.name}.draft"  # renamed once it is locked, since an unlocked one looks dead
        self._file = os.open(draft, os.O_CREAT | os.O_RDWR)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        draft.rename(folder / f"{host}.{self.name}")
        for path in folder.glob(f"{host}.*"):
            name = path.name.removeprefix(f"{host}.")
            if name != self.name and _is_free(path):
                self.gone.append(name)
                path.unlink(missing_ok=True)


def _is_free(path: Path) -> bool:
    """True if nobody holds the file's lock."""
    file = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(file)
    return True

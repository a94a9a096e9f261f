"""Confines ranks: bubblewrap makes each a rootless container, with the kernel's namespaces for users, processes, mounts
and IPC, and with the network and the devices of the host.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from elche.errors import ElcheError

PROGRAM = "bwrap"
TRY_S = 20.0
"""Seconds for the trial of a container at the agent's start."""
HIDDEN = ("/tmp", "/var/tmp", "/run", "/root", "/home")
"""Folders with users' files, sockets of daemons and secrets. They are empty in a rank's container."""
RESOLVER = Path("/etc/resolv.conf")


class CannotConfine(ElcheError):
    """This host cannot make containers for ranks."""


@dataclass(frozen=True, slots=True)
class Confinement:
    """The host's files as ranks see them: read-only, except for `HIDDEN`, the agent's home and `secrets`, which are
    empty, and `writable`. Paths in `readable` and `writable` are visible in hidden folders, too.
    """

    writable: Sequence[Path]
    readable: Sequence[Path] = ()
    secrets: Sequence[Path] = ()

    def command(self) -> list[str]:
        """The bubblewrap command line, which precedes that of a rank."""
        arguments = [PROGRAM, "--die-with-parent", "--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts"]
        arguments += ["--cap-drop", "ALL", "--ro-bind", "/", "/", "--dev-bind", "/dev", "/dev", "--proc", "/proc"]
        hidden = {Path(one).resolve() for one in (*HIDDEN, os.path.expanduser("~")) if Path(one).is_dir()} - {Path("/")}
        for one in sorted(hidden):
            arguments += ["--tmpfs", str(one)]
        seen = [*self.readable, *_own_folders(), *([RESOLVER.resolve()] if RESOLVER.is_symlink() else [])]
        for one in seen:
            place = one.resolve()
            is_hidden = any(place.is_relative_to(other) for other in hidden)
            # not a folder around a hidden one, which it would reveal
            if one.exists() and is_hidden and not any(other.is_relative_to(place) for other in hidden):
                arguments += ["--ro-bind", str(one), str(one)]
        for one in self.writable:
            arguments += ["--bind", str(one), str(one)]
        for one in self.secrets:
            if one.is_dir():
                arguments += ["--tmpfs", str(one)]
            elif one.exists():
                arguments += ["--ro-bind", "/dev/null", str(one)]
        return [*arguments, "--"]

    def check(self) -> None:
        """Raises `CannotConfine` when a container cannot be made here."""
        if shutil.which(PROGRAM) is None:
            raise CannotConfine(f"--confine needs {PROGRAM}, which is not installed here (package bubblewrap)")
        try:
            done = subprocess.run(
                [*self.command(), sys.executable, "-c", "import elche_worker"],
                capture_output=True,
                text=True,
                check=False,
                timeout=TRY_S,
            )
        except subprocess.TimeoutExpired:
            raise CannotConfine(f"--confine: {PROGRAM} does not end within {TRY_S:.0f} s") from None
        if done.returncode:
            lines = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
            raise CannotConfine(f"--confine: a container cannot be made here, user namespaces may be off: {lines[0]}")


def _own_folders() -> list[Path]:
    """Folders of Python and its packages, without the agent's working directory, which may be anybody's."""
    found = [Path(sys.prefix), Path(sys.base_prefix), Path(sys.executable).resolve().parent]
    packages = (Path(one) for one in sys.path if os.path.isabs(one))
    own = Path(__file__).resolve().parents[2]
    return list(dict.fromkeys([*found, *(one for one in packages if one != Path.cwd() or one == own)]))


def host_pid(container: int, inner: int) -> int | None:
    """The host's process id of the process with id `inner` in the container; None when it has ended.

    `container`: the host's process id of bubblewrap, whose child is the container's first process.
    """
    try:
        (first, *_) = Path(f"/proc/{container}/task/{container}/children").read_text().split()
        namespace = os.readlink(f"/proc/{first}/ns/pid")
    except (OSError, ValueError):
        return None
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(folder / "ns" / "pid") != namespace:
                continue
            lines = (folder / "status").read_text().splitlines()
        except OSError:
            continue
        if next((line.split()[-1] for line in lines if line.startswith("NSpid:")), "") == str(inner):
            return int(folder.name)
    return None

"""podman 5, which runs the pods of Kubernetes' manifests: of Debian's next release, unpacked beside this one's."""

import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from support.debian import APT, next_release, run
from support.docker_engine import CACHE as DOCKERS
from support.docker_engine import Engine

CACHE = DOCKERS.with_name("elche-podman")
HERE = ("runc", "conmon", "catatonit", "iptables", "patchelf")
HERE_TOO = ("golang-github-containers-common", "golang-github-containers-image")
PROGRAMS = ("usr/bin/podman", "usr/lib/podman/netavark", "usr/lib/podman/aardvark-dns")
LIBRARIES = ("gpgme.so.11", "assuan.so.9", "gpg-error.so.0", "seccomp.so.2", "sqlite3.so.0", "subid.so.5")
NEXT = ("podman", "netavark", "aardvark-dns", "libc6", "libgpgme11t64", "libassuan9", "libgpg-error0", "libseccomp2")
NEXT_TOO = ("libsqlite3-0", "libsubid5")
ENDED = "{{.Name}} {{.ContainerExitCode}}"

CONFIGURATION = """
[containers]
default_ulimits=["nofile=20000:20000", "nproc=30000:30000"]
[network]
firewall_driver="iptables"
[engine]
helper_binaries_dir=["{files}/usr/lib/podman", "/usr/libexec/podman"]
conmon_path=["/usr/bin/conmon"]
runtime="runc"
cgroup_manager="cgroupfs"
events_logger="file"
"""


@dataclass(frozen=True, slots=True)
class Podman:
    """The command, with images and volumes of its own."""

    def __call__(self, *arguments: str, is_needed: bool = True, stdin: str | None = None, limit_s: float = 400) -> str:
        """What it printed on stdout, or of logs in all. One that fails raises `AssertionError` with what it said."""
        places = [part for name in ("root", "runroot", "tmpdir") for part in (f"--{name}", str(CACHE / name))]
        done = subprocess.run(
            [str(CACHE / "files/usr/bin/podman"), *places, *arguments],
            env={
                **os.environ,
                "CONTAINERS_CONF": str(CACHE / "containers.conf"),
                "PODMAN_IGNORE_CGROUPSV1_WARNING": "1",
            },
            input=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if "logs" in arguments else subprocess.PIPE,
            text=True,
            check=False,
            timeout=limit_s,
        )
        assert not is_needed or done.returncode == 0, f"podman {' '.join(arguments)}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def load(self, engine: Engine, name: str) -> None:
        """Takes over an image of the docker engine, unless it has it."""
        id = engine.docker("image", "inspect", "--format", "{{.Id}}", name)
        if f"sha256:{self('image', 'inspect', '--format', '{{.Id}}', name, is_needed=False)}" == id:
            return
        saved = CACHE / "image.tar"
        engine.docker("save", "--output", str(saved), name)
        self("load", "--quiet", "--input", str(saved))
        saved.unlink()

    def ends_since(self, at_s: float) -> list[tuple[str, int]]:
        """The names and exit codes of containers that have ended since, in order; some have been started again."""
        told = self("events", "--stream=false", "--since", f"{at_s:.3f}", "--filter", "event=died", "--format", ENDED)
        return [(name, int(code)) for name, code in map(str.split, told.splitlines())]


@contextmanager
def podman() -> Iterator[Podman]:
    """The command. Tests beside this one wait."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _install()
        yield Podman()


def _install() -> None:
    if not all(map(shutil.which, HERE[:-1])) or not Path("/etc/containers/policy.json").exists():
        run(*APT, "update")
        run(*APT, "install", "--no-install-recommends", *HERE, *HERE_TOO)
    if (CACHE / "containers.conf").exists():
        return
    files = next_release(CACHE, *NEXT, *NEXT_TOO)
    (libraries,) = (files / "usr/lib").glob("*-linux-gnu")
    (loader,) = libraries.glob("ld-linux-*.so.*")
    path = f"{libraries}:/usr/lib/{libraries.name}"
    for name in PROGRAMS:
        run("patchelf", "--set-interpreter", str(loader), "--set-rpath", path, str(files / name))
    for name in LIBRARIES:
        run("patchelf", "--set-rpath", str(libraries), str((libraries / f"lib{name}").resolve()))
    (CACHE / "containers.conf").write_text(CONFIGURATION.format(files=files))

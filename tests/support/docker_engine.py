"""A docker engine with compose for the tests: the machine's, or one of our own with base images made from Debian's."""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from support.debian import APT, next_release, run

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "elche-docker"
"""The engine's images, and what was downloaded for it: the second run is quick."""
START_S = 60
BUILD_S = 1000
"""A hang: on a busy machine images have taken longer than other commands may."""

ROOT = Path(__file__).parents[2]
WHEELS = "127.0.0.1:7719"  # fixed: an image's layer is known by the arguments that it was built with
PYTHON = "python:3.11-slim"
HEADERS = "elche.python-headers"
"""Label of a stand-in for that image with Python's headers, which it has as well."""
PROMETHEUS = "prom/prometheus:v3.5.0"
CERTIFICATES = "/usr/local/share/ca-certificates"


@dataclass(frozen=True, slots=True)
class Engine:
    """Where docker is reached. A command that fails raises `AssertionError` with what it said."""

    environment: Mapping[str, str] = field(default_factory=dict)

    def docker(self, *arguments: str, is_needed: bool = True, stdin: str | None = None, limit_s: float = 300) -> str:
        """What the command printed on stdout."""
        done = subprocess.run(
            ["docker", *arguments],
            env={**os.environ, **self.environment},
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
            timeout=limit_s,
        )
        assert not is_needed or done.returncode == 0, f"docker {' '.join(arguments)}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def answers(self) -> bool:
        """Whether there is an engine, and compose."""
        if shutil.which("docker") is None:
            return False
        try:
            self.docker("info", limit_s=400)
            self.docker("compose", "version")
        except (AssertionError, subprocess.TimeoutExpired):
            return False
        return True

    def has_image(self, name: str, label: str = "") -> bool:
        labelled = ("--filter", f"label={label}") if label else ()
        return bool(self.docker("image", "ls", "--quiet", *labelled, name))


@contextmanager
def docker_engine() -> Iterator[Engine]:
    """The engine that runs here; else one of our own, which ends with the context. Tests beside this one wait."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield from _docker_engine()


def _docker_engine() -> Iterator[Engine]:
    if Engine().answers():
        yield Engine()
        return
    _install()
    engine = Engine({"DOCKER_HOST": f"unix://{CACHE}/docker.sock", "DOCKER_CONFIG": str(CACHE / "config")})
    try:
        if not engine.answers():
            _start(engine)
        _make_base_images(engine)
        yield engine
        engine.docker("image", "prune", "--force")  # what newer builds have replaced
    finally:
        _stop()


@contextmanager
def wheels() -> Iterator[str]:
    """The URL of a page with the torch that the tests run with: its CPU build."""
    folder = CACHE / "wheels"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    subprocess.run([*pip, f"torch=={version('torch').partition('+')[0]}"], check=True)
    host, port = WHEELS.split(":")
    serve = [sys.executable, "-m", "http.server", "--bind", host, "--directory", str(folder), port]
    with subprocess.Popen(serve, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield f"http://{WHEELS}"
        finally:
            process.terminate()


def build_images(engine: Engine) -> tuple[str, ...]:
    """The coordinator's and the worker's, as `docker build` makes them; their names."""
    names = {"elche-test-coordinator": "coordinator", "elche-test-worker": "worker"}
    with wheels() as url:
        for name, file in names.items():
            dockerfile = f"docker/{file}.Dockerfile"
            # As compose builds it: so that one image is enough.
            of_worker = ("--build-arg", f"PIP_FIND_LINKS={url}", "--build-arg", "LIBRARIES=scikit-learn")
            arguments = () if file == "coordinator" else of_worker
            build = ("build", "--network", "host", "--tag", name, "--file", str(ROOT / dockerfile), *arguments)
            engine.docker(*build, str(ROOT), limit_s=BUILD_S)
    return tuple(names)


def _install() -> None:
    """Debian's engine, and compose and buildx from its next release: they are single files."""
    if not all(map(shutil.which, ("dockerd", "mmdebstrap", "iptables"))):
        run(*APT, "update")
        run(*APT, "install", "--no-install-recommends", "docker.io", "mmdebstrap", "iptables")
    plugins = CACHE / "config" / "cli-plugins"
    if plugins.exists():
        return
    files = next_release(CACHE / "packages", "docker-compose", "docker-buildx")
    plugins.parent.mkdir(exist_ok=True)
    (files / "usr/libexec/docker/cli-plugins").rename(plugins)
    shutil.rmtree(CACHE / "packages")


def _start(engine: Engine) -> None:
    command = ["dockerd", "--host", engine.environment["DOCKER_HOST"], "--pidfile", str(CACHE / "docker.pid")]
    command += ["--data-root", str(CACHE / "data"), "--exec-root", str(CACHE / "exec"), "--storage-driver=overlay2"]
    command += ["--iptables=false", "--ip6tables=false", "--ip-forward=false", "--ip-masq=false"]
    with (CACHE / "dockerd.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    end_s = time.monotonic() + START_S
    while not engine.answers():
        is_in_time = process.poll() is None and time.monotonic() < end_s
        assert is_in_time, (CACHE / "dockerd.log").read_text()[-2000:]
        time.sleep(0.2)


def _stop() -> None:
    """Ends our engine, and waits until it is gone."""
    with suppress(FileNotFoundError, ProcessLookupError):
        pid = int((CACHE / "docker.pid").read_text())
        os.kill(pid, signal.SIGTERM)
        while Path(f"/proc/{pid}").exists():
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
            time.sleep(0.1)
    subprocess.run(["ip", "link", "delete", "docker0"], capture_output=True, check=False)


def _make_base_images(engine: Engine) -> None:
    """Stand-ins under the names that the Dockerfiles and compose files have, so that these are used unchanged."""
    if not engine.has_image(PYTHON, HEADERS):
        hooks = [
            'rm -f "$1"/usr/lib/python3.11/EXTERNALLY-MANAGED; ln -s python3 "$1"/usr/bin/python',
            f'cp {CERTIFICATES}/*.crt "$1"{CERTIFICATES}/ 2>/dev/null && chroot "$1" update-ca-certificates || true',
            'cd "$1"/tmp && APT_CONFIG="$MMDEBSTRAP_APT_CONFIG" apt-get download libpython3.11-dev '
            '&& dpkg-deb -x libpython3.11-dev*.deb all && cp -a all/usr/include/. "$1"/usr/include/ && rm -r all *.deb',
            'cd "$1"/usr; rm -rf share/doc share/man share/locale share/perl lib/*/perl lib/*/gconv',
            'find "$1"/usr -name __pycache__ -prune -exec rm -r {} +',  # as small as the image that it stands in for
        ]
        debian = [
            "mmdebstrap",
            "--quiet",
            "--mode=root",
            "--variant=minbase",
            "--dpkgopt=path-exclude=/usr/share/doc/*",
        ]
        debian += [
            "--include=python3,python3-pip,ca-certificates",
            *(f"--customize-hook={hook}" for hook in hooks),
        ]
        run(*debian, "bookworm", str(CACHE / "python.tar"))
        settings = (
            "ENV PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin",
            "ENV LANG=C.UTF-8",
            f"LABEL {HEADERS}=yes",
        )
        settings += ("ENV PIP_CERT=/etc/ssl/certs/ca-certificates.crt", 'CMD ["python3"]')
        changes = [part for setting in settings for part in ("-c", setting)]
        engine.docker("import", *changes, str(CACHE / "python.tar"), PYTHON)
        (CACHE / "python.tar").unlink()
    if not engine.has_image(PROMETHEUS):
        dockerfile = (
            f"FROM {PYTHON}\n"
            "RUN apt-get update -q && apt-get install -q -y --no-install-recommends prometheus\n"
            "RUN install -d -o nobody /prometheus\n"
            'USER nobody\nENTRYPOINT ["prometheus"]\n'
        )
        engine.docker("build", "--network=host", "--tag", PROMETHEUS, "-", stdin=dockerfile)

"""elche's programs as benchmarks run them: a coordinator and agents, which end with the benchmark, and `elche run`."""

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

TICKS = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def elche_run(
    path: Path | str, *options: str, environment: Mapping[str, str] | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The result of `elche run` of a file, and its record. Raises `SystemExit` when it fails."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        command = [sys.executable, "-m", "elche_client", "run", str(path), *options, "--json", "--out", str(out)]
        env = {**os.environ, **(environment or {})}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
        record = json.loads((out / "record.json").read_text())
    return json.loads(done.stdout.splitlines()[-1]), record


def start_coordinator(
    folder: Path, *options: str, listen: str = "127.0.0.1:0", environment: Mapping[str, str] = MappingProxyType({})
) -> "tuple[subprocess.Popen[str], str]":
    """A coordinator on the folder, and its HOST:PORT; returns once it listens."""
    command = [sys.executable, "-m", "elche_coordinator", "--listen", listen, "--http", "127.0.0.1:0"]
    command += ["--data", str(folder / "data"), "--exit-with-stdin", *options]
    pipe = subprocess.PIPE
    with (folder / "coordinator.log").open("a") as log:
        env = {**os.environ, **environment}
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, text=True, env=env)
    assert process.stdout is not None
    return process, process.stdout.readline().split()[-1]


def start_agent(
    folder: Path,
    coordinator: str,
    devices: str,
    *,
    name: str = "work",
    environment: Mapping[str, str] = MappingProxyType({}),
) -> "subprocess.Popen[bytes]":
    """An agent that offers devices, such as "cpu,cpu", with its jobs in the folder `name`; it leads its own session."""
    command = [sys.executable, "-m", "elche_worker.agent", "--coordinator", coordinator, "--devices", devices]
    command += ["--work-dir", str(folder / name), "--exit-with-stdin"]
    with (folder / f"{name}.log").open("a") as log:
        env = {**os.environ, **environment}
        return subprocess.Popen(command, stdin=subprocess.PIPE, stderr=log, start_new_session=True, env=env)


def end(*processes: "subprocess.Popen[Any]") -> None:
    """Kills processes, and waits for their end."""
    for process in processes:
        process.kill()
        process.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


def processor_s(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES


def spread(values: Sequence[float | None]) -> dict[str, float]:
    """Median and worst in seconds, and how many are None, if any is."""
    known = [one for one in values if one is not None]
    figures = {"median_s": round(median(known), 3), "worst_s": round(max(known), 3)} if known else {}
    return figures | ({"missing": len(values) - len(known)} if None in values else {})

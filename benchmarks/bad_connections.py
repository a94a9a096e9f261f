"""Trains real jobs whose connections to the coordinator break in every way, and whose processes are stopped and killed.

For each seed: a coordinator, one or two workers, each behind a proxy, and one or two jobs with settings at random.
Then, for some seconds, faults at random moments; then none. Each job must succeed within `QUIET_S`, with every sample
once (the coordinator's count, and `elche audit`), and leave no process. Prints a line for each seed; exits with 1, and
keeps the folder, if one has a problem.

    python benchmarks/bad_connections.py --seeds 20
    python benchmarks/bad_connections.py --first 18 --seeds 1 --what cut,hole,kill
"""

import argparse
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from programs import free_port

import elche_audit
from elche.errors import ElcheError
from elche_client import Client, JobHandle
from elche_client.events import JobResult, JobState

MARK = "BAD_CONNECTIONS"
"""Environment variable by which the processes of a seed are found."""
QUIET_S = 90.0
NUM_SAMPLES = 960
FAULTS: dict[str, tuple[str, ...]] = {
    "cut": ("cut", "cut_all", "refuse"),
    "bytes": ("bytes",),
    "hole": ("stall", "hole"),
    "stop": ("stop_rank", "stop_worker", "stop_coordinator"),
    "kill": ("kill_rank", "kill_worker", "kill_coordinator"),
    "act": ("scale", "drain", "pause", "checkpoint"),
}
"""What `--what` names."""
JOB = """
import os, time
from pathlib import Path

import torch
from torch import nn
from elche_worker import TrainingJob

HURRY = Path(__file__).with_name("hurry")


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.counts = nn.Parameter(torch.zeros(960))


def train_step(model, batch):
    if not HURRY.exists():
        time.sleep(float(os.environ["BATCH_S"]))
    return -model.counts[batch].sum()


job = TrainingJob(
    model=Counts,
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1.0),
    dataset=lambda: list(range(960)),
    train_step=train_step,
    batch_size=16,
    epochs=8,
    merge="mean",
)
"""


class Connection:
    """One connection through a proxy."""

    def __init__(self, inner: socket.socket, outer: socket.socket) -> None:
        self.ends = inner, outer
        self.passes = threading.Event()
        """Cleared while nothing goes through."""
        self.passes.set()
        self._mean_bytes = self._left = 0

    def allowed(self, num_bytes: int, mean_bytes: int) -> int:
        """How many of these bytes may go through, of a limit that is drawn once for both directions; 0 is no limit."""
        if mean_bytes != self._mean_bytes:
            self._left = int(random.expovariate(1 / mean_bytes)) if mean_bytes else 0
            self._mean_bytes = mean_bytes
        if not mean_bytes:
            return num_bytes
        passed = min(num_bytes, self._left)
        self._left -= passed
        return passed

    def cut(self) -> None:
        self.passes.set()
        for end in self.ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class Proxy:
    """A way to the coordinator that can be cut, blocked, closed, or let only so many bytes through."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self.refuses = False
        self.mean_bytes = 0
        """Bytes after which a connection dies, on average; 0: none does."""
        self._connections: list[Connection] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def some(self, dice: random.Random) -> list[Connection]:
        """Half of the connections, one at least."""
        there = list(self._connections)
        return [one for one in there if dice.random() < 0.5] or there[:1]

    def cut_all(self) -> None:
        for one in list(self._connections):
            one.cut()

    def close(self) -> None:
        self._server.close()
        self.cut_all()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                inner, _ = self._server.accept()
                try:
                    outer = socket.create_connection(("127.0.0.1", self._port))
                except OSError:
                    inner.close()
                    continue
                connection = Connection(inner, outer)
                if self.refuses:
                    connection.cut()
                    continue
                self._connections.append(connection)
                for pair in ((inner, outer), (outer, inner)):
                    threading.Thread(target=self._forward, args=(connection, *pair), daemon=True).start()

    def _forward(self, connection: Connection, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                connection.passes.wait()
                passed = connection.allowed(len(data), self.mean_bytes)
                target.sendall(data[:passed])
                if passed < len(data):
                    break
        connection.cut()
        with suppress(ValueError):
            self._connections.remove(connection)


class World:
    """The processes of one seed, and what happens to them."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.dice = random.Random(seed)
        self.folder = folder
        self._mark = f"{os.getpid()}-{seed}"
        self.port = free_port()
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._undo: list[tuple[float, Callable[[], object]]] = []
        """What ends a fault, and when."""
        self.start("coordinator")
        self._proxies: dict[str, Proxy] = {}
        for number in range(self.dice.choice([1, 2])):
            self._proxies[f"worker-{number}"] = Proxy(self.port)
            self.start(f"worker-{number}")
        self.paused: set[str] = set()

    def start(self, name: str) -> None:
        place = self.folder / name
        place.mkdir(exist_ok=True)
        if name == "coordinator":
            own = ["elche_coordinator", "--listen", f"127.0.0.1:{self.port}", "--http", "off", "--data", str(place)]
        else:
            address, devices = self._proxies[name].address, ",".join(["cpu"] * 3)
            own = ["elche_worker.agent", "--coordinator", address, "--devices", devices, "--work-dir", str(place)]
        env = {**os.environ, MARK: self._mark, "OMP_NUM_THREADS": "1"}
        with (self.folder / f"{name}.log").open("ab") as log:
            self._daemons[name] = subprocess.Popen([sys.executable, "-m", *own], stdout=log, stderr=log, env=env)

    def _processes(self) -> Iterator[tuple[int, bytes]]:
        """Process id and command line of each process of this seed."""
        for place in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if f"{MARK}={self._mark}".encode() in (place / "environ").read_bytes().split(b"\0"):
                    yield int(place.name), (place / "cmdline").read_bytes()

    def ranks(self) -> list[int]:
        """Process ids of living ranks."""
        return sorted(pid for pid, command in self._processes() if command.startswith(b"elche rank"))

    def end_due(self, now_s: float) -> None:
        """Ends the faults that have lasted long enough."""
        due = [one for one in self._undo if one[0] <= now_s]
        self._undo = [one for one in self._undo if one[0] > now_s]
        for _, end in due:
            with suppress(OSError, ElcheError):
                end()

    def fault(self, kind: str, client: Client, jobs: list[JobHandle]) -> None:
        dice, proxy = self.dice, self.dice.choice(list(self._proxies.values()))
        until_s = time.monotonic() + dice.choice([dice.uniform(0.2, 2), dice.uniform(1, 14)])
        match kind.split("_"):
            case ["cut"]:
                for one in proxy.some(dice):
                    one.cut()
            case ["cut", "all"]:
                for proxy in self._proxies.values():
                    proxy.cut_all()
            case ["refuse"]:
                proxy.refuses = True
                proxy.cut_all()
                self._undo.append((until_s, lambda: setattr(proxy, "refuses", False)))
            case ["bytes"]:
                proxy.mean_bytes = dice.choice([300, 3000, 30_000])
                self._undo.append((until_s, lambda: setattr(proxy, "mean_bytes", 0)))
            case ["stall" | "hole"]:
                for one in proxy.some(dice):
                    one.passes.clear()
                    if kind == "stall":
                        self._undo.append((until_s, one.passes.set))
            case [verb, what]:
                self._hit(verb, what, until_s)
            case _:
                self._act(kind, client, dice.choice(jobs), until_s)

    def _hit(self, verb: str, what: str, until_s: float) -> None:
        """Stops or kills a process, if there is one. A daemon that was killed is started again."""
        names = [name for name in self._daemons if name.startswith(what)]
        name = self.dice.choice(names) if names else ""
        pids = self.ranks() if what == "rank" else [self._daemons[name].pid] if name else []
        if not pids:
            return
        pid = self.dice.choice(pids)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP if verb == "stop" else signal.SIGKILL)
        if verb == "stop":
            self._undo.append((until_s, lambda: os.kill(pid, signal.SIGCONT)))
        elif name:
            self._daemons[name].wait()
            self._undo.append((time.monotonic() + self.dice.uniform(0, 4), lambda: self.start(name)))
            del self._daemons[name]

    def _act(self, kind: str, client: Client, job: JobHandle, until_s: float) -> None:
        """What people do meanwhile."""
        with suppress(ElcheError):
            if kind == "scale":
                client.scale(job.id, self.dice.randint(1, 3))
            elif kind == "checkpoint":
                client.checkpoint(job.id)
            elif kind == "pause":
                self.paused.add(job.id)
                client.pause(job.id)
                self._undo.append((until_s, lambda: client.pause(job.id, is_paused=False)))
            elif hosts := client.hosts():
                name = self.dice.choice(hosts).agent_id
                client.drain(name)
                self._undo.append((until_s, lambda: client.drain(name, is_drained=False)))

    def end_acts(self, client: Client) -> None:
        """Lets all go on, whose end a fault may have kept from the coordinator."""
        for job_id in self.paused:
            with suppress(ElcheError):
                client.pause(job_id, is_paused=False)
        with suppress(ElcheError):
            for host in client.hosts():
                if host.is_drained:
                    client.drain(host.agent_id, is_drained=False)

    def close(self) -> None:
        for one in self._proxies.values():
            one.close()
        for pid, _ in self._processes():
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def settings(dice: random.Random) -> dict[str, Any]:
    policy = dice.choice(["cadence", "cadence", "sync", "async"])
    return {
        "policy": policy,
        "averaging": "blocking" if policy == "sync" else dice.choice(["blocking", "overlapped"]),
        "backend": dice.choice(["cpu", "cpu", "gloo"]),
        "epochs": dice.choice([2, 4, 8]),
        "checkpoint_every_epochs": dice.choice([None, 1]),
        "ride_out_s": dice.choice([10.0, 2.0]),
        "num_ranks": dice.choice([2, 3]),
        "min_ranks": 1,
        "audit": True,
    }


def is_ready(client: Client) -> bool:
    """True once the coordinator answers, and has a worker."""
    with suppress(ElcheError):
        return bool(client.hosts())
    return False


def result_of(client: Client, job: JobHandle) -> JobResult | None:
    """None while the job goes on, or nobody answers."""
    with suppress(ElcheError):
        if client.get(job.id).state.has_ended:
            return next(event for event in client.watch(job.id) if isinstance(event, JobResult))
    return None


def problem_of(job: JobHandle, result: JobResult | None, num_epochs: int, folder: Path) -> str:
    """What is wrong with a job that should have succeeded; empty: nothing."""
    if result is None:
        return f"{job.id} has not ended"
    if result.state is not JobState.SUCCEEDED:
        return f"{job.id} {result.state}: {result.error}"
    if result.committed_samples != (NUM_SAMPLES,) * num_epochs:
        return f"{job.id} has samples {result.committed_samples}"
    verdict = elche_audit.judge(*sorted(one.parent for one in folder.glob(f"worker-*/{job.id}/audit")))
    return f"{job.id}: {elche_audit.lines(verdict)}" if elche_audit.exit_code(verdict) else ""


def problems_of(seed: int, kinds: list[str], folder: Path) -> list[str]:
    """Runs one seed."""
    world = World(seed, folder)
    dice, path = world.dice, folder / "job.py"
    path.write_text(JOB)
    try:
        with Client(f"127.0.0.1:{world.port}", token="", reconnect_s=120) as client:
            limit_s = time.monotonic() + QUIET_S
            while not is_ready(client):
                if time.monotonic() > limit_s:
                    return ["no worker attends"]
                time.sleep(0.1)
            wanted = [settings(dice) for _ in range(dice.choice([1, 2]))]
            env = {"BATCH_S": str(dice.choice([0.003, 0.01, 0.03]))}
            jobs = [client.submit(path, environment=env, **one) for one in wanted]
            end_s, every_s = time.monotonic() + dice.uniform(6, 25), dice.choice([0.1, 0.3, 1.0])
            while time.monotonic() < end_s:
                time.sleep(dice.expovariate(1 / every_s))
                world.end_due(time.monotonic())
                world.fault(dice.choice(kinds), client, jobs)
            path.with_name("hurry").touch()
            limit_s, results = time.monotonic() + QUIET_S, [None for _ in jobs]
            while time.monotonic() < limit_s and None in results:
                time.sleep(0.1)
                world.end_due(time.monotonic())
                world.end_acts(client)
                results = [result_of(client, job) for job in jobs]
            ended = zip(jobs, results, wanted, strict=True)
            found = [problem_of(job, result, one["epochs"], folder) for job, result, one in ended]
            while not any(found) and world.ranks() and time.monotonic() < limit_s + QUIET_S:
                time.sleep(0.1)
            return [*filter(None, found), *(f"process {pid} is left" for pid in world.ranks() if not any(found))]
    finally:
        world.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--what", default=",".join(FAULTS), help=f"of {', '.join(FAULTS)}")
    given = parser.parse_args()
    kinds = [kind for name in given.what.split(",") for kind in FAULTS[name]]
    num_bad = 0
    for seed in range(given.first, given.first + given.seeds):
        folder, began_s = Path(tempfile.mkdtemp(prefix=f"bad-connections-{seed}-")), time.monotonic()
        problems = problems_of(seed, kinds, folder)
        num_bad += bool(problems)
        print(f"seed {seed}: {time.monotonic() - began_s:.0f} s, {problems or 'well'}", flush=True)
        if problems:
            print(f"  kept: {folder}", flush=True)
        else:
            shutil.rmtree(folder)
    print(f"{given.seeds} seeds, {num_bad} bad")
    sys.exit(bool(num_bad))


if __name__ == "__main__":
    main()

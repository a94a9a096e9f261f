"""Runs a job on a Ray cluster from a script: starts agents, trains the job, and stops the agents."""

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from elche.errors import ElcheError
from elche.token import FILE_VARIABLE, read_token
from elche_client.client import Client
from elche_client.events import JobResult
from elche_client.launchers import AgentFleet
from elche_client.launchers.ray import Ray
from elche_client.transport.contexts import tls_of

__all__ = ["Scaling", "run"]

LISTENING = "elche-coordinator listening on "


@dataclass(frozen=True, slots=True)
class Scaling:
    """The agents of a job."""

    num_agents: int = 1
    gpus_per_agent: int = 0
    """GPUs per agent; 0: each is one rank on a CPU."""

    @property
    def num_ranks(self) -> int:
        return self.num_agents * max(1, self.gpus_per_agent)


def run(
    path: str | Path,
    scaling: Scaling = Scaling(),
    *,
    address: str = "",
    coordinator: str = "",
    agent_token_file: str = "",
    worker: str = f"{sys.executable} -m elche_worker.agent",
    **options: Any,
) -> JobResult:
    """Trains the job of a file on agents of its own, and returns its result.

    `address` is that of the Ray cluster, by default RAY_ADDRESS or that of this machine. `coordinator` is HOST:PORT of
    one that runs outside; ELCHE_TOKEN_FILE names a token of the role user for it, and `agent_token_file` one of the
    role agent, by default the same one. Without `coordinator` one is started here, and ends with this call: use one
    outside when the job should outlast this process. `worker` is the command that is an agent on the nodes, by default
    this Python's, which must be there too. `options` are those of `Client.submit`. The job goes on with the agents that
    are left when Ray loses some, and takes in those that come back. Raises `JobFailed`, and other `ElcheError`s.
    """
    with ExitStack() as stack:
        ray = Ray(address)
        token_file, token = agent_token_file or os.environ.get(FILE_VARIABLE, ""), None
        if not coordinator:
            coordinator, token_file = stack.enter_context(_coordinator(ray.host()))
            token, tls = read_token({FILE_VARIABLE: token_file}), ""
        else:
            tls = tls_of(coordinator)
        fleet = AgentFleet(
            name=f"run-{secrets.token_hex(3)}",
            num_agents=scaling.num_agents,
            gpus_per_agent=scaling.gpus_per_agent,
            coordinator=coordinator,
            worker=worker if scaling.gpus_per_agent else f"{worker} --devices cpu",
            token_file=token_file,
            tls=tls,
        )
        client = stack.enter_context(Client(coordinator, token=token, tls=tls))
        # Before `up`: it also ends agents of a fleet that is started in part.
        stack.callback(ray.down, fleet.name)
        ray.up(fleet)
        wanted = {"num_ranks": scaling.num_ranks, "min_ranks": 1, **options}
        job = client.submit(path, **wanted)
        try:
            return job.result()
        except KeyboardInterrupt:
            job.cancel()
            raise


@contextmanager
def _coordinator(host: str) -> Iterator[tuple[str, str]]:
    """Context with a coordinator on an address that the cluster's nodes reach: its HOST:PORT, and its token's file."""
    with TemporaryDirectory(prefix="elche-ray-") as folder:
        file = Path(folder, "token")
        # Closed to others before it has anything that they could read.
        file.touch(mode=0o600)
        file.write_text(secrets.token_urlsafe(32), encoding="utf-8")
        arguments = ["--listen", f"{host}:0", "--http", "off", "--data", folder, "--grace", "0", "--exit-with-stdin"]
        # Without this process's own settings, such as its token or certificates for another coordinator.
        environment = {name: text for name, text in os.environ.items() if not name.startswith("ELCHE_")}
        with (
            Path(folder, "log").open("w") as log,
            subprocess.Popen(
                [sys.executable, "-m", "elche_coordinator", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment | {FILE_VARIABLE: str(file)},
            ) as process,
        ):
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line.startswith(LISTENING):
                raise ElcheError(f"the coordinator did not start: {Path(folder, 'log').read_text()[-500:]}")
            try:
                yield line.removeprefix(LISTENING).split()[0], str(file)
            finally:
                process.terminate()

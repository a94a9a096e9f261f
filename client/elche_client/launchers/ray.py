"""Agents as detached actors of a Ray cluster, which Ray restarts wherever there is room.

They are in no placement group: with one for all, none could begin before all can, and Ray advises against groups for
detached actors that are restarted.
"""

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from elche.artifacts import reason_of
from elche.network import BadAddress, split_address
from elche_client.launchers.fleet import AgentFleet, AgentState, BadFleet, FleetAgent

NAMESPACE = "elche"
CPUS = 1
LEAVE_S = 35.0
"""Seconds for an agent to leave: its own 25 s (`--grace`), and a margin."""
ANSWER_S = 2.0
"""Seconds for a running agent to answer."""
CONNECT_S = 5.0
AGAIN_S = 5.0
"""Seconds before an agent that has ended is restarted."""


class Ray:
    """The cluster at an address such as `auto` or ray://head:10001; empty: the one that RAY_ADDRESS names, or of this
    machine.
    """

    def __init__(self, address: str = "") -> None:
        """Raises `BadFleet` if Ray is not installed or cannot be reached."""
        try:
            import ray
        except ImportError:
            raise BadFleet("Ray is not installed here: pip install 'elche[ray]'") from None
        self._ray: Any = ray
        if not ray.is_initialized():
            place = address or os.environ.get("RAY_ADDRESS") or "auto"
            try:
                if place != "auto":  # Ray itself would report a wrong address only after minutes
                    socket.create_connection(split_address(place.removeprefix("ray://")), timeout=CONNECT_S).close()
                ray.init(place, namespace=NAMESPACE, log_to_driver=False)
            except (OSError, RuntimeError, ValueError, BadAddress) as error:
                raise BadFleet(f"no Ray cluster is reached at {place}: {error}") from None

    def host(self) -> str:
        """This machine's address for the cluster's nodes."""
        return str(self._ray.util.get_node_ip_address())

    def up(self, fleet: AgentFleet) -> None:
        if fleet.num_agents is None:
            raise BadFleet("say how many: elche up --on ray --agents 4")
        names = self._names(fleet.name)
        lacking = max(0, fleet.num_agents - len(names))
        number = 0
        while lacking:
            if (name := f"{fleet.name}-{number}") not in names:
                self._start(name, fleet)
                lacking -= 1
            number += 1
        self._leave(sorted(names, key=_number)[fleet.num_agents :])

    def _start(self, name: str, fleet: AgentFleet) -> None:
        self._ray.remote(AgentActor).options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",
            max_restarts=-1,
            # Ray runs an actor's methods one after the other: beside `leave`, which waits, `host` would have no answer.
            max_concurrency=2,
            num_cpus=CPUS,
            num_gpus=fleet.gpus_per_agent,
            scheduling_strategy="SPREAD",
        ).remote(fleet.command, _files(fleet))

    def members(self, name: str) -> list[FleetAgent]:
        actors = self._actors(sorted(self._names(name), key=_number))
        asked = {one: actor.host.remote() for one, actor in actors.items()}
        ready, _ = self._ray.wait([*asked.values()], num_returns=len(asked), timeout=ANSWER_S) if asked else ([], [])
        return [
            FleetAgent(one, AgentState.RUNNING, self._ray.get(answer))
            if answer in ready
            else FleetAgent(one, AgentState.WAITING, why="Ray has no room for it, or starts it")
            for one, answer in asked.items()
        ]

    def down(self, name: str) -> None:
        self._leave(self._names(name))

    def _names(self, fleet: str) -> list[str]:
        known = self._ray.util.list_named_actors(all_namespaces=True)
        return [
            one["name"] for one in known if one["namespace"] == NAMESPACE and one["name"].rpartition("-")[0] == fleet
        ]

    def _actors(self, names: Iterable[str]) -> dict[str, Any]:
        """The actors' handles by name, without those that have died since they were listed."""
        found = {}
        for name in names:
            with suppress(ValueError):
                found[name] = self._ray.get_actor(name, namespace=NAMESPACE)
        return found

    def _leave(self, names: list[str]) -> None:
        """Has the agents leave, all at once, and ends their actors."""
        handles = [*self._actors(names).values()]
        asked = [handle.leave.remote() for handle in handles]
        if asked:
            self._ray.wait(asked, num_returns=len(asked), timeout=LEAVE_S)
        for handle in handles:
            self._ray.kill(handle, no_restart=True)


class AgentActor:
    """The actor: an agent is its child, and ends with it."""

    def __init__(self, command: str, files: Mapping[str, str]) -> None:
        """`files`: contents by the environment variable that names the file; those of a folder have its name first."""
        folder = Path(tempfile.mkdtemp(prefix="elche-"))
        variables = {}
        for name, content in files.items():
            variable, _, file = name.partition("/")
            path = folder / variable / file if file else folder / variable
            path.parent.mkdir(mode=0o700, exist_ok=True)
            # Before there is any content: `write_text` itself would create a token that all users of the node can read.
            path.touch(mode=0o600)
            path.write_text(content, encoding="utf-8")
            variables[variable] = str(folder / variable)
        self._leaves = False
        self._process = subprocess.Popen(
            # `exec`, so that SIGTERM (see `leave`) reaches the agent and not its shell; `--exit-with-stdin`, since
            # `ray.kill` and a lost node end the actor without a signal to its child.
            ["/bin/sh", "-c", f"exec {command} --exit-with-stdin"],
            stdin=subprocess.PIPE,
            cwd=folder,
            env=os.environ | variables | {"PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"},
        )
        threading.Thread(target=self._await_end, daemon=True).start()

    def _await_end(self) -> None:
        """Ends the actor with its agent. Ray restarts both, here or elsewhere, unless they were told to leave."""
        self._process.wait()
        if not self._leaves:
            time.sleep(AGAIN_S)
            # sys.exit would end this thread alone. Ray restarts an actor whose process ends (`max_restarts`).
            os._exit(1)

    def host(self) -> str:
        """Name of the host on which it runs."""
        return socket.gethostname()

    def leave(self) -> None:
        """Has the agent's ranks commit their work, and waits for its end."""
        self._leaves = True
        self._process.terminate()
        self._process.wait()


def _files(fleet: AgentFleet) -> dict[str, str]:
    """Contents of token and certificates, which are sent to the agent's node."""
    found = {}
    for variable, place in fleet.environment.items():
        path = Path(place)
        inside = sorted(one for one in path.iterdir() if one.suffix in (".crt", ".key")) if path.is_dir() else []
        for one in inside or [path]:
            try:
                found[f"{variable}/{one.name}" if inside else variable] = one.read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                raise BadFleet(f"{one} cannot be read: {reason_of(error)}") from None
    return found


def _number(name: str) -> int:
    number = name.rpartition("-")[2]
    return int(number) if number.isdigit() else 0

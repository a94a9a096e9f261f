"""The interface of engines: fleets of agents, and their members."""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from elche.errors import ElcheError
from elche.tls import VARIABLE as TLS_VARIABLE
from elche.token import FILE_VARIABLE

NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
MAX_AGENTS = 1000


class BadFleet(ElcheError):
    """The request is invalid for this engine, or the engine refuses it or is not available."""


class AgentState(StrEnum):
    """The engine's state of an agent. `elche hosts` shows if it has reached the coordinator."""

    WAITING = "waiting"
    """Waits for the engine to have room for it."""
    RUNNING = "running"
    LEAVING = "leaving"
    """Was told to end, while its ranks commit their work."""
    GONE = "gone"
    """Has ended, and is not restarted by the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentFleet:
    """Agents of one shape."""

    name: str = "elche"
    num_agents: int | None = None
    """Number of agents; None: one per host of the engine's list."""
    gpus_per_agent: int = 0
    """GPUs to reserve for each agent; 0: none."""
    coordinator: str
    """HOST:PORT, or several, separated by commas."""
    worker: str = "elche-worker"
    """The agent's command there, with options, for a shell."""
    token_file: str = ""
    """A local file with the agents' token; empty: none."""
    tls: str = ""
    """A local folder with the agents' certificates; empty: none."""

    def __post_init__(self) -> None:
        check_name(self.name)
        if self.num_agents is not None and not 0 <= self.num_agents <= MAX_AGENTS:
            raise BadFleet(f"a fleet has 0 to {MAX_AGENTS} agents, not {self.num_agents}")

    @property
    def command(self) -> str:
        """The shell command of an agent."""
        return f"{self.worker} --coordinator {shlex.quote(self.coordinator)}"

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment variables that name token and certificates, for agents that see the local files."""
        named = {FILE_VARIABLE: self.token_file, TLS_VARIABLE: self.tls}
        return {name: path for name, path in named.items() if path}


@dataclass(frozen=True, slots=True)
class FleetAgent:
    """One agent of a fleet."""

    id: str
    """Its id for the engine's own commands."""
    state: AgentState
    host: str = ""
    """Host on which it runs; empty if not decided yet."""
    why: str = ""
    """The engine's reason why it waits or has ended."""


class Launcher(Protocol):
    """An engine. The engine itself keeps the state of a fleet: nothing is stored here.

    An agent that is told to leave gets SIGTERM, and as much time as the engine allows, up to its `--grace`, for its
    ranks to commit their work. Each method raises `BadFleet`.
    """

    def up(self, fleet: AgentFleet) -> None:
        """Brings the fleet to its number of agents: starts missing ones, and has surplus ones leave.

        Running ones stay as they are. The engine restarts an agent whose process, host or time has ended, if it can.
        """

    def members(self, name: str) -> list[FleetAgent]:
        """The agents of the fleet with this name."""

    def down(self, name: str) -> None:
        """Tells all agents of the fleet to leave; returns when they have been told."""


def check_name(name: str) -> str:
    """Returns the name of a fleet. Raises `BadFleet` for one that some engine does not allow."""
    if not NAME.fullmatch(name):
        raise BadFleet(f"a fleet's name has lowercase letters, digits and -, at most 40, not {name[:100]!r}")
    return name

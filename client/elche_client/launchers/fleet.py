"""What an engine is asked, and what it tells."""

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
    """What was asked makes no sense for this engine, or the engine refuses it or is not there."""


class State(StrEnum):
    """What an engine says of an agent. Whether it has reached the coordinator is for `elche hosts` to say."""

    WAITING = "waiting"
    """Is to run when the engine has room for it."""
    RUNNING = "running"
    LEAVING = "leaving"
    """Was told to end, and has its ranks commit their work."""
    GONE = "gone"
    """Has ended, and is not started again by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Agents of one shape."""

    name: str = "elche"
    num_agents: int | None = None
    """How many there are to be; None where the engine's own list of hosts says it."""
    gpus_per_agent: int = 0
    """What the engine is to reserve for each; 0: no GPU."""
    coordinator: str
    """HOST:PORT, or several, separated by commas."""
    worker: str = "elche-worker"
    """The command that is an agent there, with options; a shell there reads it."""
    token_file: str = ""
    """A file here with the agents' token; empty: none."""
    tls: str = ""
    """A folder here with the agents' certificates; empty: none."""

    def __post_init__(self) -> None:
        check_name(self.name)
        if self.num_agents is not None and not 0 <= self.num_agents <= MAX_AGENTS:
            raise BadFleet(f"a fleet has 0 to {MAX_AGENTS} agents, not {self.num_agents}")

    @property
    def command(self) -> str:
        """What a shell runs as an agent."""
        return f"{self.worker} --coordinator {shlex.quote(self.coordinator)}"

    @property
    def environment(self) -> Mapping[str, str]:
        """By which an agent finds its token and certificates, where it sees the files that are here."""
        named = {FILE_VARIABLE: self.token_file, TLS_VARIABLE: self.tls}
        return {name: path for name, path in named.items() if path}


@dataclass(frozen=True, slots=True)
class Member:
    """One agent of a fleet."""

    id: str
    """Its name at the engine, by which the engine's own commands know it."""
    state: State
    host: str = ""
    """Where it runs; empty when that is not decided."""
    why: str = ""
    """Why it waits, or is gone, as the engine says it."""


class Launcher(Protocol):
    """An engine. It keeps what it knows of a fleet itself: nothing is written here.

    An agent that is told to leave gets SIGTERM, and as long as the engine gives it, up to its `--grace`, to have its
    ranks commit their work. Each method raises `BadFleet`.
    """

    def up(self, fleet: Fleet) -> None:
        """Sees to it that the fleet has so many agents: starts those that lack, and has those leave that are too many.

        Those that run are left as they are. An agent whose process, host or time has ended is started again by the
        engine, as far as it can.
        """

    def members(self, name: str) -> list[Member]:
        """The agents of the fleet with this name."""

    def down(self, name: str) -> None:
        """Has all agents of the fleet leave, and waits until they have been told."""


def check_name(name: str) -> str:
    """The name of a fleet. Raises `BadFleet` for what can be none: engines allow different things."""
    if not NAME.fullmatch(name):
        raise BadFleet(f"a fleet's name has small letters, digits and -, at most 40, not {name[:100]!r}")
    return name

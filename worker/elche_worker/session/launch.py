"""The launch line of a rank process: one line of JSON from its agent."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

MODEL = "model.safetensors"
BEST = "best.safetensors"
"""File of the best model by the monitored metric."""
LAST = "last.safetensors"
"""File of the last model, if MODEL is an earlier one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """All data that a rank needs to start. The secret is passed only here, never in arguments or environment."""

    coordinator: str
    """HOST:PORT of the coordinator, or of several, separated by commas."""
    tls: str = ""
    """Folder of certificates for the coordinator's channel; empty: no TLS."""
    interface: str = ""
    """Network interface on which others reach the rank; empty: the one of the route to the coordinator."""
    secret: str
    job_id: str
    rank: int
    incarnation: int = 0
    member: int = 0
    """Position in the rank's replica group; 0 is the leader, which has the session with the coordinator."""
    group_size: int = 1
    """Processes of that group."""
    device: str
    label: str
    """The device's name for display."""
    source: str
    """The user's file."""
    file_name: str
    output_dir: str
    slow_factor: float = 1.0
    """Simulates a slower device: each batch takes this many times as long."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings that replace those of the file."""
    verify_rounds: bool = False
    is_loop: bool = False
    """True if the file is a script with its own loop."""
    warms_up: bool = False
    """True if the rank trains a batch without effect before it is ready, since others train already."""
    resume: str = ""
    """Checkpoint to resume from."""
    arguments: list[str] = field(default_factory=list)
    """`sys.argv` of the user's file, without its own name."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables in addition to the agent's."""
    bundle: str = ""
    """Checksum of the bundle that contains `file_name`; empty: the file is sent alone."""
    requirements: list[str] = field(default_factory=list)
    """Packages that the file needs in addition to the agent's."""
    module: str = ""
    """The job in the bundle, as PACKAGE.MODULE:NAME."""
    missing_secrets: list[str] = field(default_factory=list)
    """Names of requested secrets that the agent does not have; the others are in `environment`."""
    packages_dir: str = ""
    """The agent's folder for such packages."""

    @property
    def model_path(self) -> Path:
        """Path of the final model."""
        return Path(self.output_dir) / MODEL

    def to_line(self) -> str:
        """Serialises to one line."""
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def from_line(cls, line: str) -> "Launch":
        """Parses a line of `to_line`."""
        return cls(**json.loads(line))

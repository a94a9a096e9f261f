"""What an agent tells a rank process that begins: one line of JSON."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

MODEL = "model.safetensors"
BEST = "best.safetensors"
"""The best one by the monitored metric."""
LAST = "last.safetensors"
"""The last one, where the model is an earlier one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Everything that a rank needs to begin. The secret travels here alone, never in arguments or environment."""

    coordinator: str
    """HOST:PORT."""
    secret: str
    job_id: str
    rank: int
    incarnation: int = 0
    member: int = 0
    """Position in the rank's replica group; 0 leads it, and speaks for it with the coordinator."""
    group_size: int = 1
    """Processes of that group."""
    device: str
    label: str
    """The device as people name it."""
    source: str
    """The user's file."""
    file_name: str
    output_dir: str
    slow_factor: float = 1.0
    """Each batch takes this many times as long as it would."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Replace the file's."""
    verify_rounds: bool = False
    resume: str = ""
    """Checkpoint to go on from."""
    arguments: list[str] = field(default_factory=list)
    """What the user's file finds in `sys.argv` after its own name."""
    environment: dict[str, str] = field(default_factory=dict)
    """What it finds in its environment beside that of the agent."""

    @property
    def model_path(self) -> Path:
        """Where the final state is written."""
        return Path(self.output_dir) / MODEL

    def to_line(self) -> str:
        """As one line."""
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def from_line(cls, line: str) -> "Launch":
        """From one line."""
        return cls(**json.loads(line))

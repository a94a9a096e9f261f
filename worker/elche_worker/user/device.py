"""A device of a host: the argument of a job's `batch_size` function."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device by torch's name, and its model."""

    device: str
    model: str = ""
    memory_bytes: int = 0
    """0 if unknown."""

    @property
    def label(self) -> str:
        """The device's name for display."""
        return f"{self.device} {self.model}".strip()

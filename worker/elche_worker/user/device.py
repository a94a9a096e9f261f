"""A device of a host, as the job's `batch_size` function is given it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device as torch names it, and its model."""

    device: str
    model: str = ""
    memory_bytes: int = 0
    """0: not known."""

    @property
    def label(self) -> str:
        """The device as people name it."""
        return f"{self.device} {self.model}".strip()

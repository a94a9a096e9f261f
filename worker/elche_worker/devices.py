"""The devices of this host that can hold a rank."""

from dataclasses import dataclass

import torch

from elche.errors import InvalidJob


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device as torch names it, and its model."""

    device: str
    model: str = ""

    @property
    def label(self) -> str:
        """The device as people name it."""
        return f"{self.device} {self.model}".strip()


def choose_devices(wanted: str, num_ranks: int, group_size: int = 1) -> list[Device]:
    """`group_size` devices for each rank; 0 ranks: as many as there are GPUs for, or one on the CPU.

    `wanted` is "auto" (GPUs if there are any), or a kind or device of torch. CPUs can hold several ranks, and so can a
    GPU that is asked for by its number. Raises `InvalidJob` when there are too few.
    """
    kind = wanted.partition(":")[0]
    if kind not in ("auto", "cpu", "cuda", "mps"):
        raise InvalidJob(f"unknown device {wanted!r}; use auto, cpu, cuda, cuda:N or mps")
    devices = [d for d in _accelerators() if kind == "auto" or wanted in (d.device, d.device.partition(":")[0])]
    if kind == "cpu" or (kind == "auto" and not devices):
        return [Device(device="cpu")] * (max(1, num_ranks) * group_size)
    needed = (num_ranks or 1) * group_size
    if devices and ":" in wanted:
        return devices * needed
    if len(devices) < needed:
        ranks = "ranks" if group_size == 1 else f"ranks of {group_size} processes"
        raise InvalidJob(f"{num_ranks or 1} {ranks} need {needed} devices of kind {wanted}; here are {len(devices)}")
    return devices[: needed if num_ranks else len(devices) // group_size * group_size]


def _accelerators() -> list[Device]:
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        return [Device(device=f"cuda:{index}", model=torch.cuda.get_device_name(index)) for index in range(count)]
    if torch.backends.mps.is_available():
        return [Device(device="mps", model="Apple")]
    return []

"""How kinds of devices differ, beside the order of work on them (`streams`): a small class for each.

`cuda` is NVIDIA's cards and, by PyTorch's build for ROCm, AMD's: that differs in its versions (`build`), its words of
errors (`faults`), and in having no NVML. Work on Intel's (`xpu`) and Apple's (`mps`) goes as on the CPU: nothing is
copied ahead, and ranks average through the host's memory.

Never run on a real device of any of these kinds: `cuda` was run on a simulated one, `xpu` and `mps` on stand-ins for
what is called here.
"""

import os
import resource
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from elche.cgroup import memory_limit_bytes

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Memory in bytes: a card's, or this process's in the host's."""

    used: int
    """Of a card by all processes, of the host by this one."""
    reserved: int = 0
    """Held by this process's allocator on a card."""
    peak: int
    """Most that this process has used."""
    total: int

    def __str__(self) -> str:
        held = f", {self.reserved / GIB:.2f} GiB of it held by this process's allocator" if self.reserved else ""
        return f"{self.used / GIB:.2f} of {self.total / GIB:.2f} GiB are in use{held}"


class Host:
    """The CPU, and what all kinds without a memory of their own have."""

    def listed(self) -> list[str]:
        """The names of those that PyTorch finds."""
        return []

    def described(self, device: torch.device) -> tuple[str, int]:
        """Model and memory in bytes; "" and 0 where they are not known."""
        return "", 0

    def select(self, device: torch.device) -> None:
        """Makes it the device of this process that is meant by the kind alone."""

    def empty_cache(self) -> None:
        """Gives back what the allocator keeps, to libraries and other streams."""

    def memory(self, device: torch.device) -> MemoryUse:
        """Its present use. Does not synchronise."""
        page_bytes, used = os.sysconf("SC_PAGE_SIZE"), 0
        with suppress(OSError, ValueError, IndexError), open("/proc/self/statm") as statm:
            used = int(statm.read().split()[1]) * page_bytes
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        machine, limit = os.sysconf("SC_PHYS_PAGES") * page_bytes, memory_limit_bytes()
        return MemoryUse(used=used, peak=peak, total=machine if limit is None else min(machine, limit))


class Mps(Host):
    """Apple's GPU, which shares the host's memory."""

    def listed(self) -> list[str]:
        return ["mps"] if torch.backends.mps.is_available() else []

    def described(self, device: torch.device) -> tuple[str, int]:
        return "Apple", 0

    def empty_cache(self) -> None:
        torch.mps.empty_cache()


class Cards(Host):
    """Numbered cards with a memory of their own: `cuda`, `xpu`. PyTorch has a module of that name for each."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._of: Any = getattr(torch, kind)

    def listed(self) -> list[str]:
        number = self._of.device_count() if self._of.is_available() else 0
        return [f"{self._kind}:{index}" for index in range(number)]

    def described(self, device: torch.device) -> tuple[str, int]:
        properties = self._of.get_device_properties(device)
        return properties.name, properties.total_memory

    def select(self, device: torch.device) -> None:
        self._of.set_device(device)

    def empty_cache(self) -> None:
        self._of.empty_cache()

    def memory(self, device: torch.device) -> MemoryUse:
        free, total = self._of.mem_get_info(device)
        return MemoryUse(
            used=total - free,
            reserved=self._of.memory_reserved(device),
            peak=self._of.max_memory_allocated(device),
            total=total,
        )


KINDS: dict[str, Host] = {"cpu": Host(), "cuda": Cards("cuda"), "xpu": Cards("xpu"), "mps": Mps()}
"""By PyTorch's name of the kind; the first that has devices is what "auto" means."""
NUMBERED = tuple(name for name, kind in KINDS.items() if isinstance(kind, Cards))
"""Kinds of which there may be several."""
NAMES = "auto, cpu, cuda, cuda:N, xpu, xpu:N or mps"
"""What a user may ask for."""


def kind_of(device: torch.device) -> Host:
    """The device's kind; that of the host for any other."""
    return KINDS.get(device.type, KINDS["cpu"])

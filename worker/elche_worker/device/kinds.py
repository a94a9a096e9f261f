"""The differences between kinds of devices, except for the order of work on them (`streams`): a small class for each
kind.

`cuda` is NVIDIA's GPUs and, with PyTorch's build for ROCm, AMD's, which differ in versions (`build`) and error messages
(`faults`), and have no NVML. Intel's (`xpu`) and Apple's (`mps`) are used like the CPU: nothing is prefetched to them,
and ranks average in host memory.

Never run on a real device of any of these kinds: `cuda` was run on a simulated one, `xpu` and `mps` on stand-ins for
the functions that are called here.
"""

import os
import resource
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from elche.cgroup import memory_limit_bytes
from elche_worker.device.share import memory_fraction

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Memory use in bytes: of a GPU, or of this process on the host."""

    used: int
    """Used by all processes on a GPU, or by this process on the host."""
    reserved: int = 0
    """Held by this process's allocator on a GPU."""
    peak: int
    """The most that this process has used."""
    total: int
    """The device's memory; on the host what the machine has, or the container's limit if that is less."""

    def __str__(self) -> str:
        held = f", {self.reserved / GIB:.2f} GiB of it held by this process's allocator" if self.reserved else ""
        return f"{self.used / GIB:.2f} of {self.total / GIB:.2f} GiB are in use{held}"


class Host:
    """The CPU, and the base of all other kinds."""

    def listed(self) -> list[str]:
        """Names of the devices of this kind that PyTorch finds."""
        return []

    def described(self, device: torch.device) -> tuple[str, int]:
        """Model and memory in bytes; "" and 0 where they are not known."""
        return "", 0

    def select(self, device: torch.device) -> None:
        """Makes it the process's default device of its kind. If a GPU is offered several times, the process gets only
        its share of the memory (`share`).
        """

    def empty_cache(self) -> None:
        """After memory has run out, frees what the allocator has cached, for libraries and other streams, and forgets
        the peak, which is of a batch that did not fit.
        """

    def memory(self, device: torch.device) -> MemoryUse:
        """The present memory use. Does not synchronise."""
        page_bytes, used = os.sysconf("SC_PAGE_SIZE"), 0
        with suppress(OSError, ValueError, IndexError), open("/proc/self/statm") as statm:
            used = int(statm.read().split()[1]) * page_bytes
        # In KiB, and on macOS in bytes.
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
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
    """Numbered devices with their own memory: `cuda`, `xpu`. PyTorch has a module of that name for each."""

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
        if self._kind == "cuda" and (fraction := memory_fraction()) < 1:
            torch.cuda.set_per_process_memory_fraction(fraction, device)

    def empty_cache(self) -> None:
        self._of.empty_cache()
        self._of.reset_peak_memory_stats()

    def memory(self, device: torch.device) -> MemoryUse:
        free, total = self._of.mem_get_info(device)
        return MemoryUse(
            used=total - free,
            reserved=self._of.memory_reserved(device),
            peak=self._of.max_memory_allocated(device),
            total=total,
        )


KINDS: dict[str, Host] = {"cpu": Host(), "cuda": Cards("cuda"), "xpu": Cards("xpu"), "mps": Mps()}
"""Kinds by PyTorch's name, in the order of "auto", which takes the first that has devices."""
NUMBERED = tuple(name for name, kind in KINDS.items() if isinstance(kind, Cards))
"""Kinds of which there may be several."""
NAMES = "auto, cpu, cuda, cuda:N, xpu, xpu:N or mps"
"""Device names that a user may give, for messages."""


def kind_of(device: torch.device) -> Host:
    """The device's kind; `Host` for unknown kinds."""
    return KINDS.get(device.type, KINDS["cpu"])

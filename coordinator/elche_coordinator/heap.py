"""Memory that is free again, and that the C library keeps: glibc returns only what lies at a heap's end."""

import asyncio
import ctypes
import os
from collections.abc import Callable
from pathlib import Path

LOOK_S = 2.0
"""Seconds between two looks at the process's memory."""
GROWN_BYTES = 64 << 20
"""Bytes that must have become free since memory was last given back. To give back 440 MB took a thread 70 ms."""
STATM = Path("/proc/self/statm")


def resident_bytes() -> int:
    """This process's resident memory; 0 where the kernel does not tell."""
    try:
        return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


class _Mallinfo(ctypes.Structure):
    """What glibc's `mallinfo2` returns: sums over all of its heaps."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def free_bytes() -> int:
    """Resident bytes that are not in use in the C library's heaps. What it calls free alone would count what was given
    back, too, and would not change when that is used and free again between two looks. The resident memory where the
    library does not tell.
    """
    if (ask := getattr(ctypes.CDLL(None), "mallinfo2", None)) is None:
        return resident_bytes()
    ask.restype = _Mallinfo
    known = ask()
    return resident_bytes() - int(known.uordblks + known.hblkhd)


def _trim() -> None:
    """Has glibc return all free pages. Other C libraries lack the function, and keep little."""
    getattr(ctypes.CDLL(None), "malloc_trim", lambda _: 0)(0)


class Heap:
    """Returns free memory to the system after much has become free. Without it, gRPC's threads kept 1.1 GB that
    refused calls of an unauthenticated caller had taken.
    """

    def __init__(self, free: Callable[[], int] = free_bytes) -> None:
        self._free = free
        self._kept_bytes = free()
        """The fewest free bytes since memory was last given back."""

    def look(self) -> None:
        """Returns free memory to the system if `GROWN_BYTES` have become free since the last time. Not if the process
        has grown: what was in use then, and is free later, would stay.
        """
        free = self._free()
        if free >= self._kept_bytes + GROWN_BYTES:
            _trim()
            self._kept_bytes = self._free()
        else:
            self._kept_bytes = min(self._kept_bytes, free)

    async def keep_small(self) -> None:
        """Looks until it is cancelled; not on the event loop's thread, which others wait for."""
        while True:
            await asyncio.sleep(LOOK_S)
            await asyncio.to_thread(self.look)

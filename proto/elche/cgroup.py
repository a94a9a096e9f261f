"""What the container or service of this process may use: the limits of its control group, and of those around it."""

import os
from collections.abc import Iterator
from contextlib import suppress
from math import ceil
from pathlib import Path

ROOT = Path("/")


def memory_limit_bytes(root: Path = ROOT) -> int | None:
    """The least that any of its groups may use; None where nothing limits it."""
    files = ("memory.max", "memory.limit_in_bytes")
    limits = [int(text) for text in _read(root, "memory", files) if text.isdecimal()]
    return min(limits, default=None)


def cpu_limit(root: Path = ROOT) -> float | None:
    """How many processors' time it may use, as a number that need not be whole; None where nothing limits it."""
    limits = []
    for text in _read(root, "cpu", ("cpu.max",)):
        quota, _, period = text.partition(" ")
        if quota.isdecimal() and period.isdecimal() and int(period):
            limits.append(int(quota) / int(period))
    for folder in _folders(root, "cpu"):
        with suppress(OSError, ValueError, ZeroDivisionError):
            quota_us = int((folder / "cpu.cfs_quota_us").read_text())
            if quota_us > 0:
                limits.append(quota_us / int((folder / "cpu.cfs_period_us").read_text()))
    return min(limits, default=None)


def num_cores(root: Path = ROOT) -> int:
    """How many processors this process may keep busy; at least 1."""
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = cpu_limit(root)
    return there if limit is None else max(1, min(there, ceil(limit)))


def _read(root: Path, controller: str, names: tuple[str, ...]) -> Iterator[str]:
    for folder in _folders(root, controller):
        for name in names:
            with suppress(OSError, UnicodeDecodeError):
                yield (folder / name).read_text().strip()


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """Its own group's folder and those around it, of version 2 and of version 1 of control groups."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            top = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            top = root / "sys/fs/cgroup" / controllers
        else:
            continue
        inside = Path(path.lstrip("/"))
        for part in (inside, *inside.parents):  # the path may be the host's, where the folder here is the group's own
            yield top / part

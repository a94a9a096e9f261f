"""Limits of this process's control group and its ancestors, as of a container or service."""

import os
from collections.abc import Iterator
from contextlib import suppress
from math import ceil
from pathlib import Path

ROOT = Path("/")


def memory_limit_bytes(root: Path = ROOT) -> int | None:
    """The lowest memory limit of its groups in bytes; None without a limit."""
    files = ("memory.max", "memory.limit_in_bytes")
    limits = [int(text) for text in _read(root, "memory", files) if text.isdecimal()]
    return min(limits, default=None)


def cpu_limit(root: Path) -> float | None:
    """The lowest limit of processor time, in processors, possibly fractional; None without a limit."""
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
    """Number of processors that this process may use, at least 1."""
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = cpu_limit(root)
    return there if limit is None else max(1, min(there, ceil(limit)))


def _read(root: Path, controller: str, names: tuple[str, ...]) -> Iterator[str]:
    for folder in _folders(root, controller):
        for name in names:
            with suppress(OSError, UnicodeDecodeError):
                yield (folder / name).read_text().strip()


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """Folders of its own group and its ancestors, for versions 2 and 1 of control groups."""
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
        for part in (inside, *inside.parents):  # the path may be the host's, while the container mounts its own group
            yield top / part

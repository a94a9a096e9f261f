"""How many threads compute on each rank of a host, beside the other ranks and whatever else runs there."""

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath

THREADS = "OMP_NUM_THREADS"
SPINNING, WAITING = "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"
SPINS = 1000
"""How often a thread that waits for others looks again before it sleeps: some 50 us. GNU's OpenMP, which PyTorch
brings, does so for milliseconds: two threads on busy processors took 40 times the processor time of one, and with this
twice.
"""
CGROUPS = Path("/sys/fs/cgroup")
OF_PROCESS = Path("/proc/self/cgroup")


def threads_per_rank(num_ranks: int, num_processors: int | None = None) -> int:
    """Threads of each of so many ranks; one where there are two processors.

    Threads that share an operation wait for the slowest of them: where something else needs one of two processors, two
    are many times slower than one.
    """
    number = processors() if num_processors is None else num_processors
    return 1 if number <= 2 else max(1, number // max(1, num_ranks))


def environment_of_ranks(num_ranks: int, given: Mapping[str, str]) -> dict[str, str]:
    """What the libraries that compute read when they are loaded, but for what is `given` already."""
    wanted = {THREADS: str(threads_per_rank(num_ranks))}
    if WAITING not in given:
        wanted[SPINNING] = str(SPINS)
    return {name: given.get(name, text) for name, text in wanted.items()}


def processors() -> int:
    """How many this process may use: by its affinity, and by the time that its control group (a container, a job of
    Slurm) gives it.
    """
    number = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([number, *_quotas(CGROUPS, OF_PROCESS)]))


def _quotas(groups: Path, of_process: Path) -> Iterator[int]:
    """The processors of the process's control group and of those around it, where they are limited; begun ones count
    as whole.
    """
    with suppress(OSError):
        for line in of_process.read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            root = groups / "cpu" if controllers else groups
            place = PurePosixPath(name.lstrip("/"))
            for folder in (root / one for one in (place, *place.parents)):
                with suppress(OSError, ValueError, IndexError, ZeroDivisionError):
                    quota, period = _limit(folder)
                    if quota > 0:
                        yield -(-quota // period)


def _limit(folder: Path) -> tuple[int, int]:
    """Microseconds of processors' time in each period of so many. Raises `ValueError` where it is not limited."""
    if (file := folder / "cpu.max").exists():
        quota, period = file.read_text().split()
        return int(quota), int(period)
    return int((folder / "cpu.cfs_quota_us").read_text()), int((folder / "cpu.cfs_period_us").read_text())

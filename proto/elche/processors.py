"""The environment of ranks: how many threads compute besides other ranks of the host, how Python hashes strings, and
what PyTorch logs.
"""

from collections.abc import Mapping

from elche.cgroup import num_cores

THREADS = "OMP_NUM_THREADS"
SPINNING, WAITING = "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"
SPINS = 1000
"""Times that a waiting thread polls before it sleeps, some 50 us. GNU's OpenMP, which PyTorch includes, spins for
milliseconds by default: two threads on busy processors took 40 times the processor time of one, and twice with this.
"""
HASH_SEED = "PYTHONHASHSEED"
"""By default Python hashes strings differently in each process, so that sets have another order: a vocabulary that is
made of `set(text)` would give each rank, and each resumed training, other numbers.
"""
LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"
"""By default PyTorch's C++ code logs a stack when the process of rank 0, which has a loop's store, has ended, though
the others go on without it.
"""


def threads_per_rank(num_ranks: int, num_processors: int | None = None) -> int:
    """Threads of each of `num_ranks` ranks; one if there are two processors.

    Threads that share an operation wait for the slowest of them: if another process needs one of two processors, two
    threads are many times slower than one.
    """
    number = num_cores() if num_processors is None else num_processors
    return 1 if number <= 2 else max(1, number // max(1, num_ranks))


def environment_of_ranks(num_ranks: int, given: Mapping[str, str]) -> dict[str, str]:
    """Environment variables that Python and libraries read when they are loaded; those in `given` are kept."""
    wanted = {THREADS: str(threads_per_rank(num_ranks)), HASH_SEED: "0", LOG_LEVEL: "ERROR"}
    if WAITING not in given:
        wanted[SPINNING] = str(SPINS)
    return {name: given.get(name, text) for name, text in wanted.items()}

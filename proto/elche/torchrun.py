"""The environment of the processes of a script with its own loop, all on one host, as torchrun would give it."""

import random
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress

from elche.errors import ElcheError

STORE_PORTS = range(20_000, 32_000)
VISIBLE = "CUDA_VISIBLE_DEVICES"


def environment_of_rank(rank: int, devices: Sequence[str], port: int, given: Mapping[str, str]) -> dict[str, str]:
    """Environment variables of a rank: who it is, where rank 0's store is, and the GPUs that the ranks see.

    `devices` are those of all ranks; `given` is the environment in which GPUs have these numbers.
    """
    environment = {
        "PYTHONUNBUFFERED": "1",  # shows output as it is written
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(len(devices)),
        "LOCAL_WORLD_SIZE": str(len(devices)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    if not devices[rank].startswith("mps"):
        environment[VISIBLE] = visible(devices, given)
    return environment


def visible(devices: Sequence[str], given: Mapping[str, str]) -> str:
    """CUDA_VISIBLE_DEVICES with these devices only, so that each rank takes its own by LOCAL_RANK; empty for CPUs."""
    known = given.get(VISIBLE, "").split(",")
    of_cuda = (int(device.partition(":")[2] or 0) for device in devices if device.startswith("cuda"))
    indices = list(dict.fromkeys(of_cuda))  # several ranks may share one
    return ",".join(known[index].strip() if index < len(known) and known[index] else str(index) for index in indices)


def free_port() -> int:
    """A free port for rank 0's store, which listens seconds later: below Linux's ephemeral ports, which other
    connections take meanwhile. Raises `ElcheError` if none is found.
    """
    for port in random.sample(STORE_PORTS, 100):
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port
    raise ElcheError(f"none of a hundred ports from {STORE_PORTS[0]} to {STORE_PORTS[-1]} is free for rank 0")

"""The state of the random number generators that user code may use: torch's, Python's and numpy's."""

import hashlib
import random
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

GENERATORS = ("torch", "python", "numpy")
"""Names of the generators. CUDA's belong to torch's."""
BUILT_FOR_CPU = torch.accelerator.current_accelerator() is None
"""True if this build of PyTorch supports no device but the CPU, whatever the host has."""


def seed_all(seed: int) -> None:
    """Seeds all generators."""
    if BUILT_FOR_CPU:
        # For each kind of device that is not in use yet, torch.manual_seed formats the stack, and keeps it for good.
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)
    random.seed(seed)
    # numpy refuses larger seeds.
    np.random.seed(seed % 2**32)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Context in which all generators are seeded, and after which they are as before. Does not initialise a device that
    the process does not use yet: it could not be forked any more.
    """
    host, (in_use, others) = capture_rng_state(of_gpu=False), _devices()
    before = [device.get_rng_state_all() for device in in_use]
    seed_all(seed)
    try:
        yield
    finally:
        restore_rng_state(host)
        for device, state in zip(in_use, before, strict=True):
            device.set_rng_state_all(state)
        for device in others:
            device.manual_seed_all(torch.initial_seed())  # the seed that PyTorch would give it at its first use


@contextmanager
def kept_random() -> Iterator[None]:
    """Context after which all generators are as before."""
    state = capture_rng_state()
    try:
        yield
    finally:
        restore_rng_state(state)


@contextmanager
def host_seeded(seed: int) -> Iterator[None]:
    """As `seeded`, for code that draws on the host alone: GPUs' generators are not touched, nor waited for."""
    host = capture_rng_state(of_gpu=False)
    seed_host(seed)
    try:
        yield
    finally:
        restore_rng_state(host)


def seed_host(seed: int) -> None:
    """Seeds the host's generators, which are all that the worker processes of a `DataLoader` use."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def host_state() -> tuple[Any, ...]:
    """The state of the host's generators, to compare: it differs once a random number was drawn."""
    kind, keys, *rest = np.random.get_state()
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), kind, np.asarray(keys).tobytes(), *rest


class _Mps:
    """The generator of Apple's GPU, by the names that the others have."""

    get_rng_state_all = staticmethod(torch.mps.get_rng_state)
    set_rng_state_all = staticmethod(torch.mps.set_rng_state)


def _devices() -> tuple[list[Any], list[Any]]:
    """PyTorch's modules of the kinds of devices that this process uses, and of those that it may begin to use."""
    cards: list[Any] = [] if BUILT_FOR_CPU else [torch.cuda, torch.xpu]
    in_use = [module for module in cards if module.is_initialized()]
    others = [module for module in cards if module not in in_use]
    return [*in_use, _Mps] if torch.backends.mps.is_available() else in_use, others


def _uses_cuda() -> bool:
    """True if this process uses a GPU. Asking one for its state would begin that: a rank on the CPU does not."""
    cuda: Any = torch.cuda  # untyped
    return bool(cuda.is_initialized())


def capture_rng_state(*, of_gpu: bool = True) -> dict[str, Any]:
    """The state of all generators, as plain values and tensors."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if of_gpu and _uses_cuda() else None,
        "python": random.getstate(),
        "numpy": (
            str(kind),
            torch.tensor(np.asarray(keys).astype(np.int64)),
            int(position),
            int(has_gauss),
            float(gauss),
        ),
    }


def restore_rng_state(state: dict[str, Any], only: Collection[str] = GENERATORS) -> None:
    """Restores the generators named in `only` from a result of `capture_rng_state`."""
    if "torch" in only:
        torch.set_rng_state(state["torch"])
        if state["cuda"] is not None and _uses_cuda():
            torch.cuda.set_rng_state(state["cuda"])
    if "python" in only:
        random.setstate(state["python"])
    if "numpy" in only:
        kind, keys, position, has_gauss, gauss = state["numpy"]
        np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss))


def rng_digests() -> dict[str, str]:
    """Digests of the states of the host's generators, by which two processes compare them."""
    _, keys, *rest = np.random.get_state()
    states = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "python": repr(random.getstate()).encode(),
        "numpy": np.asarray(keys).tobytes() + repr(rest).encode(),
    }
    return {name: hashlib.sha256(state).hexdigest() for name, state in states.items()}


def seed_apart(number: int, only: Collection[str]) -> None:
    """Reseeds these generators by `number` more: torch's than its seed, the others than their next number."""
    if "torch" in only:
        torch.manual_seed(torch.initial_seed() + number)
    if "python" in only:
        random.seed(random.getrandbits(64) + number)
    if "numpy" in only:
        np.random.seed((int(np.random.randint(2**31)) + number) % 2**32)

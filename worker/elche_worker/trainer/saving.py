"""Checkpoints of a loop of the user's own: model, optimizer, random numbers, and where in which epoch it was."""

import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from elche.errors import InvalidJob, Misuse
from elche.manifest import MANIFEST
from elche_worker.checkpoint import About, Kept, Loaded, Target, load, other_buffers, weights_of
from elche_worker.randomness import random_state, restore_random_state
from elche_worker.tensors import copied

KEPT = 3
"""The newest checkpoints that stay."""


@dataclass(frozen=True, slots=True)
class Position:
    """How far a loop is."""

    num_steps: int = 0
    epoch: int = 0
    """The one that is being trained, or comes next."""
    done: int = 0
    """Samples of it that all ranks have trained."""


class Saver:
    """Writes checkpoints of one loop, on a thread; what it writes is copied before. Rank 0 has one."""

    def __init__(self, place: str, name: str) -> None:
        self.place = place
        self._name = name
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")
        self._written: list[str] = []

    def save(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        position: Position,
        plan: dict[str, Any],
        num_ranks: int,
        tell: Callable[[int, str, int, float], None],
        tell_not: Callable[[int, str], None],
    ) -> None:
        """Begins to write. `tell(version, path, size in bytes, seconds)` or `tell_not(version, why)` follows."""
        state = {
            "optimizer": copied(optimizer.state_dict()),
            "random": random_state(),
            "buffers": other_buffers(model),
            "plan": copied(plan),
        }
        kept = Kept(weights_of(model), state)
        about = About(
            job=self._name,
            file_name=str(Path(sys.argv[0]).resolve()),
            source=_source(),
            num_ranks=num_ranks,
            tensors=_tensors(model),
        )
        self._thread.submit(self._write, kept, about, position, tell, tell_not)

    def _write(
        self,
        kept: Kept,
        about: About,
        position: Position,
        tell: Callable[[int, str, int, float], None],
        tell_not: Callable[[int, str], None],
    ) -> None:
        started_s = time.perf_counter()
        name = f"step-{position.num_steps:08d}"
        loop = {"num_steps": position.num_steps, "epoch": position.epoch, "done": position.done}
        try:
            target = Target(self.place)
            path, size_bytes = target.write(name, kept, about, {"loop": loop})
            self._written = [*self._written, name][-KEPT:]
            if len(self._written) == KEPT:
                target.keep_only(self._written)
        except Exception as error:  # training goes on, whatever the place has to say
            reason = f"the checkpoint {self.place}/{name} cannot be written: {error}"
            print(f"elche: {reason}", file=sys.stderr, flush=True)
            tell_not(position.num_steps, reason)
            return
        tell(position.num_steps, path, size_bytes, time.perf_counter() - started_s)

    def close(self) -> None:
        """Waits until all is written."""
        self._thread.shutdown(wait=True)


def restore(path: str, model: nn.Module, optimizer: Optimizer, rank: int) -> tuple[Position, dict[str, Any]]:
    """The checkpoint, or the newest in a folder of them, into model and optimizer; returns where it was, and its plan.

    Raises `Misuse` for one that is not whole, of another model, or of no loop.
    """
    try:
        loaded: Loaded = load(path)
        loaded.check_model(_tensors(model))
    except InvalidJob as error:
        raise Misuse(str(error)) from None
    loop = loaded.manifest["training"].get("loop")
    if loop is None:
        raise Misuse(
            f"the checkpoint {loaded.path} is of a job, not of a loop of your own: `elche resume` goes on with it"
        )
    loaded.restore_model(model)
    optimizer.load_state_dict(loaded.state["optimizer"])
    if rank == 0:
        restore_random_state(loaded.state["random"])
    else:
        torch.manual_seed(torch.initial_seed() + rank + 1_000_003 * loop["num_steps"])
    return Position(loop["num_steps"], loop["epoch"], loop["done"]), loaded.state["plan"]


def is_there(path: str) -> bool:
    """Whether the place has a checkpoint."""
    folder = Path(path)
    return (folder / MANIFEST).is_file() or any(folder.glob(f"*/{MANIFEST}"))


def _source() -> str:
    """The script, for people who wonder later what made the checkpoint."""
    try:
        return Path(sys.argv[0]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _tensors(model: nn.Module) -> list[str]:
    described = []
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in named:
            described.append(f"{name} {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} {kind}")
    return described

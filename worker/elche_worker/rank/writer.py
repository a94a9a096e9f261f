"""Keeps what a checkpoint needs of a round, and writes it while training goes on."""

import json
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from elche.v1 import rank_pb2
from elche_worker.checkpoint import About, Kept, Loaded, Target, other_buffers, weights_of
from elche_worker.rank.averaging import Reduction
from elche_worker.step import Built, TrainStep
from elche_worker.tensors import copied

MAX_REASON_CHARS = 1000


class State:
    """What of a rank is not in its model: moments, outer optimizer, random numbers."""

    def __init__(self, rank: int, built: Built, step: TrainStep, reduction: Reduction, seed: int) -> None:
        self._rank = rank
        self._built = built
        self._step = step
        self._reduction = reduction
        self._seed = seed
        self._spare: list[Kept] = []
        """Memory of checkpoints that are written; to ask for it anew costs more than to copy."""

    def at_entry(self) -> dict[str, Any]:
        """Copies of what later batches change."""
        old = self._spare[-1].state if self._spare else {}
        return {
            "rank": self._rank,
            "optimizers": copied([one.state_dict() for one in self._built.all_optimizers], old.get("optimizers")),
            "scaler": copied(self._step.scaler.state_dict()),
            "random": _random_numbers(),
        }

    def keep(self, at_entry: dict[str, Any], *, averages_optimizers: bool) -> Kept:
        """All of it, while the model holds the round's result."""
        old = self._spare.pop() if self._spare else Kept({}, {})
        state = dict(at_entry)
        if averages_optimizers:
            state["optimizers"] = copied([one.state_dict() for one in self._built.all_optimizers], state["optimizers"])
        state["outer"] = copied(self._reduction.memories(), old.state.get("outer"))
        state["buffers"] = other_buffers(self._built.model)
        return Kept(weights_of(self._built.model, old.weights), state)

    def give_back(self, kept: Kept) -> None:
        """The checkpoint is written, or none: its memory may be used for the next one."""
        self._spare[:] = [kept]

    def restore(self, loaded: Loaded, device: torch.device, version: int) -> None:
        """Model, moments and outer optimizer as they were; random numbers too on the rank that has written them."""
        loaded.restore_model(self._built.model)
        for optimizer, state in zip(self._built.all_optimizers, loaded.state["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self._step.scaler.load_state_dict(loaded.state["scaler"])
        self._reduction.restore(loaded.state["outer"], device)
        if loaded.state["rank"] == self._rank:
            _restore_random_numbers(loaded.state["random"])
        else:
            torch.manual_seed(self._seed + self._rank + 1_000_003 * version)


class Writer:
    """Writes a job's checkpoints, one after the other, on a thread. `tell` is called there with what came of each."""

    def __init__(self, target: Target, about: About, tell: Callable[[rank_pb2.ConverseRequest], None]) -> None:
        self._target = target
        self._about = about
        self._tell = tell
        self.num_ranks = 1
        """Of the group that trains."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")

    def write(
        self, version: int, order: rank_pb2.WriteCheckpoint, kept: Kept, on_written: Callable[[Kept], None]
    ) -> None:
        """Begins to write what was kept; calls back, on the thread, when that is done."""
        self._thread.submit(self._write, version, order, kept).add_done_callback(lambda _: on_written(kept))

    def _write(self, version: int, order: rank_pb2.WriteCheckpoint, kept: Kept) -> None:
        started_s = time.perf_counter()
        try:
            about = replace(self._about, num_ranks=self.num_ranks)
            path, size_bytes = self._target.write(order.name, kept, about, json.loads(order.training))
            self._target.keep_only([*order.keep, order.name])
        except Exception as error:  # training goes on, whatever the place has to say
            reason = f"the checkpoint {self._target.place}/{order.name} cannot be written: {error}"[:MAX_REASON_CHARS]
            failed = rank_pb2.CheckpointFailed(version=version, reason=reason)
            print(reason, flush=True)
            self._tell(rank_pb2.ConverseRequest(checkpoint_failed=failed))
            return
        duration_s = time.perf_counter() - started_s
        saved = rank_pb2.CheckpointSaved(version=version, path=path, size_bytes=size_bytes, duration_s=duration_s)
        self._tell(rank_pb2.ConverseRequest(checkpoint_saved=saved))


def _random_numbers() -> dict[str, Any]:
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "python": random.getstate(),
        "numpy": (
            str(kind),
            torch.tensor(np.asarray(keys).astype(np.int64)),
            int(position),
            int(has_gauss),
            float(gauss),
        ),
    }


def _restore_random_numbers(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    random.setstate(state["python"])
    kind, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss))

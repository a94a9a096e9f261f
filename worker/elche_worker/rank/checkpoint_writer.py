"""Keeps what a checkpoint needs of a round, and writes it while training goes on."""

import json
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from elche.timeline import CHECKPOINT
from elche.v1 import rank_pb2
from elche_worker.collectives.averaging import Reduction
from elche_worker.device.streams import Streams
from elche_worker.model.checkpoint import (
    About,
    Kept,
    Loaded,
    Target,
    divided,
    other_buffers,
    persistent_tensors,
)
from elche_worker.model.layout import Layout
from elche_worker.model.rng import random_state, restore_random_state, seed_all
from elche_worker.model.step import Built, TrainStep
from elche_worker.model.tensors import Piece, copied, is_divided, local_of, placed
from elche_worker.telemetry.timeline import Timeline
from elche_worker.user.schedule import LearningRates

if TYPE_CHECKING:
    from elche_worker.rank.pieces import Pieces

MAX_REASON_CHARS = 1000
MAX_WAITING = 2
"""Checkpoints that may be in memory, beside the one that is kept."""


class State:
    """What a rank's checkpoints are made of: its model, moments, outer optimizer and random numbers."""

    def __init__(
        self,
        rank: int,
        built: Built,
        layout: Layout,
        step: TrainStep,
        reduction: Reduction,
        rates: LearningRates,
        seed: int,
        streams: Streams,
    ) -> None:
        self._streams = streams
        self._rank = rank
        self._built = built
        self._layout = layout
        self._step = step
        self._reduction = reduction
        self._rates = rates
        self._seed = seed
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="keeping")
        self._copying: Future[None] | None = None
        """Copies the result out of the scratch, while training goes on."""
        self._names = persistent_tensors(built.model).keys() | dict(built.model.named_buffers()).keys()
        """What a new model has; a buffer that a forward has made is not resumed."""
        self._spare: list[Kept] = []
        """Memory of checkpoints that are written; to ask for it anew costs more than to copy."""

    def at_entry(self) -> dict[str, Any]:
        """Copies of what later batches change."""
        old = self._spare[-1].state if self._spare else {}
        return {
            "rank": self._rank,
            "optimizers": copied([one.state_dict() for one in self._built.all_optimizers], old.get("optimizers")),
            "scaler": copied(self._step.scaler.state_dict()),
            "random": random_state(),
        }

    def keep(self, at_entry: dict[str, Any]) -> Kept:
        """All of it, as of the round whose result the scratch has. What is averaged is copied in the background."""
        old = self._spare.pop() if self._spare else Kept({}, {})
        state = {**at_entry, "rates": self._rates.to_json()}  # as callbacks have set them that saw the result
        state["outer"] = copied(self._reduction.memories(), old.state.get("outer"))
        buffers = other_buffers(self._built.model)
        state["buffers"] = {name: one for name, one in buffers.items() if name in self._names}
        live = {name: one for name, one in persistent_tensors(self._built.model).items() if name in self._names}
        results = self._results(live)
        weights = {name: copied(tensor, old.weights.get(name)) for name, tensor in live.items() if name not in results}
        kept = Kept(weights, state)
        self._streams.hand_over()  # nothing else communicates before the copy is made: a round waits for it
        self._copying = self._thread.submit(self._copy, kept, live, results, old.weights)
        return kept

    def _copy(
        self, kept: Kept, live: dict[str, torch.Tensor], results: dict[str, torch.Tensor], old: dict[str, Any]
    ) -> None:
        with self._streams.communication():
            _copy(kept, live, results, old)

    def keep_moments(self, at_entry: dict[str, Any]) -> None:
        """Those that rounds average: as the result has them, which the optimizers hold now."""
        at_entry["optimizers"] = copied(
            [one.state_dict() for one in self._built.all_optimizers], at_entry["optimizers"]
        )

    def _results(self, live: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The scratch's view of each tensor that is averaged, under each of its names."""
        by_name = self._layout.result_views()
        by_place = {_place(live[name]): view for name, view in by_name.items() if name in live}
        return {name: by_place[_place(tensor)] for name, tensor in live.items() if _place(tensor) in by_place}

    def settle(self) -> None:
        """Waits until the scratch may change."""
        copying = self._copying
        if copying is not None:
            copying.result()

    def give_back(self, kept: Kept) -> None:
        """The checkpoint is written, or none: its memory may be used for the next one."""
        self._spare[:] = [kept]

    def restore(self, loaded: Loaded, device: torch.device, version: int, *, is_leader: bool = True) -> None:
        """Model, moments and outer optimizer as they were; random numbers too on the rank that has written them, in
        its group's leader.
        """
        loaded.restore_model(self._built.model)
        for optimizer, state in zip(self._built.all_optimizers, loaded.state["optimizers"], strict=True):
            optimizer.load_state_dict(_divided_as(optimizer, state))
        self._rates.reset()  # the optimizers' are those of then
        if "rates" in loaded.state:
            self._rates.restore(loaded.state["rates"])
        self._step.scaler.load_state_dict(loaded.state["scaler"])
        self._reduction.restore(loaded.state["outer"], device)
        if loaded.state["rank"] == self._rank and is_leader:
            restore_random_state(loaded.state["random"])
        else:
            seed_all(self._seed + self._rank + 1_000_003 * version)


def _copy(kept: Kept, live: dict[str, torch.Tensor], results: dict[str, torch.Tensor], old: dict[str, Any]) -> None:
    """Of the results, in the types that the model has, into the memory of an earlier checkpoint if there is one."""
    for name, view in results.items():
        target = local_of(old[name]) if name in old else None
        if target is None or target.shape != view.shape or target.dtype != live[name].dtype:
            target = torch.empty(view.shape, dtype=live[name].dtype)
        target.copy_(view)
        kept.weights[name] = Piece.of(live[name], target) if is_divided(live[name]) else target


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    local = local_of(tensor)
    return local.data_ptr(), local.shape


def _divided_as(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state, of which each process takes its part where it has a part of the parameter."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {
        **state,
        "state": {
            index: {
                key: placed(value, parameters[index]) if isinstance(value, torch.Tensor) else value
                for key, value in of_parameter.items()
            }
            for index, of_parameter in state["state"].items()
        },
    }


class Writer:
    """Writes a job's checkpoints, one after the other, on a thread. `tell` is called there with what came of each."""

    def __init__(
        self,
        target: Target,
        about: About,
        tell: Callable[[rank_pb2.ConverseRequest], None],
        timeline: Timeline | None = None,
        pieces: "Pieces | None" = None,
    ) -> None:
        """`pieces` writes what is divided among the processes of a replica group, all of which write together."""
        self._pieces = pieces
        self._target = target
        self._about = about
        self._tell = tell
        self._timeline = timeline
        self._room = threading.Condition()
        self._num_waiting = 0
        self.num_ranks = 1
        """Of the group that trains."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")

    def write(self, version: int, order: rank_pb2.WriteCheckpoint | None, kept: Kept, state: State) -> None:
        """Begins to write what was kept, and gives its memory back when that is done. Without an order, it is the
        leader of the group that has one, and here is only part of it.
        """
        with self._room:
            self._num_waiting += 1
        self._thread.submit(self._write_kept, version, order, kept, state)

    def _write_kept(self, version: int, order: rank_pb2.WriteCheckpoint | None, kept: Kept, state: State) -> None:
        started_s = time.perf_counter()
        state.settle()
        if order is None:
            self._write_part(kept)
        else:
            self._write(version, order, kept)
        if self._timeline is not None:
            self._timeline.add(CHECKPOINT, started_s, time.perf_counter(), version)
        state.give_back(kept)
        with self._room:
            self._num_waiting -= 1
            self._room.notify()

    def wait_for_room(self, is_over: Callable[[], bool]) -> None:
        """Waits while as many are being written as memory is meant for: rather than to lose one, training waits."""
        with self._room:
            while self._num_waiting >= MAX_WAITING and not is_over():
                self._room.wait(timeout=0.1)

    def _write_part(self, kept: Kept) -> None:
        assert self._pieces is not None
        try:
            if folder := self._pieces.agree(""):
                self._pieces.write(Path(folder), divided(kept)[-1])
        except Exception as error:  # the leader tells
            print(f"this process's part of a checkpoint cannot be written: {error}", flush=True)

    def _write(self, version: int, order: rank_pb2.WriteCheckpoint, kept: Kept) -> None:
        started_s = time.perf_counter()
        has_begun = False

        def write_pieces(folder: Path, pieces: Mapping[str, Piece]) -> None:
            nonlocal has_begun
            has_begun = True
            assert self._pieces is not None
            self._pieces.agree(str(folder))
            self._pieces.write(folder, pieces)

        try:
            about = replace(self._about, num_ranks=self.num_ranks)
            path, size_bytes = self._target.write(
                order.name, kept, about, json.loads(order.training), write_pieces if self._pieces else None
            )
            self._target.keep_only([*order.keep, order.name])
        except Exception as error:  # training goes on, whatever the place has to say
            if self._pieces is not None and not has_begun:
                self._pieces.agree("")
            reason = f"the checkpoint {self._target.place}/{order.name} cannot be written: {error}"[:MAX_REASON_CHARS]
            failed = rank_pb2.CheckpointFailed(version=version, reason=reason)
            print(reason, flush=True)
            self._tell(rank_pb2.ConverseRequest(checkpoint_failed=failed))
            return
        duration_s = time.perf_counter() - started_s
        saved = rank_pb2.CheckpointSaved(version=version, path=path, size_bytes=size_bytes, duration_s=duration_s)
        self._tell(rank_pb2.ConverseRequest(checkpoint_saved=saved))

"""Copies what a checkpoint needs of a round, so that training goes on while it is written."""

from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from elche_worker.collectives.reduction import Reduction
from elche_worker.device.rng import capture_rng_state, restore_rng_state, seed_all
from elche_worker.device.streams import DeviceStreams
from elche_worker.model.checkpoint import CheckpointData, Loaded, other_buffers, persistent_tensors
from elche_worker.model.frozen import LeftOut
from elche_worker.model.layout import Layout
from elche_worker.model.modes import Switches
from elche_worker.model.optimizer_state import check_is_alike, groups_in, in_order_of, names_of, other_options
from elche_worker.model.own_state import OwnState
from elche_worker.model.step import Built, TrainStep
from elche_worker.model.storage import place_of, results_of_views
from elche_worker.model.tensors import Piece, assign, copied, host_memory, is_divided, local_of, placed
from elche_worker.model.wrapped import load_state
from elche_worker.user.schedule import LearningRates

queued = partial(copied, is_queued=True)
"""Copies without waiting for the device. The checkpoint is written only when `_copy` has waited for that."""


class CheckpointCapture:
    """Copies what a checkpoint needs out of a rank: its model, moments, outer optimizer and random numbers."""

    def __init__(
        self,
        rank: int,
        built: Built,
        layout: Layout,
        step: TrainStep,
        reduction: Reduction,
        rates: LearningRates,
        seed: int,
        streams: DeviceStreams,
        left_out: LeftOut,
        own_state: OwnState | None = None,
    ) -> None:
        self._streams = streams
        self._own_state = own_state or OwnState()
        self._switches = Switches(built.model)
        self._left_out = left_out
        self._rank = rank
        self._built = built
        self._layout = layout
        self._step = step
        self._reduction = reduction
        self._rates = rates
        self._seed = seed
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="capture")
        self._copying: Future[None] | None = None
        """Copies the result out of the flat buffers while training goes on."""
        self._names = persistent_tensors(built.model).keys() | dict(built.model.named_buffers()).keys()
        """The tensors that are saved: those that a new model has, and not buffers that only a forward pass creates."""
        self._names -= left_out.names
        self._stepped = [names_of(built.model, one) for one in built.all_optimizers]
        """The names of each optimizer's parameters, in its order."""
        self._spare: list[CheckpointData] = []
        """At most one checkpoint that was written: its memory is used again, since allocating costs more."""

    def capture_at_entry(self) -> dict[str, Any]:
        """Copies what later batches change, when a round is entered. The result itself stays in the flat buffers."""
        old = self._spare[-1].state if self._spare else {}
        return {
            "rank": self._rank,
            "optimizers": queued([one.state_dict() for one in self._built.all_optimizers], old.get("optimizers")),
            "stepped": self._stepped,
            "scaler": copied(self._step.scaler.state_dict()),
            "random": capture_rng_state(),
        }

    def capture(self, at_entry: dict[str, Any]) -> CheckpointData:
        """Makes a checkpoint of the round whose result is in the flat buffers, which are copied in the background."""
        old = self._spare.pop() if self._spare else CheckpointData({}, {})
        # including what callbacks have set after they saw the result
        state = {**at_entry, "rates": self._rates.to_json(), "switches": self._switches.to_json()}
        if self._own_state.objects:
            state["registered"] = queued(self._own_state.state(), old.state.get("registered"))
        state["outer"] = queued(self._reduction.memories(), old.state.get("outer"))
        buffers = other_buffers(self._built.model, is_queued=True)
        state["buffers"] = {name: one for name, one in buffers.items() if name in self._names}
        live = {name: one for name, one in persistent_tensors(self._built.model).items() if name in self._names}
        own = self._layout.tensors()
        results = _under_all_names(live, own, self._layout.result_views())
        mean = self._reduction.mean()
        mean |= _under_all_names(live, own, mean)
        with self._streams.communication():
            results |= results_of_views(live, results)
            mean |= results_of_views(live, mean) if mean else {}
        weights = {name: queued(tensor, old.weights.get(name)) for name, tensor in live.items() if name not in results}
        data = CheckpointData(weights, state, self._left_out.digest)
        # the copy is next on the communication stream: no round is entered before it has ended
        self._streams.hand_over()
        self._copying = self._thread.submit(self._copy, self._streams.computed(), data, live, results, mean, old)
        return data

    def _copy(
        self,
        event: Any,
        data: CheckpointData,
        live: dict[str, torch.Tensor],
        results: dict[str, torch.Tensor],
        mean: dict[str, torch.Tensor],
        old: CheckpointData,
    ) -> None:
        with self._streams.communication():
            _copy(data, live, results, old.weights)
            data.mean.update(copied(mean, old.mean))
        if event is not None:
            event.synchronize()  # after it all `queued` copies are there

    def recapture_moments(self, at_entry: dict[str, Any]) -> None:
        """Copies averaged moments again, while the optimizers hold those of the result."""
        at_entry["optimizers"] = queued(
            [one.state_dict() for one in self._built.all_optimizers], at_entry["optimizers"]
        )

    def finish_copy(self) -> None:
        """Waits until the flat buffers may change."""
        copying = self._copying
        if copying is not None:
            copying.result()

    def recycle(self, data: CheckpointData) -> None:
        """Reuses the memory of a checkpoint that is written or discarded."""
        self._spare[:] = [data]

    def restore(self, loaded: Loaded, version: int, *, is_leader: bool = True) -> None:
        """Restores model, moments and outer optimizer. The random number generators are restored on the rank that wrote
        the checkpoint, in its group's leader; all other processes reseed theirs.
        """
        loaded.restore_model(self._built.model)
        states, stepped = loaded.state["optimizers"], loaded.state.get("stepped", self._stepped)
        for optimizer, state, saved, present in zip(
            self._built.all_optimizers, states, stepped, self._stepped, strict=True
        ):
            groups = groups_in(state, optimizer)
            check_is_alike(optimizer, groups, loaded.path)
            if self._rank == 0 and is_leader and (other := other_options(optimizer, groups)):
                print(f"elche: {type(optimizer).__name__} goes on as in the checkpoint, with {other}", flush=True)
            load_state(optimizer, _divided_as(optimizer, in_order_of(state, saved, present)))
        self._rates.reset()  # the loaded optimizers have the rates of the time of the checkpoint
        if "rates" in loaded.state:
            self._rates.restore(loaded.state["rates"])
        if "switches" in loaded.state:
            self._switches.restore(loaded.state["switches"])
        self._step.scaler.load_state_dict(loaded.state["scaler"])
        for name in self._own_state.restore(loaded.state.get("registered", {}), f"the checkpoint {loaded.path}"):
            print(f"elche: the checkpoint has no state of {name!r}, which starts fresh", flush=True)
        self._reduction.restore(loaded.state["outer"], loaded.mean)
        if loaded.state["rank"] == self._rank and is_leader:
            restore_rng_state(loaded.state["random"])
        else:
            # With the version: seeded as at the start, generators would repeat the numbers from before the checkpoint.
            seed_all(self._seed + self._rank + 1_000_003 * version)


def _copy(
    data: CheckpointData, live: dict[str, torch.Tensor], results: dict[str, torch.Tensor], old: dict[str, Any]
) -> None:
    """Copies the results, in the model's dtypes, into the memory of an earlier checkpoint if there is one."""
    for name, view in results.items():
        target = local_of(old[name]) if name in old else None
        form = local_of(live[name])
        if target is None or target.shape != form.shape or target.dtype != form.dtype:
            # In the form of the model's tensor: rounds have complex numbers as pairs.
            target = host_memory(form)
        assign(target, view)
        data.weights[name] = Piece.of(live[name], target) if is_divided(live[name]) else target


def _under_all_names(
    live: dict[str, torch.Tensor], own: dict[str, torch.Tensor], views: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The view that stands for each of the model's tensors, under each of its names in `live`. Views have the names of
    `own`, which may be others: torch's `checkpoint_wrapper` takes its part out of those of a `state_dict`.
    """
    by_place = {place_of(live.get(name, own[name])): view for name, view in views.items() if name in own}
    return {name: by_place[place_of(tensor)] for name, tensor in live.items() if place_of(tensor) in by_place}


def _divided_as(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state with this process's part of each tensor whose parameter is divided."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not any(map(is_divided, parameters)):
        return state
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

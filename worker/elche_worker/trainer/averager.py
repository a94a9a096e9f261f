"""Averages the gradients of those optimizers that are stepped."""

from collections.abc import Sequence
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from elche.errors import Misuse
from elche_worker.collectives.gradients import Gradients
from elche_worker.collectives.sparse import sparse_names
from elche_worker.collectives.world import World
from elche_worker.trainer.noted import check_unscaled
from elche_worker.trainer.optimizers import Key, Optimizers


class GradientAverager:
    """The gradients of each optimizer. With one process it averages nothing, and any optimizer may be stepped."""

    def __init__(self, model: nn.Module, optimizers: Optimizers, world: World) -> None:
        self._model = model
        self._optimizers = optimizers
        self._world = world
        self.gradients: dict[Key, Gradients] = {}
        """By optimizer; a single optimizer has those of the whole model. Empty with one process."""
        self._stepped: dict[Key, list[nn.Parameter]] = {}
        """By optimizer: the parameters that it has, since a loop may give it others."""
        self._hooks: list[RemovableHandle] = []
        self.averaged: list[Key] = []
        """Optimizers whose gradients are averaged and that were not stepped yet."""

    def begin(self, *, overlaps: bool, num_requests: int) -> None:
        """Prepares averaging among several processes."""
        for key, one in self._optimizers.by_key.items():
            self._stepped[key] = self._optimizers.parameters_of([key])
            named, sparse = self._named(key)
            self.gradients[key] = Gradients(
                named,
                self._world,
                # backward does not say which of several optimizers will be stepped
                overlaps=overlaps and not self._optimizers.are_several,
                num_requests=num_requests,
                sparse=sparse,
            )
            if hasattr(one, "_optimizer_step_pre_hooks"):  # wrappers of another optimizer may not call `__init__`
                # By key: a wrapper, as Fabric's, may share its hooks with the optimizer in it, which they then name.
                self._hooks += [
                    one.register_step_pre_hook(partial(self._check_before, key)),
                    one.register_step_post_hook(partial(self._check_averaged, key)),
                ]
        self.weigh(1 / self._world.size)

    def _named(self, key: Key) -> tuple[dict[str, nn.Parameter], set[str]]:
        """The parameters, by name, whose gradients are an optimizer's, and which of them have sparse gradients."""
        named, stepped = dict(self._model.named_parameters()), set(self._stepped[key])
        if self._optimizers.are_several:
            named = {name: parameter for name, parameter in named.items() if parameter in stepped}
        return named, sparse_names(self._model, self._optimizers)

    def _follow(self, key: Key) -> None:
        """Averages what the optimizer steps now: a loop may add a group to it, or replace layers of the model."""
        stepped = self._optimizers.parameters_of([key])
        had = self._stepped[key]
        if len(stepped) == len(had) and all(map(is_, stepped, had)):
            return
        self._stepped[key] = stepped
        self.gradients[key].follow(*self._named(key))

    def rejoin(self) -> None:
        """Adopts the world's new group: what was sent of this step is sent again. Collective."""
        for gradients in self.gradients.values():
            gradients.rejoin()

    def begin_step(self) -> None:
        """Resets per-step state."""
        self.averaged = []
        for gradients in self.gradients.values():
            gradients.begin()

    def weigh(self, fraction: float | None) -> None:
        """Sets the weight of this step's gradients; None while it is not known."""
        for gradients in self.gradients.values():
            gradients.weigh(fraction)

    def find_changed(self) -> bool:
        """True if the script has changed gradients since backward. Raises `Misuse` if these were sent already."""
        return any(self.gradients[key].find_changed() for key in self.averaged if key in self.gradients)

    def average(self, fraction: float, requests: Sequence[float]) -> torch.Tensor | None:
        """Averages the gradients of `averaged`, which stay as they are until `replace`. Returns the sums of the
        requests over all ranks, if there are any.
        """
        summed = None
        for key in self.averaged:
            self._follow(key)
            sums = self.gradients[key].finish(fraction, requests)
            if requests:
                summed, requests = sums, ()
        return summed

    def replace(self) -> None:
        """Replaces the gradients of `averaged` by their average."""
        for key in self.averaged:
            self.gradients[key].replace()

    def _check_before(self, key: Key, _: Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        # With a closure the check cannot decide: it computes the gradients itself, and may average them.
        if not any(arguments[1:]) and not any(named.values()):  # the first is the optimizer
            self._check_averaged(key)

    def _check_averaged(self, key: Key, *_: Any) -> None:
        if key not in self.averaged:
            check_unscaled(self._optimizers.by_key[key])
            raise Misuse(
                "the optimizer is stepped with gradients of this rank alone: call trainer.step() instead, or "
                "trainer.average_gradients() before it and trainer.finish_step() after it"
            )

    def close(self) -> None:
        """Removes its hooks from optimizers and model."""
        for hook in self._hooks:
            hook.remove()
        for gradients in self.gradients.values():
            gradients.close()

"""Optimizers that a script steps beside its Trainers: on several ranks what they train parts."""

import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from elche_worker.collectives.world import World
from elche_worker.trainer.averager import GradientAverager
from elche_worker.trainer.optimizers import Optimizers

_open: "WeakSet[OtherOptimizers]" = WeakSet()


class OtherOptimizers:
    """Says once, on rank 0, that an optimizer is stepped that no Trainer of this process has.

    Not in a Trainer's step: there an optimizer may step another one that it wraps.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Optimizers,
        world: World,
        averager: GradientAverager,
        note_stepped: Callable[[], None],
    ) -> None:
        """`note_stepped` is called when it steps the model's own parameters."""
        self._model = model
        self._optimizers = optimizers
        self._averager = averager
        self._note_stepped = note_stepped
        self._world = world
        self._has_said = False
        self._hook = register_optimizer_step_post_hook(self._on_step)
        _open.add(self)

    def close(self) -> None:
        """Looks no more."""
        self._hook.remove()
        _open.discard(self)

    def _on_step(self, optimizer: Optimizer, *_: Any) -> None:
        if any(one._averager.averaged or one._has(optimizer) for one in _open):
            return
        stepped = {id(one) for group in optimizer.param_groups for one in group["params"]}
        if any(id(one) in stepped for one in self._model.parameters()):
            self._note_stepped()
            self._say(
                f"{type(optimizer).__name__}, which Trainer.setup was not given, steps the model with gradients of "
                "each rank alone: give it to Trainer.setup, and call trainer.step() instead of its step()"
            )
        elif stepped - {id(one) for other in _open for one in other._model.parameters()}:
            self._say(
                f"{type(optimizer).__name__} is stepped beside the Trainer, with gradients of each rank alone, so that "
                "its parameters differ between ranks: let the model hold them, such as "
                "nn.ModuleDict({'net': net, 'loss': loss}), and give that optimizer to Trainer.setup, too"
            )

    def _has(self, optimizer: Optimizer) -> bool:
        return any(one is optimizer for one in self._optimizers)

    def _say(self, text: str) -> None:
        if not self._has_said and not self._world.rank:
            print(f"elche: {text}", file=sys.stderr, flush=True)
        self._has_said = True

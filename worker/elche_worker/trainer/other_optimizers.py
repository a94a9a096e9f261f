"""Optimizers that a script steps beside its Trainers, so that ranks diverge, or creates again and never steps."""

from collections.abc import Callable
from functools import wraps
from typing import Any
from weakref import WeakSet

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from elche.output import notice
from elche_worker.collectives.world import World
from elche_worker.trainer.averager import GradientAverager
from elche_worker.trainer.optimizers import Optimizers

_open: "WeakSet[OtherOptimizers]" = WeakSet()


class OtherOptimizers:
    """Says once, on rank 0, that an optimizer is stepped that no Trainer of this process has; that one was built of the
    model's parameters besides the Trainer's; that the first step has no gradients; that each batch is stepped twice; or
    that an unfrozen parameter is in none.

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
        self._is_first = True
        self._num_outside = 0
        """Steps of one rank before which the loop stepped an optimizer of the Trainer itself."""
        self._was_outside = False
        self._num_averaged = 0
        self._num_averaged_before = 0
        """`_num_averaged` as the optimizer's present step began."""
        self._hooks = (
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._on_step),
        )
        self._frozen = {name: one for name, one in model.named_parameters() if not one.requires_grad}
        """Parameters that were frozen when the Trainer was set up."""
        self._built: WeakSet[Optimizer] = WeakSet()
        """Optimizers that were built since then."""
        _watch_built()
        _open.add(self)

    def close(self) -> None:
        """Looks no more."""
        for hook in self._hooks:
            hook.remove()
        _open.discard(self)

    def note_built(self, optimizer: Optimizer) -> None:
        """Called while an optimizer is built."""
        self._built.add(optimizer)

    def check_step(self) -> None:
        """Called when a step's gradients are averaged: a loop that steps by itself may clear them with its step."""
        self._num_averaged += 1
        if self._has_said:
            return
        self._num_outside, self._was_outside = self._num_outside + self._was_outside, False
        if self._num_outside > 1:  # once it may be meant, as for schedules that ask for a step before their own
            self._notice(
                "the loop calls the optimizer's step(), and trainer.step() steps as well, so that each batch is two "
                "steps: leave the former out (several ranks refuse it)"
            )
            return
        for built in self._built:
            is_ours = not _parameters_of(built).isdisjoint(map(id, self._model.parameters()))
            if is_ours and not any(one._has(built) for one in _open):
                self._notice(
                    f"{type(built).__name__} was built of the model's parameters after Trainer.setup, but step() and "
                    f"checkpoints use the {type(self._optimizers.first).__name__} that Trainer.setup was given: "
                    "change that one (optimizer.add_param_group(...), optimizer.param_groups[0]['lr'] = ...), or close "
                    "this trainer and set up another"
                )
                return
        is_first, self._is_first = self._is_first, False
        # A loop that steps in hooks of `backward` has no gradients left, and has trained.
        if is_first and not self._num_outside and all(one.grad is None for one in self._model.parameters()):
            self._notice(
                "no parameter of the model has a gradient in the first step, so it stays as it is: call backward() "
                "before it, on a loss that is computed with the model that Trainer.setup was given (trainer.model), "
                "not with another one or a copy"
            )
            return
        stepped: set[int] = set()
        if any(one.grad is not None for one in self._frozen.values()):
            stepped = stepped.union(*(_parameters_of(one) for other in _open for one in other._optimizers))
        for name, one in self._frozen.items():
            if one.grad is not None and id(one) not in stepped:
                self._notice(
                    f"parameter {name!r} was unfrozen after Trainer.setup, and no optimizer of the Trainer has it, so "
                    "it is not trained: give it to one, as by optimizer.add_param_group({'params': [...]})"
                )
                return

    def _before_step(self, *_: Any) -> None:
        self._num_averaged_before = self._num_averaged

    def _on_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self._world.size == 1:  # nothing is averaged, so each optimizer has the gradients that it should have
            # Lightning averages in the closure of this step, and finishes the step in a hook before this one.
            is_inside = self._averager.averaged or self._num_averaged > self._num_averaged_before
            self._was_outside |= self._has(optimizer) and not is_inside
            return
        if any(one._averager.averaged or one._has(optimizer) for one in _open):
            return
        stepped = _parameters_of(optimizer)
        if any(id(one) in stepped for one in self._model.parameters()):
            self._note_stepped()
            self._notice(
                f"{type(optimizer).__name__}, which Trainer.setup was not given, steps the model with gradients of "
                "each rank alone: give it to Trainer.setup, and call trainer.step() instead of its step()"
            )
        elif stepped - {id(one) for other in _open for one in other._model.parameters()}:
            self._notice(
                f"{type(optimizer).__name__} is stepped outside the Trainer, with gradients of each rank alone, so "
                "that its parameters differ between ranks: let the model hold them, such as "
                "nn.ModuleDict({'net': net, 'loss': loss}), and give that optimizer to Trainer.setup, too"
            )

    def _has(self, optimizer: Optimizer) -> bool:
        return any(one is optimizer for one in self._optimizers)

    def _notice(self, text: str) -> None:
        if not self._has_said and not self._world.rank:
            notice(text)
        self._has_said = True


def _parameters_of(optimizer: Optimizer) -> set[int]:
    return {id(one) for group in optimizer.param_groups for one in group["params"]}


def _noting(add_param_group: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(add_param_group)
    def noted(self: Optimizer, group: dict[str, Any]) -> Any:
        for one in _open:
            one.note_built(self)
        return add_param_group(self, group)

    noted._notes_built = True  # type: ignore[attr-defined]
    return noted


def _watch_built() -> None:
    """Notes from now on which optimizers are built: each adds its groups so. PyTorch has no hook for that."""
    if not hasattr(Optimizer.add_param_group, "_notes_built"):
        Optimizer.add_param_group = _noting(Optimizer.add_param_group)  # type: ignore[method-assign]

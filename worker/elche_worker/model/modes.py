"""Train and eval modes: modules keep those that `model()` gave them, except during evaluations; optimizers with two
sets of weights, such as schedule-free ones, are switched as well.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


class Switches:
    """Finds what callbacks have changed in a model since it was built: frozen parameters, modules' modes. A rank that
    joins later needs it, since `epoch_fn` may change them in one epoch only.
    """

    def __init__(self, model: nn.Module) -> None:
        """The model as it was built."""
        self._model = model
        self._trained = [name for name, one in model.named_parameters() if one.requires_grad]
        self._modes = {name: module.training for name, module in model.named_modules()}

    def to_json(self) -> dict[str, Any]:
        """Names of parameters that are frozen now, and the modes, by name, of modules whose mode has changed."""
        parameters = dict(self._model.named_parameters())
        modes = {name: module.training for name, module in self._model.named_modules() if name in self._modes}
        return {
            "frozen": [name for name in self._trained if name in parameters and not parameters[name].requires_grad],
            "modes": {name: mode for name, mode in modes.items() if mode != self._modes[name]},
        }

    def restore(self, value: Mapping[str, Any]) -> None:
        """Freezes parameters and sets modes by a result of `to_json`. Names that the model lacks are left out."""
        parameters = dict(self._model.named_parameters())
        frozen = set(value["frozen"])
        for name in self._trained:
            if name in parameters and parameters[name].requires_grad == (name in frozen):
                parameters[name].requires_grad_(name not in frozen)
        for name, module in self._model.named_modules():
            if name in self._modes:
                module.training = value["modes"].get(name, self._modes[name])


def eval_mode_notice(model: nn.Module, *, came_in_eval_mode: bool = False) -> str:
    """A warning on modules that `model()` has returned in eval mode; "" if there are none. A whole model that
    `came_in_eval_mode` has been put into train mode.
    """
    if came_in_eval_mode:
        return (
            "model() has returned the model in eval mode, as libraries return pretrained ones: it is trained in train "
            "mode. Call train() on it there, and then eval() on modules that are to stay in eval mode"
        )
    modules = list(model.modules())
    num = sum(not module.training for module in modules)
    if not num:
        return ""
    return (
        f"{num} of the model's {len(modules)} modules are in eval mode, as model() has returned them, and stay so in "
        "training (no dropout, fixed statistics): call train() on them if this is not intended"
    )


def begin_training(optimizers: Sequence[Optimizer]) -> None:
    """Tells optimizers that have `train` and `eval` that training begins."""
    for one in _with_modes(optimizers):
        one.train()


@contextmanager
def evaluated_weights(optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Context in which the model has the weights to evaluate and to save, for optimizers with two sets of weights.
    Afterwards it has the same weights as before, bit for bit, which `eval()` and `train()` alone would not restore.
    """
    switched = _with_modes(optimizers)
    parameters = [one for optimizer in switched for group in optimizer.param_groups for one in group["params"]]
    kept = [one.detach().clone() for one in parameters]
    for optimizer in switched:
        optimizer.eval()
    try:
        yield
    finally:
        for optimizer in switched:
            optimizer.train()
        with torch.no_grad():
            for parameter, before in zip(parameters, kept, strict=True):
                parameter.copy_(before)


@contextmanager
def evaluating(model: nn.Module, optimizers: Sequence[Optimizer] = ()) -> Iterator[None]:
    """Context for an evaluation, in eval mode and without gradients. Restores each module's mode afterwards, which
    parameters are frozen, as for a linear probe (else one rank would train without them), and the gradients: those that
    user code makes in it, as for adversarial samples, are not added to training's.
    """
    modes = {module: module.training for module in model.modules()}
    parameters = [(one, one.grad, one.requires_grad) for one in model.parameters()]
    for one, _, _ in parameters:
        one.grad = None
    with evaluated_weights(optimizers):
        model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            for module, was_training in modes.items():
                if was_training and not module.training:
                    module.train()  # a module may override `train`
            for module, was_training in modes.items():
                module.training = was_training
            for one, gradient, is_trained in parameters:
                one.requires_grad_(is_trained)
                one.grad = gradient


def _with_modes(optimizers: Sequence[Optimizer]) -> list[Any]:
    return [one for one in optimizers if callable(getattr(one, "train", None)) and callable(getattr(one, "eval", None))]

"""The optimizers of a user-owned loop: one, or several by name or number, as a GAN has."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import LBFGS, Optimizer

from elche.errors import Misuse
from elche_worker.model.optimizer_state import check_is_alike, groups_in, in_order_of, names_of, other_options
from elche_worker.model.wrapped import complete, load_state

Key = str | int
Given = Optimizer | Sequence[Optimizer] | Mapping[str, Optimizer]


class Optimizers:
    """The optimizers given to `Trainer.setup`, by key: names of a dict, else numbers from 0."""

    def __init__(self, given: Given) -> None:
        self.by_key: dict[Key, Optimizer]
        if isinstance(given, Optimizer):
            self.by_key = {0: given}
        else:
            self.by_key = dict(given.items() if isinstance(given, Mapping) else enumerate(given))
        self.are_several = not isinstance(given, Optimizer)
        for one in self:
            complete(one)

    def __iter__(self) -> Iterator[Optimizer]:
        return iter(self.by_key.values())

    @property
    def first(self) -> Optimizer:
        """The first optimizer, whose learning rate is reported."""
        return next(iter(self))

    @property
    def rates(self) -> list[float]:
        """The learning rate of each group of parameters that has one."""
        return [float(group["lr"]) for one in self for group in one.param_groups if group.get("lr") is not None]

    @property
    def have_schedule(self) -> bool:
        """True if a torch learning rate schedule wraps the `step` of one of them."""
        return any(getattr(one.step, "_wrapped_by_lr_sched", False) for one in self)

    def keys_of(self, wanted: Key | None) -> list[Key]:
        """The key `wanted`, or all keys for None. Raises `Misuse` for an unknown key."""
        if wanted is not None and wanted not in self.by_key:
            raise Misuse(f"there is no optimizer {wanted!r}; there are {', '.join(map(repr, self.by_key))}")
        return list(self.by_key) if wanted is None else [wanted]

    def check_not_accumulating(self, keys: Sequence[Key]) -> None:
        """Raises `Misuse` if an optimizer of Accelerate would skip this step, whose gradients would then be cleared."""
        for key in keys:
            state = getattr(self.by_key[key], "gradient_state", None)
            if state is not None and not getattr(state, "sync_gradients", True):
                raise Misuse(
                    "accelerator.accumulate() has more batches to come before this optimizer makes a step: call "
                    "trainer.step() only where accelerator.sync_gradients is true"
                )

    def parameters_of(self, keys: Sequence[Key]) -> list[nn.Parameter]:
        """The parameters of these optimizers, each once."""
        groups = (group for key in keys for group in self.by_key[key].param_groups)
        return list(dict.fromkeys(parameter for group in groups for parameter in group["params"]))

    def follow_parameters(self) -> None:
        """Moves the states to the devices of their parameters."""
        for one in self:
            if one.state:
                # PyTorch moves each state to its parameter's device as it loads it.
                load_state(one, one.state_dict())

    def state_dict(self) -> dict[str, Any]:
        """The state of a single optimizer, or the states of several by key."""
        if not self.are_several:
            return self.first.state_dict()
        return {str(key): one.state_dict() for key, one in self.by_key.items()}

    def names(self, model: nn.Module) -> dict[str, list[str]]:
        """The names of each optimizer's parameters, by key, in its order."""
        return {str(key): names_of(model, one) for key, one in self.by_key.items()}

    def moments(self) -> dict[str, Any]:
        """The optimizers' states of parameters, by key, without settings, which the script may change as it trains. A
        state without torch's key "state" is given whole.
        """
        states = {str(key): one.state_dict() for key, one in self.by_key.items()}
        return {key: {"state": one["state"]} if "state" in one else one for key, one in states.items()}

    def set_moments(
        self, moments: Mapping[str, Any], saved: Mapping[str, Sequence[str]], present: Mapping[str, Sequence[str]]
    ) -> None:
        """Replaces the states of parameters by those that `moments` returned on a rank where `names` are `saved`."""
        for key, one in self.by_key.items():
            own, given = one.state_dict(), moments[str(key)]
            given = in_order_of(given, saved[str(key)], present[str(key)])
            load_state(one, {**own, **given} if "state" in own else given)

    def settings(self) -> list[dict[str, Any]]:
        """The settings of each group of parameters, such as its learning rate."""
        groups = (group for one in self for group in one.param_groups)
        return [{name: value for name, value in group.items() if name != "params"} for group in groups]

    def set_settings(self, settings: Sequence[Mapping[str, Any]]) -> None:
        """Replaces the settings by those that `settings` returned."""
        for group, given in zip((group for one in self for group in one.param_groups), settings, strict=True):
            group.update(given)

    def load_state_dict(
        self,
        state: Mapping[str, Any],
        path: str,
        saved: Mapping[str, Sequence[str]],
        present: Mapping[str, Sequence[str]],
    ) -> str:
        """Loads the result of `state_dict`, of the checkpoint `path`, where `names` were `saved`. Returns text of the
        options, besides learning rates, that it had otherwise. Raises `ValueError` or `InvalidJob` if it is of other
        optimizers.
        """
        states = dict(state) if self.are_several else {"0": dict(state)}
        if set(states) != set(map(str, self.by_key)):
            raise ValueError(f"it has the optimizers {sorted(states)}, and the loop {sorted(map(str, self.by_key))}")
        others = []
        for key, one in self.by_key.items():
            groups = groups_in(states[str(key)], one)
            check_is_alike(one, groups, path)
            others.append(other_options(one, groups))
            load_state(one, in_order_of(states[str(key)], saved[str(key)], present[str(key)]))
        return ", ".join(filter(None, others))


def make_step(optimizer: Optimizer) -> None:
    """Steps the optimizer. Raises `Misuse` for LBFGS, which needs a closure from the loop."""
    if isinstance(optimizer, LBFGS):
        raise Misuse(
            "LBFGS needs a closure, which step() does not have: call average_gradients(), optimizer.step(lambda: loss) "
            "and finish_step() instead"
        )
    optimizer.step()


def problem_of_optimizers(given: Any, model: nn.Module) -> str:
    """Returns why these optimizers cannot train the model; "" when they can."""
    if isinstance(given, Optimizer):
        return _problem(given, model)
    if not isinstance(given, list | tuple | dict) or not given:
        return f"Trainer.setup needs a torch optimizer, or a list or dict of them, not {type(given).__name__}"
    values = list(given.values() if isinstance(given, dict) else given)
    return next((problem for one in values if (problem := _problem(one, model))), "")


def _steps_once(optimizer: LBFGS) -> bool:
    """True if the optimizer evaluates the loss once per step."""
    return all(group["max_iter"] == 1 and group["line_search_fn"] is None for group in optimizer.param_groups)


def _problem(optimizer: Any, model: nn.Module) -> str:
    if not isinstance(optimizer, Optimizer):
        return f"Trainer.setup needs a torch optimizer, built of the model's parameters, not {type(optimizer).__name__}"
    if isinstance(optimizer, LBFGS) and not _steps_once(optimizer):
        return (
            "LBFGS needs a closure and calls it several times per step, but gradients are averaged once: build it with "
            "max_iter=1 and without line_search_fn, and step by average_gradients(), "
            "optimizer.step(lambda: loss) and finish_step()"
        )
    own = {id(one) for one in model.parameters()}
    foreign = sum(id(one) not in own for group in optimizer.param_groups for one in group["params"])
    if foreign:
        return (
            f"the optimizer has {foreign} parameters that the model does not have: build it of model.parameters(). "
            "Where a loss is trained, too, let the model hold it, such as nn.ModuleDict({'net': net, 'loss': loss})"
        )
    return ""

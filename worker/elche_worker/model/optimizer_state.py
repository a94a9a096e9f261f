"""Checks that an optimizer's state in a checkpoint is of the job's optimizer, and puts it in that one's order."""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from elche.errors import InvalidJob

Groups = Sequence[Mapping[str, Any]]


def groups_in(state: Mapping[str, Any], optimizer: Optimizer) -> Groups:
    """The groups of an optimizer's saved state; the optimizer's own where the state has none, as that of a wrapper with
    a `state_dict` of its own form.
    """
    groups: Groups = state.get("param_groups", optimizer.param_groups)
    return groups


def sizes_of(optimizers: Iterable[Optimizer]) -> list[list[int]]:
    """The number of parameters of each group."""
    return [[len(group["params"]) for group in one.param_groups] for one in optimizers]


def names_of(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """The names of the optimizer's parameters, in its order; "" for those that are not in the model."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [names.get(parameter, "") for group in optimizer.param_groups for parameter in group["params"]]


def in_order_of(state: Mapping[str, Any], saved: Sequence[str], present: Sequence[str]) -> dict[str, Any]:
    """An optimizer's saved state with the moments of each parameter at its present place. torch numbers them, and the
    parameters of a group that is made of a set come in another order in each process. `saved` and `present` are
    results of `names_of`. A state of another form, or of parameters that no model has, stays as it is.
    """
    moments = state.get("state")
    if not isinstance(moments, Mapping) or list(saved) == list(present) or "" in (*saved, *present):
        return dict(state)
    places = {name: place for place, name in enumerate(saved)}
    numbers = set(places.values())
    others = {key: one for key, one in moments.items() if key not in numbers}
    moved = {at: moments[places[name]] for at, name in enumerate(present) if places.get(name) in moments}
    return {**state, "state": others | moved}


def check_is_alike(optimizer: Optimizer, saved: Groups, path: str) -> None:
    """Raises `InvalidJob` if the state is of another kind of optimizer, or of other groups of parameters. torch loads
    the former, and fails only in the first step, with a `KeyError` of a name that the state lacks.
    """
    sizes, had = ([len(group["params"]) for group in groups] for groups in (optimizer.param_groups, saved))
    if sizes != had:
        raise InvalidJob(
            f"the optimizer has changed since the checkpoint {path}: its groups had {_listed(had)} parameters, and the "
            f"job's have {_listed(sizes)}"
        )
    for group, then in zip(optimizer.param_groups, saved, strict=True):
        # `initial_lr` is put there by torch's schedulers.
        new, gone = sorted(group.keys() - then.keys()), sorted(then.keys() - group.keys() - {"initial_lr"})
        # Only one of them: another version of the same optimizer, or one that adds values to its groups.
        if new and gone:
            raise InvalidJob(
                f"the optimizer has changed since the checkpoint {path}: it had {', '.join(gone)}, and the job's "
                f"{type(optimizer).__name__} has {', '.join(new)}. Begin a new training, whose model has the "
                "checkpoint's weights"
            )


def other_options(optimizer: Optimizer, saved: Groups) -> str:
    """Text of the options, besides learning rates, in which the checkpoint differs from what the job gives."""
    given = inspect.signature(type(optimizer).__init__).parameters.keys() - {"params", "lr"}
    words = [
        f"{name}={then[name]} (the job has {group[name]})"
        for group, then in zip(optimizer.param_groups, saved, strict=True)
        for name in sorted((given & group.keys() & then.keys()) - _cycled(then))
        if _is_plain(then[name]) and _is_plain(group[name]) and then[name] != group[name]
    ]
    return ", ".join(dict.fromkeys(words))


def _cycled(group: Mapping[str, Any]) -> set[str]:
    """The options that a schedule of torch changes as it trains, besides the learning rate (OneCycleLR, CyclicLR)."""
    return {"momentum", "betas"} if "max_momentum" in group else set()


def _is_plain(value: Any) -> bool:
    return isinstance(value, bool | int | float | str | None) or (
        isinstance(value, tuple | list) and all(map(_is_plain, value))
    )


def _listed(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes))

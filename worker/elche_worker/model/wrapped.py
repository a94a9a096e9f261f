"""Loads the state of an optimizer that may hold others, as Lookahead does, and share with them what it has.

torch's `load_state_dict` puts new groups and a new state into the optimizer that it is called of: the optimizer within
would go on with its old moments, and with the rates of the checkpoint, whatever is set in the wrapper's groups.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch.optim import Optimizer

from elche.output import notice
from elche_worker.device.transfer import tensors_in

HOOKS = tuple(
    f"_optimizer_{method}_{when}_hooks"
    for method in ("step", "state_dict", "load_state_dict")
    for when in ("pre", "post")
)
"""Attributes that these methods of torch's `Optimizer` need, and that its `__init__` sets."""


_told: "WeakSet[Optimizer]" = WeakSet()
"""Those of which `tell_left_out` has told."""


def complete(optimizer: Optimizer) -> None:
    """Gives an optimizer what it lacks since it has not called torch's `__init__`, so that its state can be saved."""
    for one in _all_in(optimizer):
        for name in HOOKS:
            if not hasattr(one, name):
                setattr(one, name, OrderedDict())
        if not hasattr(one, "defaults"):
            one.defaults = {}


def load_state(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Loads a state. What the optimizer and those within it had in common, they have in common afterwards."""
    all_in = _all_in(optimizer)
    before = [(one.state, list(one.param_groups), one.param_groups) for one in all_in]
    optimizer.load_state_dict(dict(state))
    if len(all_in) == 1:
        return
    olds: dict[int, Any] = {}
    for one, (moments, groups, groups_list) in zip(all_in, before, strict=True):
        filled = [_filled(old, new) for old, new in zip(groups, one.param_groups, strict=True)]
        if one.param_groups is not groups_list:
            groups_list[:] = filled
        olds |= {id(one.param_groups): groups_list, id(one.state): _filled(moments, one.state)}
    for one in all_in:
        for name, value in vars(one).items():
            vars(one)[name] = olds.get(id(value), value)


@contextmanager
def on_trial(optimizer: Optimizer) -> Iterator[None]:
    """Context after which the optimizer and those within it have the attributes that they had."""
    before = [(one, dict(vars(one))) for one in _all_in(optimizer)]
    try:
        yield
    finally:
        for one, attributes in before:
            vars(one).clear()
            vars(one).update(attributes)


def tell_left_out(optimizer: Optimizer, saved: Any) -> None:
    """Says once if `saved`, the optimizer's own `state_dict()`, has nothing of the state of one within it."""
    tensors = list(tensors_in(saved))
    for inner in _all_in(optimizer)[1:]:
        own = list(tensors_in(list(inner.state.values())))
        is_saved = any(one is other or _are_equal(one, other) for one in own for other in tensors)
        if own and not is_saved and inner not in _told:
            _told.add(inner)
            outer, kind = type(optimizer).__name__, type(inner).__name__
            notice(
                f"{outer}.state_dict() has nothing of the {kind} within it, so that no checkpoint has its moments, and "
                f"a resumed training begins with none: let state_dict() and load_state_dict() of {outer} contain those "
                f"of {kind}"
            )


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True for equal values, as of a copy. Numbers, such as a step's, are equal by chance."""
    return bool(one.dim()) and one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)


def _filled(old: Any, new: Any) -> Any:
    """The old dict, with the new one's entries."""
    if old is not new:
        entries = dict(new)
        old.clear()
        old.update(entries)
    return old


def _all_in(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizer, and those that are its attributes, or theirs, or in lists or dicts there."""
    found = [optimizer]
    for one in found:
        for value in vars(one).values():
            inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
            found += [other for other in inner if isinstance(other, Optimizer) and not any(other is o for o in found)]
    return found

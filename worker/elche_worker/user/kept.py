"""Warns of variables that a job's functions keep between calls outside of `state`, which checkpoints do not have."""

import dis
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from types import CodeType, FunctionType
from typing import Any

from torch.optim import Optimizer

from elche_worker.user.job import JobDefinition

CALLED_AGAIN = ("train_step", "epoch_fn", "metrics_fn", "checkpoint_fn", "after_round")
"""Functions that are called again and again, so that a variable set in one call is there in the next."""


def kept_aside_notice(job: JobDefinition) -> str:
    """The warning, which names functions that change global variables or those of an enclosing function, and says what
    to do; "" if there are none.
    """
    kept = {name: _changed_by(getattr(job, name)) for name in CALLED_AGAIN}
    changes = [f"{name} changes {', '.join(changed)}" for name, changed in kept.items() if changed]
    if not changes:
        return ""
    return (
        f"{' and '.join(changes)}: no checkpoint has that, and it starts fresh when training is resumed or a rank is "
        "started again. What is to go on belongs to state=lambda model: {...}, and is found in this_rank().state"
    )


def other_optimizers_notice(job: JobDefinition, optimizers: Sequence[Optimizer]) -> str:
    """A warning on optimizers, other than the job's, that `train_step` takes from outside of it; "" for none."""
    found = dict(_optimizers_in(job.train_step, set()))
    named = [name for name, one in found.items() if all(one is not other for other in optimizers)]
    if not named:
        return ""
    return (
        f"train_step uses {' and '.join(sorted(named))}, which optimizer() does not return: what it steps differs from "
        "rank to rank, and is in no checkpoint. Let model() hold its parameters, too, as in "
        "nn.ModuleDict({'net': net, 'loss': loss}), and optimizer() return all optimizers"
    )


def _optimizers_in(function: Any, seen: set[CodeType]) -> Iterator[tuple[str, Optimizer]]:
    """Optimizers, by name, among the global and enclosing variables of a function, and of those it calls by name."""
    if not isinstance(function, FunctionType) or function.__code__ in seen:
        return
    code = function.__code__
    seen.add(code)
    enclosing = {}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # not set yet
            enclosing[name] = cell.cell_contents
    loaded = {one.argval for one in dis.get_instructions(code) if one.opname == "LOAD_GLOBAL"}
    outside = {name: function.__globals__[name] for name in loaded if name in function.__globals__} | enclosing
    for name, value in outside.items():
        if isinstance(value, Optimizer):
            yield name, value
        elif getattr(value, "__module__", None) == function.__module__:
            yield from _optimizers_in(value, seen)


def _changed_by(function: Callable[..., Any] | None) -> list[str]:
    """The global or enclosing variables that a function sets."""
    code = getattr(function, "__code__", None)
    if not isinstance(code, CodeType):
        return []
    return sorted({one.argval for one in dis.get_instructions(code) if _is_outside(code, one)})


def _is_outside(code: CodeType, one: dis.Instruction) -> bool:
    """True if the instruction sets a global variable, or one of an enclosing function."""
    return one.opname == "STORE_GLOBAL" or (one.opname == "STORE_DEREF" and one.argval in code.co_freevars)

"""Warns of variables that a job's functions keep between calls outside of `state`, which checkpoints do not have."""

import dis
from collections.abc import Callable
from types import CodeType
from typing import Any

from elche_worker.user.job import JobDefinition

CALLED_AGAIN = ("train_step", "epoch_fn", "metrics_fn", "checkpoint_fn", "after_round")
"""Functions that are called again and again, so that a variable set in one call is there in the next."""


def what_is_kept_aside(job: JobDefinition) -> str:
    """The warning, which names functions that change global variables or those of an enclosing function, and says what
    to do; "" if there are none.
    """
    kept = {name: _changed_by(getattr(job, name)) for name in CALLED_AGAIN}
    said = [f"{name} changes {', '.join(changed)}" for name, changed in kept.items() if changed]
    if not said:
        return ""
    return (
        f"{' and '.join(said)}: no checkpoint has that, and it begins anew when training is resumed or a rank is "
        "started again. What is to go on belongs to state=lambda model: {...}, and is found in this_rank().state"
    )


def _changed_by(function: Callable[..., Any] | None) -> list[str]:
    """The global or enclosing variables that a function sets."""
    code = getattr(function, "__code__", None)
    if not isinstance(code, CodeType):
        return []
    return sorted({one.argval for one in dis.get_instructions(code) if _is_outside(code, one)})


def _is_outside(code: CodeType, one: dis.Instruction) -> bool:
    return one.opname == "STORE_GLOBAL" or (one.opname == "STORE_DEREF" and one.argval in code.co_freevars)

"""What a job's functions keep from one call to the next beside `state`: it is said, since no checkpoint has it."""

import dis
from collections.abc import Callable
from types import CodeType
from typing import Any

from elche_worker.user.job import JobDefinition

CALLED_AGAIN = ("train_step", "epoch_fn", "metrics_fn", "checkpoint_fn", "after_round")


def what_is_kept_aside(job: JobDefinition) -> str:
    """Names the functions that change global variables, or those of a function around them, and says what to do; empty
    where none does.
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
    """The variables outside of it that a function sets."""
    code = getattr(function, "__code__", None)
    if not isinstance(code, CodeType):
        return []
    return sorted({one.argval for one in dis.get_instructions(code) if _is_outside(code, one)})


def _is_outside(code: CodeType, one: dis.Instruction) -> bool:
    return one.opname == "STORE_GLOBAL" or (one.opname == "STORE_DEREF" and one.argval in code.co_freevars)

"""Delays the import of PyTorch's compiler, which takes nearly as long as torch itself, until something needs it.

The first call of an optimizer imports `torch._dynamo`, only to keep the compiler from tracing the call. Nothing can be
compiled before that module is imported. So after `put_off` the calls skip the import; the first import of the module,
such as by `torch.compile`, restores PyTorch's functions.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch

COMPILER = "torch._dynamo"
MARK = "__dynamo_disable"
"""Attribute in which PyTorch's decorator keeps the function to call when the compiler is loaded."""
DECORATED = ("zero_grad", "add_param_group", "state_dict", "load_state_dict")
"""Methods of `torch.optim.Optimizer` that the decorator wraps, besides `step`."""
OF_STEP = frozenset(
    (COMPILER, "_dynamo", "graph_break", "cast", "Optimizer", "is_grad_enabled", "set_grad_enabled", "defaults")
)
"""All names that PyTorch's wrapper of `step` uses. One that uses others is of an unknown version, and is left alone."""


def put_off() -> bool:
    """Keeps optimizers from importing the compiler. False if it is imported, or they are of another version."""
    steps = [step for step in map(_step_of, _optimizers(torch.optim.Optimizer)) if step is not None]
    decorated: list[Any] = [getattr(torch.optim.Optimizer, name, None) for name in DECORATED]
    inner = [function.__wrapped__ for function in decorated if _is_decorated(function)]
    if COMPILER in sys.modules or not steps or len(inner) < len(DECORATED):
        return False
    for function in inner:
        setattr(function, MARK, function)
    before = [(step, step.__code__) for step in steps]
    for step in steps:
        step.__code__ = _PLAIN_STEP
    sys.meta_path.insert(0, _Restorer(before, inner))
    return True


class _Restorer(MetaPathFinder):
    """A finder that finds no module, but restores PyTorch's functions when the compiler is imported."""

    def __init__(self, steps: Sequence[tuple[FunctionType, CodeType]], inner: Sequence[Callable[..., Any]]) -> None:
        self._steps = steps
        self._inner = inner

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if name == COMPILER:
            for step, code in self._steps:
                step.__code__ = code
            for function in self._inner:
                function.__dict__.pop(MARK, None)
            self._steps, self._inner = (), ()


def _optimizers(kind: type) -> Iterator[type]:
    subclasses: list[type] = kind.__subclasses__()
    for one in subclasses:
        yield one
        yield from _optimizers(one)


def _step_of(kind: type) -> FunctionType | None:
    """The `step` that PyTorch has wrapped in an optimizer's class; None if inherited, or wrapped otherwise."""
    step = kind.__dict__.get("step")
    if not isinstance(step, FunctionType) or step.__code__.co_freevars != ("func",):
        return None
    return step if frozenset(step.__code__.co_names) == OF_STEP else None


def _is_decorated(function: Any) -> bool:
    is_known = isinstance(function, FunctionType) and "fn" in function.__code__.co_freevars
    return is_known and MARK in function.__code__.co_consts and hasattr(function, "__wrapped__")


def _plain(func: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `step` as PyTorch's decorator does without a compiler."""

    def _use_grad(*args: Any, **kwargs: Any) -> Any:
        before = torch.is_grad_enabled()
        try:
            torch.set_grad_enabled(args[0].defaults["differentiable"])
            return func(*args, **kwargs)
        finally:
            torch.set_grad_enabled(before)

    return _use_grad


_PLAIN_STEP: CodeType = _plain(print).__code__

"""How much work a call is, counted: a claim of being fast that is the same on every machine, however busy it is."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def lines_run(function: Callable[[], object]) -> int:
    """How many lines of Python the call runs, in this thread. Loops within C, such as NumPy's, count as one line."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


def values_read(function: Callable[[], object]) -> int:
    """How many values the tensor operations of the call take in, on whatever device."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Count(TorchDispatchMode):
        total = 0

        def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.total += sum(one.numel() for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor))
            return operation(*args, **(kwargs or {}))

    with Count() as count:
        function()
    return count.total

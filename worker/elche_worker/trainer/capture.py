"""Captures intermediate outputs of named modules by hooks: the last one (a tag), or one per call (a trace)."""

import difflib
from collections.abc import Sequence
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn

from elche.errors import Misuse

Tags = dict[str, Any]
Traces = dict[str, list[Any]]


class Capture:
    """Outputs of the named modules in the latest forward pass of `model`, as part of the autograd graph.

    A module that is called in a loop has one trace entry per call, and its last output as its tag.
    """

    def __init__(self, model: nn.Module, tags: Sequence[str] = (), traces: Sequence[str] = ()) -> None:
        self.tags: Tags = {}
        self.traces: Traces = {}
        self.tag_names = tuple(tags)
        self.trace_names = tuple(traces)
        modules = dict(getattr(model, "_orig_mod", model).named_modules())  # names in the uncompiled module
        for name in (*tags, *traces):
            if name not in modules:
                near = difflib.get_close_matches(name, modules, n=3) or sorted(name for name in modules if name)[:10]
                raise Misuse(f"the model has no module {name!r}; it has {', '.join(map(repr, near))}")
        self._hooks = [model.register_forward_pre_hook(self.forget)] if self else []
        for name in dict.fromkeys((*tags, *traces)):
            self._hooks.append(modules[name].register_forward_hook(self._hook(name)))

    def __bool__(self) -> bool:
        return bool(self.tag_names or self.trace_names)

    def close(self) -> None:
        """Removes its hooks from the model."""
        while self._hooks:
            self._hooks.pop().remove()

    def forget(self, *_: Any) -> None:
        """Drops the outputs of the latest forward pass."""
        self.tags, self.traces = {}, {}

    def detach(self) -> None:
        """Detaches the outputs from their graph."""
        self.tags = detached(self.tags)
        self.traces = detached(self.traces)

    def _hook(self, name: str) -> Any:
        def on_output(module: nn.Module, arguments: Any, output: Any) -> None:
            if name in self.tag_names:
                self.tags[name] = output
            if name in self.trace_names:
                self.traces.setdefault(name, []).append(output)

        return on_output


class Caught:
    """Targets, outputs, tags and traces of the batches of one step, detached."""

    def __init__(self) -> None:
        self.targets: list[dict[str, Any]] = []
        self.outputs: list[Any] = []
        self.tags: dict[str, list[Any]] = {}
        self.traces: dict[tuple[str, int], list[Any]] = {}

    def num_calls(self, name: str) -> int:
        """The most calls of a traced module in one forward pass."""
        return sum(1 for traced, _ in self.traces if traced == name)

    def add(self, targets: dict[str, Any], output: Any, capture: Capture) -> None:
        """Adds a batch."""
        self.targets.append(targets)
        self.outputs.append(detached(output))
        for name, value in capture.tags.items():
            self.tags.setdefault(name, []).append(detached(value))
        for name, calls in capture.traces.items():
            for call, value in enumerate(calls):
                self.traces.setdefault((name, call), []).append(detached(value))


def detached(value: Any) -> Any:
    """The same structure with detached tensors."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, dict):
        return type(value)({key: detached(one) for key, one in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(detached, value))
    if isinstance(value, list | tuple):
        return type(value)(map(detached, value))
    if is_dataclass(value) and not isinstance(value, type):
        return _filled(value, {name: detached(one) for name, one in _fields(value).items()})
    return value


def joined(values: Sequence[Any], sizes: Sequence[int] = ()) -> Any:
    """Concatenates the batches' values (dimension 0), structures entry by entry; returns a single value unchanged.

    With the batches' `sizes`, scalars of each batch, such as a loss that the model returns, become their mean over
    samples; without, a tensor of all of them.
    """
    if len(values) == 1:
        return values[0]
    first = values[0]
    if isinstance(first, torch.Tensor):
        if first.dim() == 0:
            return _mean(values, sizes) if sizes else torch.stack(list(values))
        return torch.cat(list(values))
    if isinstance(first, dict):
        return type(first)({key: joined([one[key] for one in values], sizes) for key in first})
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(joined(column, sizes) for column in zip(*values, strict=True)))
    if isinstance(first, list | tuple):
        if not any(isinstance(one, torch.Tensor) for one in first):
            return type(first)(entry for one in values for entry in one)
        return type(first)(joined(column, sizes) for column in zip(*values, strict=True))
    if is_dataclass(first) and not isinstance(first, type):
        return _filled(first, {name: joined([getattr(one, name) for one in values], sizes) for name in _fields(first)})
    if sizes and isinstance(first, int | str | None) and all(one == first for one in values):
        return first  # None, a number of layers, a flag
    if sizes and isinstance(first, float):
        return _mean(values, sizes)
    return list(values)


def _mean(values: Sequence[Any], sizes: Sequence[int]) -> Any:
    """The mean over the samples of all batches."""
    return sum(value * (size / sum(sizes)) for value, size in zip(values, sizes, strict=True))


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in fields(value)}


def _filled(value: Any, contents: dict[str, Any]) -> Any:
    """The same object with other contents, frozen or not."""
    filled = copy(value)
    for name, one in contents.items():
        object.__setattr__(filled, name, one)
    return filled

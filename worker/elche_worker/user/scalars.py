"""Scalars that user code records while it trains, summed until the rank reports them."""

from typing import Any

import torch

MAX_SCALARS = 1000
"""Most names in one batch, and in one epoch of a rank."""
MAX_NAME_CHARS = 200
"""Most characters of a name."""
Sum = tuple[float | torch.Tensor, int]
"""(sum, number) of values; the sum of tensors stays on their device."""

_recorded: dict[str, Sum] = {}
"""Values recorded since `take_scalars`, by name."""


def record_scalar(name: str, value: float | torch.Tensor) -> None:
    """Records a value under a name; the epoch's mean over all ranks is reported. Does not synchronise for a tensor.

    Raises `ValueError` for a tensor with more or less than one value, for what is no number, and for names that are too
    many or too long.
    """
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise ValueError(f"record_scalar({name!r}): a tensor of shape {tuple(value.shape)} is not a scalar")
        value = wide(value)
    elif (number := number_of(value)) is None:
        raise ValueError(f"record_scalar({name!r}): the value must be a number, not {described(value)}")
    else:
        value = number
    if name not in _recorded:
        _check_name(name)
    total, count = _recorded.get(name, (0.0, 0))
    _recorded[name] = (total + value, count + 1)


def _check_name(name: str) -> None:
    if len(name) > MAX_NAME_CHARS:
        raise ValueError(
            f"record_scalar({name[:40]!r}...): {len(name)} characters; at most {MAX_NAME_CHARS} are possible"
        )
    if len(_recorded) >= MAX_SCALARS:
        raise ValueError(f"record_scalar({name!r}): more than {MAX_SCALARS} names were recorded in one batch")


def wide(value: torch.Tensor) -> torch.Tensor:
    """A tensor's only value, without its graph and in the widest precision of its kind of device, as sums need it.

    A sum in bf16 leaves out all that is added to it once it has 256 equal values.
    """
    # MPS has no float64, nor have some of Intel's cards.
    widest = torch.float64 if value.device.type in ("cpu", "cuda") else torch.float32
    return value.detach().reshape(()).to(widest)


def number_of(value: Any) -> float | None:
    """The value as a float: a Python or numpy number, or a tensor with one element; None for anything else."""
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        return None
    try:
        return float(without_graph(value))
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None


def without_graph(value: Any) -> Any:
    """The value, detached if it is a tensor, such as a loss: torch warns where one with a graph becomes a number."""
    return value.detach() if isinstance(value, torch.Tensor) else value


def described(value: Any) -> str:
    """Describes a value that is not a number, for an error."""
    if isinstance(value, int):
        return "one too large for a float"
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


def take_scalars() -> dict[str, Sum]:
    """Removes and returns (sum, count) of the values recorded since the last call, by name."""
    global _recorded
    taken, _recorded = _recorded, {}
    return taken

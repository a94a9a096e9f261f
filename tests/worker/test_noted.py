"""Calls of PyTorch's methods are noted, with their arguments."""

from typing import Any
from weakref import WeakSet

import pytest

from elche_worker.trainer.noted import _note_calls


class Optimizer:
    pass


class Scaler:
    is_enabled = True

    def unscale_(self, optimizer: Any) -> None:
        pass


def test_an_argument_is_noted_however_it_is_given_and_one_that_is_missing_is_named() -> None:
    """It was an IndexError of elche's."""
    noted: WeakSet[Any] = WeakSet()
    _note_calls(Scaler, "unscale_", noted, 1, lambda scaler: scaler.is_enabled)
    scaler, first, second, third = Scaler(), Optimizer(), Optimizer(), Optimizer()
    scaler.unscale_(first)
    scaler.unscale_(optimizer=second)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'optimizer'"):
        scaler.unscale_()  # type: ignore[call-arg]
    scaler.is_enabled = False
    scaler.unscale_(third)
    assert set(noted) == {first, second}

"""How many bytes a message takes in memory: an estimate that is made in a microsecond or two and errs upwards."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache
from operator import attrgetter
from sys import getsizeof
from types import NoneType, UnionType
from typing import Any, NewType, Union, get_args, get_origin, get_type_hints

NUMBER_BYTES = 32
"""Of an int or a float."""
HEADER_BYTES = 16
"""That the garbage collector puts before an object."""

FIXED = (int, float, bool, NoneType)


def weight(value: Any) -> int:
    """The bytes of a message and of everything in it, as if nothing of it were shared."""
    kind: Any = type(value)
    if kind is str:
        return getsizeof(value)
    if kind is float or kind is int:
        return NUMBER_BYTES
    if kind is tuple:
        return _sequence_weight(value)
    if kind is dict:
        return getsizeof(value) + sum(weight(name) + weight(one) for name, one in value.items())
    if value is None or kind is bool or not is_dataclass(value):
        return NUMBER_BYTES
    own, parts = _shape(kind)
    return own if parts is None else own + sum(map(weight, parts(value)))


def _sequence_weight(values: tuple[Any, ...]) -> int:
    own = getsizeof(values)
    if not values:
        return own
    first = type(values[0])
    if first is float or first is int:
        return own + NUMBER_BYTES * len(values)
    if is_dataclass(first) and _shape(first)[1] is None:
        return own + _shape(first)[0] * len(values)
    return own + sum(map(weight, values))


@cache
def _shape(kind: Any) -> tuple[int, Callable[[Any], tuple[Any, ...]] | None]:
    """The bytes of an object of the class with its numbers, and what gives its other fields; None without such."""
    hints = get_type_hints(kind)
    varying = [field.name for field in fields(kind) if not _is_fixed(hints[field.name])]
    own = kind.__basicsize__ + HEADER_BYTES + NUMBER_BYTES * (len(fields(kind)) - len(varying))
    if not varying:
        return own, None
    get = attrgetter(*varying)
    return own, get if len(varying) > 1 else lambda value: (get(value),)


def _is_fixed(hint: Any) -> bool:
    if isinstance(hint, NewType):
        return _is_fixed(hint.__supertype__)
    if get_origin(hint) in (Union, UnionType):
        return all(map(_is_fixed, get_args(hint)))
    return hint in FIXED

"""Estimates how many bytes a message takes in memory, within about a microsecond; errs upwards.

What all objects of a class have in common is computed once. For each message only its tuples, texts, mappings and
optional parts are measured.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from operator import attrgetter
from sys import getsizeof
from types import NoneType, UnionType
from typing import Any, NewType, Union, get_args, get_origin, get_type_hints

NUMBER_BYTES = 32
"""Size of an int or a float. Ids, whose texts are shared, count as much."""
HEADER_BYTES = 16
"""Header that the garbage collector puts before an object."""
POINTER_BYTES = 8
TUPLE_BYTES = 56
"""Size of a tuple without its pointers."""

FIXED = (int, float, bool, NoneType)


def weight(value: Any) -> int:
    """Bytes of a message and of everything in it, as if nothing were shared."""
    kind: Any = type(value)
    own, parts = _shape(kind)
    for get in parts:
        own += _weight_of(get(value))
    return own


@cache
def _shape(kind: Any) -> tuple[int, tuple[Callable[[Any], Any], ...]]:
    """The bytes that all objects of a message class have in common, and getters of the other parts."""
    hints = get_type_hints(kind)
    sizes = {field.name: _fixed_bytes(hints[field.name]) for field in fields(kind)}
    own = kind.__basicsize__ + HEADER_BYTES + sum(size for size in sizes.values() if size is not None)
    return own, tuple(attrgetter(name) for name, size in sizes.items() if size is None)


def _fixed_bytes(hint: Any) -> int | None:
    """Bytes of every value of a type; None if they differ."""
    if isinstance(hint, NewType) or hint in FIXED:
        return NUMBER_BYTES
    if get_origin(hint) in (Union, UnionType):
        return NUMBER_BYTES if all(_fixed_bytes(one) == NUMBER_BYTES for one in get_args(hint)) else None
    if not is_dataclass(hint):
        return None
    kind: Any = hint
    own, parts = _shape(kind)
    return None if parts else own


def _weight_of(value: Any) -> int:
    """Bytes of a part whose size its type does not say."""
    if value is None:
        return 0
    if isinstance(value, str | bytes):
        return getsizeof(value)
    if isinstance(value, tuple):
        return TUPLE_BYTES + POINTER_BYTES * len(value) + _weight_of_items(value)
    if isinstance(value, Mapping):
        return getsizeof(value) + sum(_weight_of(name) + _weight_of(one) for name, one in value.items())
    return weight(value) if is_dataclass(value) else NUMBER_BYTES


def _weight_of_items(values: tuple[Any, ...]) -> int:
    """Bytes of what is in a tuple. Of many numbers, or messages of one size, the first stands for all."""
    kind: Any = type(values[0]) if values else int
    fixed = _fixed_bytes(kind)
    return sum(map(_weight_of, values)) if fixed is None else fixed * len(values)

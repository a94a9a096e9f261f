"""Estimates how many bytes a message takes in memory, within about a microsecond; errs upwards.

The size of a class is computed once. For each message only its tuples, texts, mappings and optional parts are measured.
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

Weigh = Callable[[Any], int]
FIXED = (int, float, bool, NoneType)


def weight(value: Any) -> int:
    """Bytes of a message and of everything in it, as if nothing were shared."""
    kind: Any = type(value)
    own, parts = _shape(kind)
    for get, weigh in parts:
        own += weigh(get(value))
    return own


@cache
def _shape(kind: Any) -> tuple[int, tuple[tuple[Callable[[Any], Any], Weigh], ...]]:
    """The bytes that all objects of a message class have in common, and functions that measure the other parts."""
    hints = get_type_hints(kind)
    own, parts = kind.__basicsize__ + HEADER_BYTES, []
    for field in fields(kind):
        num_bytes = _fixed_bytes(hints[field.name])
        if num_bytes is None:
            parts.append((attrgetter(field.name), _weigher(hints[field.name])))
        else:
            own += num_bytes
    return own, tuple(parts)


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


def _weigher(hint: Any) -> Weigh:
    """A function that measures values of a type whose sizes differ."""
    if hint is str:
        return getsizeof
    if get_origin(hint) in (Union, UnionType):
        kinds = [one for one in get_args(hint) if one is not NoneType]
        inner = _weigher_of_any(kinds[0]) if len(kinds) == 1 else weight
        return lambda value: 0 if value is None else inner(value)
    if get_origin(hint) is tuple:
        return _tuple_weigher(get_args(hint))
    if get_origin(hint) in (dict, Mapping):
        of_name, of_value = map(_weigher_of_any, get_args(hint))
        return lambda value: getsizeof(value) + sum(of_name(name) + of_value(one) for name, one in value.items())
    return weight if is_dataclass(hint) else _any_weight


def _weigher_of_any(hint: Any) -> Weigh:
    num_bytes = _fixed_bytes(hint)
    return _weigher(hint) if num_bytes is None else lambda _: num_bytes


def _tuple_weigher(hints: tuple[Any, ...]) -> Weigh:
    if hints[-1] is not ...:
        each = [_weigher_of_any(hint) for hint in hints]
        return lambda value: (
            TUPLE_BYTES + sum(POINTER_BYTES + weigh(one) for weigh, one in zip(each, value, strict=True))
        )
    num_bytes = _fixed_bytes(hints[0])
    if num_bytes is not None:
        return lambda value: TUPLE_BYTES + (POINTER_BYTES + num_bytes) * len(value)
    weigh = _weigher(hints[0])
    return lambda value: TUPLE_BYTES + sum(POINTER_BYTES + weigh(one) for one in value)


def _any_weight(value: Any) -> int:
    """Bytes of a value of unknown type, such as JSON; there are few, and they are small."""
    if isinstance(value, Mapping):
        return getsizeof(value) + sum(getsizeof(name) + _any_weight(one) for name, one in value.items())
    return getsizeof(value)

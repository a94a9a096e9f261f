"""Converts events and commands to JSON and back: one coder for all of them, driven by their fields and types.

A message is `{"NAME": {FIELD: VALUE}}`, without fields that have their default. NaN and infinity are texts,
bytes are base64.
"""

from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from functools import cache
from math import isfinite
from types import NoneType, UnionType
from typing import Any, NewType, TypeVar, Union, get_args, get_origin, get_type_hints

from elche_coordinator.core.messages.commands import Command
from elche_coordinator.core.messages.events import Event, HeaderReported, LeaveRequested, SlotsRequested, StacksReported

Message = TypeVar("Message")

EVENTS: dict[str, type] = {kind.__name__: kind for kind in get_args(Event)}
FORMER_EVENTS: dict[str, type] = {
    "HeaderTold": HeaderReported,
    "LeaveAsked": LeaveRequested,
    "SlotsAsked": SlotsRequested,
    "StacksTold": StacksReported,
}
"""Former names of events, which older journals have."""
COMMANDS: dict[str, type] = {kind.__name__: kind for kind in get_args(Command)}


def encode(message: Any) -> dict[str, Any]:
    """The message as JSON values, tagged with the name of its type."""
    return {type(message).__name__: _encode_fields(message)}


def decode(kinds: Mapping[str, type], tagged: Any) -> Any:
    """The message, of one of these types, that `encode` was given. Raises `ValueError` for other content."""
    if not isinstance(tagged, dict) or len(tagged) != 1 or (name := next(iter(tagged))) not in kinds:
        raise ValueError(f"{str(tagged)[:80]} is none of {', '.join(kinds)}")
    try:
        return decode_fields(kinds[name], tagged[name])
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"this is not a {name}: {error}") from None


def _encode_fields(value: Any) -> dict[str, Any]:
    found = {}
    kind: Any = type(value)
    for name, default, hint in _shape(kind):
        part = getattr(value, name)
        if part != (usual := default()) or repr(part) != repr(usual):  # 0 and 0.0 are equal, but differ as JSON
            found[name] = encode(part) if _is_tagged(hint) else plain(part)
    return found


def plain(value: Any) -> Any:
    """The value as JSON values: keys become texts, and sequences lists."""
    if isinstance(value, float) and not isfinite(value):
        return repr(value)
    if isinstance(value, bytes):
        return b64encode(value).decode()
    if isinstance(value, tuple | list):
        return [plain(one) for one in value]
    if isinstance(value, dict):
        return {str(name): plain(one) for name, one in value.items()}
    return _encode_fields(value) if is_dataclass(value) else value


def decode_fields(kind: type[Message], state: Mapping[str, Any]) -> Message:
    """A message, or a value in one, of its fields as JSON values. Raises `TypeError`, `KeyError` and others for other
    content.
    """
    of: Any = kind
    hints = {name: hint for name, _, hint in _shape(of)}
    return kind(**{name: _decode(hints[name], value) for name, value in state.items()})


def _decode(hint: Any, value: Any) -> Any:
    if isinstance(hint, NewType):
        return _decode(hint.__supertype__, value)
    if get_origin(hint) in (Union, UnionType):
        return None if value is None else _decode_one_of(get_args(hint), value)
    if is_dataclass(hint):
        return decode_fields(hint, value)  # type: ignore[arg-type]  # it is a type
    if get_origin(hint) is tuple:
        kinds = get_args(hint)
        return tuple(_decode(kinds[0] if kinds[-1] is ... else kind, one) for kind, one in _paired(kinds, value))
    if get_origin(hint) in (dict, Mapping):
        of_key, of_value = get_args(hint)
        return {_decode_key(of_key, name): _decode(of_value, one) for name, one in value.items()}
    if hint is bytes:
        return b64decode(value)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint(value)
    return float(value) if hint is float and isinstance(value, str) else value


def _paired(kinds: tuple[Any, ...], values: list[Any]) -> list[tuple[Any, Any]]:
    return [(kinds[0], one) for one in values] if kinds[-1] is ... else list(zip(kinds, values, strict=True))


def _decode_one_of(hints: tuple[Any, ...], value: Any) -> Any:
    """A value of a union: tagged if the union has several message types, else plain or None."""
    kinds = [hint for hint in hints if hint is not NoneType]
    if len(kinds) > 1:
        return decode({kind.__name__: kind for kind in kinds}, value)
    return _decode(kinds[0], value)


def _decode_key(hint: Any, name: str) -> Any:
    hint = getattr(hint, "__supertype__", hint)
    return int(name) if hint is int else name


def _is_tagged(hint: Any) -> bool:
    return sum(is_dataclass(kind) for kind in get_args(hint)) > 1


@cache
def _shape(kind: Any) -> tuple[tuple[str, Callable[[], object], Any], ...]:
    """Each field's name, a function that makes its default, and its type."""
    hints = get_type_hints(kind)
    return tuple((field.name, _default_of(field), hints[field.name]) for field in fields(kind))


def _default_of(field: "Field[Any]") -> Callable[[], object]:
    if field.default_factory is not MISSING:
        return field.default_factory
    return lambda: field.default

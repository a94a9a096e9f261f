"""Converts between messages and dataclasses by the names of their fields.

Common fields are converted; others are given by the caller, have their default, or are left out. A repeated field is a
tuple, a map a dict. A nested message is a dataclass, or a tuple of fixed length with the message's fields in order.
None is an absent field, or the zero of a field that cannot be absent.

tests/coordinator/test_mapping.py lists, and checks, the fields that only one side has.
"""

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

Value = TypeVar("Value")
Made = TypeVar("Made", bound=Message)
Convert = Callable[[Any], Any]


def from_message(message: Message, kind: type[Value], **given: Any) -> Value:
    """Converts a message to a dataclass. `given` has the fields that the message lacks, or has in another form."""
    key: Any = kind
    names, get_plain, others = _reader(key, message.DESCRIPTOR)
    values = dict(zip(names, get_plain(message), strict=True))
    for name, get in others:
        if name not in given:
            values[name] = get(message)
    return kind(**(values | given))


def to_message(value: Any, kind: type[Made], **given: Any) -> Made:
    """Converts a dataclass to a message. `given` has the fields that the dataclass lacks, or has in another form."""
    key: Any = type(value)
    names, get_plain, others = _writer(key, kind.DESCRIPTOR)
    values = dict(zip(names, get_plain(value), strict=True))
    for name, put in others:
        if name not in given:
            values[name] = put(getattr(value, name))
    return kind(**(values | given))


def prepare_to_message(kind: Any, message: type[Message]) -> None:
    """Builds the converters in advance, which takes milliseconds, for processes that are forked later."""
    _writer(kind, message.DESCRIPTOR)


def common_fields(kind: Any, descriptor: Any) -> tuple[str, ...]:
    """The names that a dataclass and a message both have, in the dataclass's order."""
    return tuple(one.name for one in fields(kind) if one.name in descriptor.fields_by_name)


# Fields whose values are the same on both sides are read at once: they are most of what ranks and coordinator say.

Plan = tuple[tuple[str, ...], Callable[[Any], tuple[Any, ...]], tuple[tuple[str, Convert], ...]]
"""Names of such fields, a function that gets their values, and the other fields with their converters."""


@cache
def _reader(kind: Any, descriptor: Any) -> Plan:
    return _plan(_getters(kind, descriptor), lambda name, get: isinstance(get, attrgetter))


@cache
def _writer(kind: Any, descriptor: Any) -> Plan:
    fields_by_name = descriptor.fields_by_name
    return _plan(_putters(kind, descriptor), lambda name, put: _is_plain(fields_by_name[name]))


def _plan(converters: tuple[tuple[str, Convert], ...], is_plain: Callable[[str, Convert], bool]) -> Plan:
    names = tuple(name for name, convert in converters if is_plain(name, convert))
    others = tuple((name, convert) for name, convert in converters if name not in names)
    return names, _all_of(names), others


def _all_of(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    if len(names) > 1:
        return attrgetter(*names)
    return lambda value: tuple(getattr(value, name) for name in names)


def _is_plain(field: FieldDescriptor) -> bool:
    return field.message_type is None and not field.is_repeated


# From messages


@cache
def _getters(kind: Any, descriptor: Any) -> tuple[tuple[str, Convert], ...]:
    hints = get_type_hints(kind)
    return tuple(
        (name, _getter(descriptor.fields_by_name[name], hints[name])) for name in common_fields(kind, descriptor)
    )


def _getter(field: FieldDescriptor, hint: Any) -> Convert:
    """A function that returns a field's value of a message."""
    name, (type_, may_be_none) = field.name, _without_none(hint)
    convert = _reading(field, type_)
    if may_be_none and field.has_presence:
        return lambda message: convert(getattr(message, name)) if message.HasField(name) else None
    if may_be_none:
        return lambda message: convert(getattr(message, name)) or None
    if _is_plain(field):
        return attrgetter(name)
    return lambda message: convert(getattr(message, name))


def _reading(field: FieldDescriptor, type_: Any) -> Convert:
    """A function that converts a message's value to the dataclass's."""
    if (of_map := _map_value(field)) is not None:
        read = _reading_one(of_map, get_args(type_)[1])
        return lambda values: {key: read(value) for key, value in values.items()}
    if field.is_repeated and field.message_type is None:
        return tuple
    if field.is_repeated:
        read = _reading_one(field, get_args(type_)[0])
        return lambda values: tuple(map(read, values))
    return _reading_one(field, type_)


def _reading_one(field: FieldDescriptor, type_: Any) -> Convert:
    if field.message_type is None:
        return lambda value: value
    if is_dataclass(type_):
        kind: Any = type_
        getters = _getters(kind, field.message_type)
        return lambda message: kind(**{name: get(message) for name, get in getters})
    names = [one.name for one in field.message_type.fields]
    return lambda message: tuple(getattr(message, name) for name in names)


# To messages


@cache
def _putters(kind: Any, descriptor: Any) -> tuple[tuple[str, Convert], ...]:
    return tuple((name, _writing(descriptor.fields_by_name[name])) for name in common_fields(kind, descriptor))


def _writing(field: FieldDescriptor) -> Convert:
    """A function that converts the dataclass's value to the message's. None stays None: the field is left unset."""
    if (of_map := _map_value(field)) is not None:
        write = _writing_one(of_map)
        return lambda values: {key: write(value) for key, value in values.items()}
    write = _writing_one(field)
    if field.is_repeated:
        return lambda values: [write(value) for value in values]
    return lambda value: None if value is None else write(value)


def _writing_one(field: FieldDescriptor) -> Convert:
    descriptor = field.message_type
    if descriptor is None:
        return lambda value: value
    kind: Any = GetMessageClass(descriptor)
    names = [one.name for one in descriptor.fields]

    def write(value: Any) -> Message:
        is_plain = isinstance(value, tuple | list)
        made: Message = kind(**dict(zip(names, value, strict=True))) if is_plain else to_message(value, kind)
        return made

    return write


# Of both


def _map_value(field: FieldDescriptor) -> FieldDescriptor | None:
    """The field of a map's values; None if the field is not a map."""
    entry: Descriptor | None = field.message_type
    if entry is None or not entry.GetOptions().map_entry:
        return None
    return entry.fields_by_name["value"]


def _without_none(hint: Any) -> tuple[Any, bool]:
    """The type without None, and True if None is one of its values."""
    if get_origin(hint) is tuple or type(None) not in get_args(hint):
        return hint, False
    return next(one for one in get_args(hint) if one is not type(None)), True

"""Fuzzing: valid messages and files, changed at random, and bounds of what a decoder may take for one."""

import json
import os
import resource
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "0"))
"""Examples of each test of `make fuzz`; 0: the gate's own number, which are always the same ones."""
CHANGES = int(os.environ.get("FUZZ_CHANGES", "4"))
"""Most changes of one example; more where coverage guides, which adds one change to another."""
PROCESSOR_S = float(os.environ.get("FUZZ_PROCESSOR_S", "2"))
"""Processor time that an example may take: a hang, as the usual one takes milliseconds."""
MEMORY_BYTES = 1 << 30
"""Address space that a test may take beyond what the process has."""
DEEP = "fuzz-deep-nesting"
"""Becomes a list within lists, thousands deep, in a JSON text."""
NESTED = 100_000
INTEGERS = (0, 1, -1, 2, 7, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1)
FLOATS = (0.0, -0.0, -1.0, 0.5, 1e308, -1e308, 5e-324, float("nan"), float("inf"), float("-inf"))
TEXTS = (
    "",
    "\0",
    "x" * 5000,
    "../../etc/passwd",
    "ü" * 300,
    "\U0001f4a5",
    "{}",
    "[" * 2000,
    "9" * 5000,
    "-1",
    "1 2",
    "nan",
)
BYTES = (b"", b"\0", b"\xff" * 9, b"\x80\x80\x80\x80\x80\x80\x80\x80\x80\x01", b"\0" * 5000, b"[" * 5000)
VALUES = (
    None,
    True,
    *INTEGERS,
    10**30,
    -(2**63) - 1,
    *FLOATS,
    *TEXTS,
    "\ud800",
    DEEP,
    [],
    {},
    [[]],
    {"": None},
    [1, [2, {"a": 3}]],
)


class TookTooLong(BaseException):
    """A decoder has used more processor time than any input is worth."""


def fuzzed(gate: int) -> Callable[[Any], Any]:
    """Settings of a test: so many examples in the gate, the same each time; random ones in `make fuzz`."""
    return settings(
        max_examples=EXAMPLES or gate,
        derandomize=not EXAMPLES,
        database=None,
        deadline=None,
        print_blob=True,
        phases=[Phase.generate, Phase.shrink],  # without those that trace each line
        suppress_health_check=list(HealthCheck),
    )


@contextmanager
def bounded_memory() -> Iterator[None]:
    """A `MemoryError` is raised in the context for what needs more than `MEMORY_BYTES`."""
    with open("/proc/self/statm", encoding="ascii") as file:
        size_bytes = int(file.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size_bytes + MEMORY_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@contextmanager
def bounded_time() -> Iterator[None]:
    """`TookTooLong` is raised in the context after `PROCESSOR_S`."""

    def stop(*_: object) -> None:
        raise TookTooLong(f"{PROCESSOR_S} s of processor time")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, PROCESSOR_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def tried(decode: Callable[[], object], *documented: type[Exception]) -> object:
    """What `decode` returns; None where it raises an error that it documents. Others are faults, and come through."""
    with bounded_time():
        try:
            return decode()
        except documented as error:
            text = str(error)
    assert text.strip(), "an error says nothing"
    assert len(text) < 8192, "an error repeats all of its input"
    return None


# Bytes


def changed_bytes(corpus: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    """One of these contents, changed in one to `CHANGES` places."""
    places = st.lists(
        st.tuples(st.integers(0, 8), st.integers(0, 2**20), st.integers(0, 2**16)), min_size=1, max_size=CHANGES
    )
    return st.builds(partial(_change_bytes, corpus), st.integers(0, 2**20), places)


def _change_bytes(corpus: Sequence[bytes], which: int, places: Sequence[tuple[int, int, int]]) -> bytes:
    data = corpus[which % len(corpus)]
    for kind, place, value in places:
        data = _change_place(data, kind, place % (len(data) + 1), value, corpus)
    return data


def _change_place(data: bytes, kind: int, at: int, value: int, corpus: Sequence[bytes]) -> bytes:
    length = value % 64
    match kind:
        case 0:
            return data[:at] + bytes([data[at] ^ 1 << value % 8]) + data[at + 1 :] if at < len(data) else data
        case 1:
            return data[:at]
        case 2:
            return data[:at] + data[at + 1 + length :]
        case 3:
            return data[:at] + data[at : at + length] * 2 + data[at + length :]
        case 4:
            return data[:at] + BYTES[value % len(BYTES)] + data[at:]
        case 5:
            number = INTEGERS[value % len(INTEGERS)] % 2**64
            return data[:at] + number.to_bytes(8, "little") + data[at + 8 :]
        case 6:
            number = INTEGERS[value % len(INTEGERS)] % 2**32
            return data[:at] + number.to_bytes(4, "little") + data[at + 4 :]
        case 7:
            other = corpus[value % len(corpus)]
            return data[:at] + other[at % (len(other) + 1) :]
        case _:
            return data[:at] + bytes([value % 256]) + data[at + 1 :]


# JSON


def changed_json(*corpus: Any) -> st.SearchStrategy[str]:
    """One of these values as JSON, in which one to three nodes are others, are twice, or are gone."""
    places = st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 2**16), st.integers(0, 2**16)), min_size=1, max_size=3
    )
    return st.builds(partial(_change_json, corpus), st.integers(0, 2**10), places)


def changed_value(*corpus: Any) -> st.SearchStrategy[Any]:
    """As `changed_json`, before it becomes a text; nothing in it is nested deeply."""
    return changed_json(*corpus).map(lambda text: json.loads(as_text(text, depth=3)))


def _change_json(corpus: Sequence[Any], which: int, places: Sequence[tuple[int, int, int]]) -> str:
    root = [json.loads(json.dumps(corpus[which % len(corpus)]))]
    for kind, place, value in places:
        nodes = list(_nodes(root))
        holder, key = nodes[place % len(nodes)]
        _change_node(root, holder, key, kind, value)
    return json.dumps(root[0]) if root else ""


def _nodes(root: Any) -> Iterator[tuple[Any, Any]]:
    """Each node of a tree of lists and dictionaries, as its holder and its key there."""
    for key in list(root) if isinstance(root, dict) else range(len(root)):
        yield root, key
        if isinstance(root[key], list | dict):
            yield from _nodes(root[key])


def _change_node(root: list[Any], holder: Any, key: Any, kind: int, value: int) -> None:
    match kind:
        case 0 if holder is not root:
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[TEXTS[value % len(TEXTS)]] = holder.pop(key)
        case 2 if isinstance(holder, list) and holder is not root:
            holder[key:key] = json.loads(json.dumps(holder[key : key + 1])) * (1 + value % 50)
        case 3:
            nodes = list(_nodes(root))
            other, place = nodes[value % len(nodes)]
            holder[key] = json.loads(json.dumps(other[place]))
        case _:
            holder[key] = json.loads(json.dumps(VALUES[value % len(VALUES)]))


def as_text(text: str, depth: int = NESTED) -> str:
    """The JSON text with what stands for deep nesting."""
    return text.replace(json.dumps(DEEP), "[" * depth + "]" * depth)


# Messages


def changed_message(corpus: Sequence[Message]) -> st.SearchStrategy[Any]:
    """One of these messages, in which one to `CHANGES` fields have other values, or are twice, or are gone."""
    places = st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 2**16)), min_size=1, max_size=CHANGES)
    return st.builds(partial(_change_message, corpus), st.integers(0, 2**20), places)


def message_bytes(corpus: Sequence[Message]) -> st.SearchStrategy[bytes]:
    """The bytes of changed messages, and changed bytes of messages."""
    raw = [message.SerializeToString(deterministic=True) for message in corpus]
    return st.one_of(changed_message(corpus).map(lambda message: message.SerializeToString()), changed_bytes(raw))


def _change_message(corpus: Sequence[Message], which: int, places: Sequence[tuple[int, int]]) -> Message:
    message = type(corpus[which % len(corpus)])()
    message.CopyFrom(corpus[which % len(corpus)])
    for place, value in places:
        holders = list(_holders(message))
        holder = holders[place % len(holders)]
        fields = holder.DESCRIPTOR.fields
        if fields:
            _change_field(holder, fields[place // len(holders) % len(fields)], value)
    return message


def _holders(message: Message) -> Iterator[Message]:
    """The message and all messages in it."""
    yield message
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for one in value if field.is_repeated else [value]:
            yield from _holders(one)


def _change_field(holder: Message, field: FieldDescriptor, value: int) -> None:
    """Sets a field to an unusual value of its type."""
    if value % 8 == 0:
        holder.ClearField(field.name)
        return
    value //= 8
    now = getattr(holder, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        _change_map(now, field, value)
    elif field.is_repeated:
        _change_list(now, field, value)
    elif field.message_type is not None:
        now.SetInParent()
    else:
        setattr(holder, field.name, _scalar(field, value))


def _change_map(now: Any, field: FieldDescriptor, value: int) -> None:
    key, held = (field.message_type.fields_by_name[part] for part in ("key", "value"))
    for number in range(value % 3 + 1):
        name = _scalar(key, value + number)
        if held.message_type is not None:
            now[name].SetInParent()
        else:
            now[name] = _scalar(held, value // 3 + number)


def _change_list(now: Any, field: FieldDescriptor, value: int) -> None:
    if value % 4 == 0 and len(now):
        del now[value // 4 % len(now)]
    elif field.message_type is not None:
        for number in range((value % 4) ** 3 + 1):
            now.add().CopyFrom(now[value % len(now)]) if number < len(now) else now.add()
    elif value % 4 == 1 and len(now):
        now[value // 4 % len(now)] = _scalar(field, value // 4)
    else:
        now.extend([_scalar(field, value // 4)] * (1 + value % 40))


def _scalar(field: FieldDescriptor, value: int) -> Any:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING:
            some: Sequence[Any] = BYTES if field.type == FieldDescriptor.TYPE_BYTES else TEXTS
            return some[value % len(some)]
        case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
            return FLOATS[value % len(FLOATS)]
        case FieldDescriptor.CPPTYPE_BOOL:
            return bool(value % 2)
        case FieldDescriptor.CPPTYPE_ENUM:
            return value % 16
    bits = 32 if field.cpp_type in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_UINT32) else 64
    number = INTEGERS[value % len(INTEGERS)] % 2**bits
    is_signed = field.cpp_type in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64)
    return number - 2**bits if is_signed and number >= 2 ** (bits - 1) else number

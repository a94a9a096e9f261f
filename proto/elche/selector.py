"""Conditions on the devices that a job may have: `model=*H200*`, `memory>=20GiB`, `zone!=eu`."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from elche.errors import InvalidJob

MAX_CONDITIONS = 16
MAX_CHARS = 200
UNITS = {"MB": 10**6, "GB": 10**9, "TB": 10**12, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
RESERVED = ("device", "host", "memory", "model")
"""Properties of every slot; other names are labels of a host."""
NAME = re.compile(r"[A-Za-z][A-Za-z0-9._/-]{0,62}")
CONDITION = re.compile(rf"\s*({NAME.pattern})\s*(!=|>=|=)\s*([^\s=].*?)\s*")
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition on a slot."""

    name: str
    operator: str
    """"=", "!=", or ">=" for memory."""
    value: str
    """A pattern with * and ?, case ignored; for memory a size."""

    def holds(self, properties: Mapping[str, str], memory_bytes: int) -> bool:
        """True if a slot meets the condition. A missing label is not equal to any value."""
        if self.name == "memory":
            return memory_bytes >= _size(self.value)
        value = properties.get(self.name)
        values = [] if value is None else [value.lower()]
        if self.name == "device":
            values += [one.partition(":")[0] for one in values]
        is_equal = any(fnmatchcase(one, self.value.lower()) for one in values)
        return is_equal is (self.operator == "=")


def parse(text: str) -> Condition:
    """Parses a condition. Raises `InvalidJob`."""
    found = CONDITION.fullmatch(text) if len(text) <= MAX_CHARS else None
    if found is None:
        raise InvalidJob(
            f"{text[:80]!r} is not a condition on devices: write NAME=PATTERN or NAME!=PATTERN, such as model=*H200*, "
            "or memory>=20GiB"
        )
    name, operator, value = found.groups()
    if (name == "memory") is not (operator == ">="):
        how = (
            "memory>=20GiB is how to ask for memory"
            if name == "memory"
            else f"{name} is compared by = or !=, only memory by >="
        )
        raise InvalidJob(f"{text[:80]!r} is not a condition on devices: {how}")
    if name == "memory":
        _size(value)
    return Condition(name, operator, value)


def check_conditions(texts: Sequence[str]) -> None:
    """Raises `InvalidJob` for invalid conditions, or too many."""
    if len(texts) > MAX_CONDITIONS:
        raise InvalidJob(f"a job has at most {MAX_CONDITIONS} conditions on its devices, not {len(texts)}")
    for text in texts:
        parse(text)


def check_label(name: str, value: str) -> None:
    """Raises `InvalidJob` for an invalid label of a host."""
    if not NAME.fullmatch(name) or name in RESERVED or not value or len(value) > MAX_CHARS:
        raise InvalidJob(
            f"{name[:80]}{'=' * bool(value)}{value[:80]} is not a label: write NAME=VALUE, such as zone=eu; "
            f"{', '.join(RESERVED)} are known of every device"
        )


def _size(text: str) -> float:
    found = SIZE.fullmatch(text)
    if found is None or found[2].upper() not in UNITS:
        raise InvalidJob(f"{text[:40]!r} is not a size of a memory: write 20GiB or 20GB")
    return float(found[1]) * UNITS[found[2].upper()]

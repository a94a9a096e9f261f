"""What the leader of a replica group tells the other processes to do with it: values, and numbers on the wire."""

import json
import struct
from dataclasses import astuple, dataclass, fields
from typing import Any

import torch

from elche_worker.collectives.averaging import Row

NUM_NUMBERS = 16
"""An act is so many 64-bit numbers: its kind, its fields, and last the length of its texts."""


@dataclass(frozen=True, slots=True)
class TakeLease:
    """A slice of an epoch's permutation is to be trained after those before it."""

    id: int
    epoch: int
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Join:
    """A generation begins: meet the processes of your position in the other groups."""

    attempt: int
    generation: int
    position: int
    world_size: int
    backend: str


@dataclass(frozen=True, slots=True)
class Train:
    """Train your part of the next batch."""

    samples: int
    """How far the job is, for the learning rate."""
    factor: float
    """Of the learning rate, by the job's callbacks."""


@dataclass(frozen=True, slots=True)
class Enter(Row):
    """Enter a round with this row."""

    is_kept: bool = False
    """Whether its result may become a checkpoint that this group writes."""

    @classmethod
    def of(cls, row: Row, *, is_kept: bool) -> "Enter":
        """A row, and that."""
        values = (*astuple(row), is_kept)
        return cls(*values)

    @property
    def row(self) -> Row:
        """What the group brings into the round."""
        return Row(*astuple(self)[: len(fields(Row))])


@dataclass(frozen=True, slots=True)
class Hold:
    """Bring the round's result into the model."""


@dataclass(frozen=True, slots=True)
class Settle:
    """The round is committed: write what was kept of it, or forget it."""

    round: int
    version: int
    is_written: bool


@dataclass(frozen=True, slots=True)
class Look:
    """Do something with the round's result as it is, before training goes on."""

    round: int
    version: int
    evaluates: bool
    epoch: int
    offset: int
    size: int
    calls_back: bool
    """Show it to the job's `checkpoint_fn`, and write the checkpoint."""
    saves_final: bool


Act = Train | TakeLease | Enter | Hold | Settle | Look | Join
KINDS: tuple[type[Any], ...] = (Train, TakeLease, Enter, Hold, Settle, Look, Join)


def encode(act: Act) -> tuple[torch.Tensor, bytes]:
    """The act as numbers (`NUM_NUMBERS` of int64), and its texts."""
    numbers, texts = [KINDS.index(type(act))], []
    for field in fields(act):
        value = getattr(act, field.name)
        if field.type is str:
            texts.append(value)
        else:
            numbers.append(_bits(value) if field.type is float else int(value))
    raw = json.dumps(texts).encode() if texts else b""
    padded = numbers + [0] * (NUM_NUMBERS - 1 - len(numbers)) + [len(raw)]
    return torch.tensor(padded, dtype=torch.int64), raw


def decode(numbers: torch.Tensor, raw: bytes) -> Act:
    """What `encode` was given."""
    first, *rest = numbers.tolist()
    kind, values, texts = KINDS[first], iter(rest), iter(json.loads(raw) if raw else ())
    given: list[Any] = []
    for field in fields(kind):
        if field.type is str:
            given.append(next(texts))
        else:
            number = next(values)
            given.append(_number(number) if field.type is float else field.type(number))  # type: ignore[operator]
    act: Act = kind(*given)
    return act


def _bits(value: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def _number(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])

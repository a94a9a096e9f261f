"""Batches of any type on their way to a device."""

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from elche_worker.device.transfer import InParts, tensors_in, to_device

META = torch.device("meta")
Pair = namedtuple("Pair", "x y")


class Encoding(UserDict[str, Any]):
    """A mapping with attributes, as of a tokenizer."""

    def __getattr__(self, name: str) -> Any:
        if name == "data" or name not in self.data:
            raise AttributeError(name)
        return self.data[name]


class Listed(list[Any]):
    name = ""


@dataclass(frozen=True)
class Point:
    x: torch.Tensor
    label: str


class Graph:
    """Moves itself, as graph batches do."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def to(self, device: torch.device) -> "Graph":
        return Graph(self.x.to(device))


class InPlace(Graph):
    def to(self, device: torch.device) -> None:  # type: ignore[override]
        self.x = self.x.to(device)


def listed() -> Listed:
    batch = Listed([torch.zeros(1)])
    batch.name = "kept"
    return batch


@pytest.mark.parametrize(
    "batch",
    [
        torch.zeros(1),
        {"x": torch.zeros(1)},
        Encoding(x=torch.zeros(1)),
        OrderedDict(x=torch.zeros(1)),
        defaultdict(list, x=torch.zeros(1)),
        MappingProxyType({"x": torch.zeros(1)}),
        Pair(torch.zeros(1), "y"),
        (torch.zeros(1), 3),
        listed(),
        InParts([(torch.zeros(1), 1)]),
        Point(torch.zeros(1), "a"),
        [Point(torch.zeros(1), "a"), Encoding(x=torch.zeros(1))],
        Graph(torch.zeros(1)),
        InPlace(torch.zeros(1)),
    ],
)
def test_a_batch_keeps_its_type_and_all_its_tensors_move(batch: Any) -> None:
    num = len(list(tensors_in(batch)))
    assert num
    moved = to_device(batch, META)
    assert type(moved) is type(batch)
    assert [one.device.type for one in tensors_in(moved)] == ["meta"] * num


def test_what_is_beside_the_tensors_stays() -> None:
    assert to_device(listed(), META).name == "kept"
    assert to_device(Encoding(x=torch.zeros(1)), META).x.is_meta
    assert to_device(defaultdict(list, x=torch.zeros(1)), META)["more"] == []
    assert to_device(Point(torch.zeros(1), "a"), META).label == "a"
    assert to_device("text", META) == "text"


def test_a_packed_sequence_is_moved_by_itself() -> None:
    """Its batch sizes must stay on the CPU."""
    moved = to_device(pack_sequence([torch.zeros(2, 1), torch.zeros(1, 1)]), META)
    assert isinstance(moved, PackedSequence)
    assert (moved.data.device.type, moved.batch_sizes.device.type) == ("meta", "cpu")

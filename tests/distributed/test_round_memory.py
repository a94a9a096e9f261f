"""Rounds over NCCL, by its strict stand-in, of ranks that hold their values on the device and in host memory."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from elche_worker.collectives.averaging import Averaging, ValuesPlace
from elche_worker.collectives.header import AveragingOptions, Row
from elche_worker.collectives.process_group import ProcessGroupCollectives
from elche_worker.device import chunks
from elche_worker.device.streams import CudaStreams
from elche_worker.model.layout import Layout
from elche_worker.outer import Adam, Nesterov
from support.nccl import nccl_in_use
from support.simulated_cuda import CUDA, Device


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """On which nothing may have been out of order. What is copied and sent goes in several parts."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 1000)
    with Device().in_order(monkeypatch) as device, nccl_in_use(monkeypatch):
        yield device


class Mixed(nn.Module):
    """Tensors of each sort, some larger than a part."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(40, 30)
        self.row = nn.Parameter(torch.randn(1, 700))
        self.short = nn.Parameter(torch.randn(60, 20).bfloat16())
        self.long = nn.Parameter(torch.randn(300, dtype=torch.float64))
        self.base = nn.Parameter(torch.randn(600), requires_grad=False)
        self.norm = nn.BatchNorm1d(4)


class Rank:
    """A model on the device, and its rounds."""

    def __init__(
        self, store: dist.Store, position: int, model: nn.Module, *, place: ValuesPlace, **options: Any
    ) -> None:
        self.position = position
        self.streams = CudaStreams(CUDA)
        self.group = ProcessGroupCollectives(
            store, backend="nccl", attempt=1, generation=1, position=position, size=2, peer="127.0.0.1:1", device=CUDA
        )
        with self.streams.compute():
            self.model = model.to(CUDA)
            self.layout = Layout(self.model)
        self.averaging = Averaging(self.layout, AveragingOptions(**options), wake=lambda: None, streams=self.streams)
        self.averaging.place = place

    def train(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(10 * seed + self.position)
        with self.streams.compute(), torch.no_grad():
            self.model.norm.running_mean += 1.0  # type: ignore[operator, union-attr]
            self.averaging.order_change()
            for parameter in self.model.parameters():
                if parameter.requires_grad:
                    parameter += torch.randn(parameter.shape, generator=generator).to(CUDA).to(parameter.dtype) * 0.01

    def enter(self, number: int) -> None:
        row = Row(1, 1, number, self.layout.hash, int(number > 1), 1, 0, number, 0, number - 1)
        with self.streams.compute():
            self.averaging.start(self.group, row, keeps_snapshot=True)

    def complete(self) -> list[int]:
        with self.streams.compute():
            self.averaging.complete(has_newer_steps=True)
            return [self.layout.result_digest(), self.layout.digest()]


def digests(places: list[ValuesPlace], **options: Any) -> list[list[int]]:
    """Of each rank's results and models after some rounds, which hold values at its place; the last, at the other's."""
    store = dist.HashStore()
    torch.manual_seed(0)
    models = [Mixed(), Mixed()]

    def one(position: int) -> list[int]:
        rank = Rank(store, position, models[position], place=places[position], **options)
        stack.callback(rank.group.abort)
        seen = []
        for number in range(1, 5):
            if number == 4:
                rank.averaging.place = places[1 - position]
            rank.train(2 * number)
            rank.enter(number)
            rank.train(2 * number + 1)
            seen += rank.complete()
        return seen

    with ExitStack() as stack, ThreadPoolExecutor(2) as threads:
        return list(threads.map(one, range(2)))


CASES: dict[str, dict[str, Any]] = {
    "by default": {"merge": "adascale"},
    "nesterov": {"outer": Nesterov()},
    "adam": {"outer": Adam()},
    "bf16": {"compress": "bf16"},
    "int8": {"compress": "int8", "merge": "adascale"},
}
LONG = pytest.mark.long(reason="a gain, an outer step and compression go the same way with adam and int8")
BESIDE_OTHERS = ("by default", "nesterov", "bf16")


@pytest.mark.parametrize("case", [pytest.param(one, marks=LONG if one in BESIDE_OTHERS else ()) for one in CASES])
def test_results_are_the_same_wherever_ranks_hold_their_values(case: str) -> None:
    first, second = digests([ValuesPlace.DEVICE, ValuesPlace.DEVICE], **CASES[case])
    assert first[::2] == second[::2], "one result"
    for places in ([ValuesPlace.PINNED, ValuesPlace.PINNED], [ValuesPlace.DEVICE, ValuesPlace.PAGEABLE]):
        assert digests(places, **CASES[case]) == [first, second]

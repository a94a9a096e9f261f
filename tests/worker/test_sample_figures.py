"""Samples that ranks compare: what is taken for the same, and what for other data."""

import random
import sqlite3
import time
import tracemalloc
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from elche.samples import NUM_POSITIONS, are_alike, positions_to_compare
from elche_coordinator.core.messages.spec import SampleRead, ValueFigures
from elche_coordinator.services.validation import first_problem
from elche_worker import TrainingJob
from elche_worker.data.dataset import Shards
from elche_worker.data.sample_figures import figures_of, figures_or_none, look_at

IMAGE = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
Pair = namedtuple("Pair", "image label")


@dataclass
class Graph:
    """A sample of a class of the user's own."""

    nodes: torch.Tensor


class Moving:
    """A batch that moves itself to a device."""

    def __init__(self, nodes: torch.Tensor) -> None:
        self.nodes = nodes

    def to(self, device: torch.device) -> "Moving":
        return Moving(self.nodes.to(device))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((IMAGE, 20), (IMAGE, 21)),
        ((IMAGE, 3), (255 - IMAGE, 3)),
        ((IMAGE, 3), (IMAGE.T, 3)),
        (Pair(IMAGE, 20), Pair(IMAGE, 21)),
        ({"x": torch.ones(3), "y": 1.0}, {"x": torch.zeros(3), "y": 1.0}),
        (torch.arange(100), torch.arange(100).flip(0)),
        (torch.tensor(20), torch.tensor(21)),
        ("a text", "another"),
        ("a text", "A text"),
        (Graph(torch.ones(3)), Graph(torch.ones(4))),
        ([1, 2], [1]),
        (torch.ones(2, dtype=torch.bfloat16), -torch.ones(2, dtype=torch.bfloat16)),
        (True, False),
        (torch.zeros(2, 2), torch.zeros(4)),
        (torch.tensor([1 + 1j]), torch.tensor([1 - 1j])),
        (torch.tensor([1 + 2j]).conj(), torch.tensor([1 + 2j])),
        (Moving(torch.ones(3)), Moving(torch.zeros(3))),
    ],
)
def test_other_data_are_told_apart(one: Any, other: Any) -> None:
    """Labels that differ by one, too: classes are numbered by an order of folders that hosts may list otherwise."""
    assert are_alike(figures_of(one), figures_of(one))
    assert not are_alike(figures_of(one), figures_of(other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (IMAGE, IMAGE + 1),
        (IMAGE.astype(np.int64) + 50, IMAGE.astype(np.int64) + 51),
        (torch.tensor([9000, -8000], dtype=torch.int16), torch.tensor([9001, -8001], dtype=torch.int16)),
        (torch.ones(3), torch.ones(3) + 1e-3),
        ({"file": "/data/a/1.png"}, {"file": "/mnt/b/1.png"}),
        ({"file": r"C:\data"}, {"file": "/mnt/b/1.png"}),
        (object(), object()),
        (torch.tensor([float("nan"), 1.0]), torch.tensor([float("nan"), 1.0])),
    ],
)
def test_what_hosts_make_differently_of_the_same_data_is_no_difference(one: Any, other: Any) -> None:
    """Another decoder of images, a folder elsewhere."""
    assert are_alike(figures_of(one), figures_of(other))


@pytest.mark.parametrize("size", [1, 2, 4, 5, 1000, 10**12])
def test_positions_are_spread_and_those_of_the_seed(size: int) -> None:
    positions = positions_to_compare(size, 3)
    assert positions == sorted(set(positions)) == positions_to_compare(size, 3)
    assert len(positions) == min(size, NUM_POSITIONS)
    assert all(0 <= position < size for position in positions)
    if size >= 1000:
        assert positions != positions_to_compare(size, 4)
        assert [position * NUM_POSITIONS // size for position in positions] == [0, 1, 2, 3]


def test_what_is_drawn_from_the_seeded_generators_is_not_compared_and_they_stay_as_they_are() -> None:
    """From equal seeds other devices, and other versions, draw other numbers."""

    class Augmented:
        def __len__(self) -> int:
            return 100

        def __getitem__(self, index: int) -> Any:
            return torch.rand(3) + random.random() + np.random.rand()

    before = torch.get_rng_state()
    looked = look_at(Augmented(), 0, budget_s=100)
    assert torch.equal(torch.get_rng_state(), before)
    assert looked.are_random
    assert not looked.samples


def test_one_sample_that_was_equal_by_chance_is_not_compared() -> None:
    """The others were not read, for lack of time: of flips of a coin, each fourth sample is equal in three reads."""

    class Dear:
        def __init__(self, size: int) -> None:
            self.size = size
            self.index: int | None = None

        def __len__(self) -> int:
            return self.size

        def __getitem__(self, index: int) -> Any:
            self.index = index if self.index is None else self.index
            if index != self.index:
                raise OSError
            return index

    assert not look_at(Dear(100), 0, budget_s=100).samples
    assert len(look_at(Dear(1), 0, budget_s=100).samples) == 1


class Truncated:
    """An image that is decoded when it is used."""

    @property
    def __array_interface__(self) -> Any:
        raise OSError("image file is truncated")


@pytest.mark.parametrize(
    "odd",
    [
        Truncated(),
        torch.zeros(2, dtype=torch.complex32),
        torch.zeros(2, device="meta"),
        torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_samples_of_which_no_figures_can_be_had_are_not_compared(odd: Any) -> None:
    assert not look_at([odd] * 9, 0, budget_s=100).samples
    assert figures_or_none([odd]) is None


@pytest.mark.parametrize("kind", [np.float32, np.int64])
def test_large_values_are_not_copied_whole(kind: type[Any]) -> None:
    volume = np.zeros((256, 256, 256), dtype=kind)
    volume = volume.T if kind is np.float32 else volume.reshape(-1)
    tracemalloc.start()
    figures_of(volume)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40e6, "the volume has 17 million entries"


def test_samples_that_come_out_different_each_time_are_not_compared() -> None:
    class Own:
        def __init__(self) -> None:
            self.own = np.random.default_rng(3)

        def __len__(self) -> int:
            return 100

        def __getitem__(self, index: int) -> Any:
            return self.own.random(3)

    looked = look_at(Own(), 0, budget_s=100)
    assert looked.are_random
    assert not looked.samples


def test_a_sample_that_cannot_be_read_fails_when_it_is_trained_and_not_here() -> None:
    class Broken:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Any:
            return {0: 1, 1: 2}[index]

    assert [one.index for one in look_at(Broken(), 0, budget_s=100).samples] == [0, 1]

    class Flaky(Broken):
        num_reads = 0

        def __getitem__(self, index: int) -> Any:
            self.num_reads += 1
            if self.num_reads == 2:
                raise OSError("the network is away for a moment")
            return index

    assert [one.index for one in look_at(Flaky(), 0, budget_s=100).samples] == [1, 2, 3], "not from fewer reads"


def test_data_that_are_dear_to_read_are_not_read_for_long_and_streams_not_at_all() -> None:
    reads: list[int] = []

    class Slow:
        def __len__(self) -> int:
            return 100

        def __getitem__(self, index: int) -> Any:
            reads.append(index)
            time.sleep(0.01)
            return index

    assert not look_at(Slow(), 0, budget_s=0, least_s=0).samples
    assert len(reads) == 2, "by this thread, and by another one"
    assert len(look_at(Slow(), 0, budget_s=0, least_s=100).samples) == 2, "as many as are compared at least"
    assert not look_at(Shards([5], lambda index: range(5)), 0).samples


def test_a_stream_that_shuffles_itself_is_read_by_the_thread_that_trains_or_told() -> None:
    own = random.Random(0)
    streams = {
        "in order": lambda _: range(99),
        "elche's": lambda _: random.sample(range(99), 99),
        "its own": lambda _: own.sample(range(99), 99),
        "seeded": lambda _: random.Random(0).sample(range(99), 99),
    }
    looked = {name: look_at(Shards([99], stream), 0) for name, stream in streams.items()}
    assert [name for name, one in looked.items() if one.is_for_one_thread] == ["elche's"]
    assert [name for name, one in looked.items() if one.is_unsteady] == ["its own"]
    assert not any(one.samples or one.are_random for one in looked.values())


@pytest.mark.parametrize(
    ("draw", "draws"),
    [
        (lambda: None, False),
        (lambda: torch.rand(1), True),
        (random.random, True),
        (np.random.normal, True),
        (lambda: np.random.default_rng(3).random(), False),
        (lambda: torch.rand(1, generator=torch.Generator().manual_seed(3)), False),
    ],
)
@pytest.mark.parametrize("where", ["data set", "collate_fn"])
def test_what_draws_random_numbers_is_seen_though_samples_are_the_same(draw: Any, draws: bool, where: str) -> None:
    class Same:
        def __len__(self) -> int:
            return 9

        def __getitem__(self, index: int) -> Any:
            if where == "data set":
                draw()
            return index

    def collate(samples: list[Any]) -> Any:
        if where == "collate_fn":
            draw()
        return torch.tensor(samples)

    before = torch.get_rng_state()
    looked = look_at(Same(), 0, collate_fn=collate, budget_s=100)
    assert (looked.draws, looked.are_random) == (draws, False)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_message_is_one_that_the_coordinator_takes() -> None:
    """However many values a sample has, and whatever they are."""
    odd = [torch.full((1,) * 70, float("inf")), *([float("nan")] * 200), 10**30, "x" * 10**5]
    looked = look_at([odd] * 9, 0, budget_s=100)
    for sample in looked.samples:
        assert not first_problem(sample)
        values = tuple(ValueFigures(figures=tuple(one.figures)) for one in sample.values)
        read = SampleRead(index=sample.index, values=values)
        assert read.is_like(read)
    dataset = TensorDataset(torch.randn(50, 3), torch.arange(50))
    assert [len(sample.values) for sample in look_at(dataset, 0, budget_s=100).samples] == [2] * NUM_POSITIONS


class OfOneThread(Dataset[Any]):
    """Samples of a database, whose connection the thread alone can use that has made it."""

    def __init__(self) -> None:
        self.connection: sqlite3.Connection | None = None

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> torch.Tensor:
        self.connection = self.connection or sqlite3.connect(":memory:")
        return torch.tensor(self.connection.execute("select ?", (float(index),)).fetchone())


def test_a_data_set_that_one_thread_alone_can_read_is_known_and_trained() -> None:
    looked = look_at(OfOneThread(), 0, budget_s=100)
    assert looked.is_bound
    assert looked.is_for_one_thread
    assert not looked.draws
    assert not look_at([torch.tensor(1.0)] * 9, 0, budget_s=100).is_for_one_thread
    job = TrainingJob(
        model=lambda: nn.Linear(1, 1),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-5),
        dataset=OfOneThread,
        train_step=lambda model, batch: model(batch).square().mean(),
        batch_size=10,
        epochs=2,
    )
    job.run(device="cpu")


def test_what_a_data_set_raises_in_each_thread_does_not_bind_it() -> None:
    class Broken(OfOneThread):
        def __getitem__(self, index: int) -> torch.Tensor:
            raise ValueError("it is broken")

    assert not look_at(Broken(), 0, budget_s=100).is_bound

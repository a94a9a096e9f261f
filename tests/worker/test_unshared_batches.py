"""Batches keep their values until they are trained, whatever memory the user's code fills again."""

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from elche.errors import InvalidJob
from elche_worker import Trainer, TrainerConfig
from elche_worker.data.dataset import Shuffled
from elche_worker.data.lease_loader import LeasedPart, LeaseLoader
from elche_worker.data.unshared import Unshared

BUFFER = torch.empty(10)
ARRAY = np.empty(10, dtype=np.float32)


class Own:
    """A batch that moves itself to a device."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def to(self, _: torch.device) -> "Own":
        return self


class Numbers:
    """A data set whose samples are their own indices, all in the same memory if it is to."""

    def __init__(self, *, shares: bool = False) -> None:
        self.sample = torch.empty(1) if shares else None

    def __len__(self) -> int:
        return 600

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index], dtype=torch.float32) if self.sample is None else self.sample.fill_(index)


def into_tensor(samples: list[torch.Tensor]) -> Any:
    return {"values": torch.cat(samples, out=BUFFER[: len(samples)])}


def into_array(samples: list[torch.Tensor]) -> Any:
    ARRAY[: len(samples)] = torch.cat(samples)
    return (torch.from_numpy(ARRAY[: len(samples)]),)


def into_plain_array(samples: list[torch.Tensor]) -> Any:
    ARRAY[: len(samples)] = torch.cat(samples)
    return [ARRAY[: len(samples)]]


def into_object(samples: list[torch.Tensor]) -> Any:
    return Own(into_tensor(samples)["values"])


def as_it_is(samples: list[torch.Tensor]) -> Any:
    return samples[0]


def await_ready(loader: LeaseLoader, wake: threading.Event, num: int) -> None:
    while True:
        wake.clear()
        if loader.num_ready >= num:
            return
        assert wake.wait(100), "no further batch comes"


def numbers_in(batch: Any) -> list[int]:
    match batch:
        case {"values": values} | Own(values=values) | (values,) | values:
            return [int(value) for value in values]


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("collate_fn", [into_tensor, into_array, into_plain_array, into_object, as_it_is])
def test_a_batch_that_waits_keeps_its_values_when_its_memory_is_filled_again(collate_fn: Any, num_workers: int) -> None:
    """It was trained with the values of a later one, and with its own labels: a wrong model, without a word."""
    order, size = Shuffled(600, seed=3), 1 if collate_fn is as_it_is else 10
    dataset: Any = Numbers(shares=collate_fn is as_it_is)
    wake = threading.Event()
    loader = LeaseLoader(
        dataset, order=order, batch_size=size, collate_fn=collate_fn, wake=wake.set, num_workers=num_workers
    )
    loader.add(LeasedPart(id=1, epoch=0, offset=0, size=8 * size))
    await_ready(loader, wake, 8)  # all wait before the first is taken
    taken = [numbers_in(loader.take().data) for _ in range(8)]
    loader.stop()
    assert taken == [order.indices(0, at * size, size) for at in range(8)]


def test_a_loops_step_of_several_batches_has_all_of_them() -> None:
    model = nn.Linear(1, 1)
    with Trainer.setup(model, torch.optim.SGD(model.parameters(), lr=0.0), TrainerConfig(device="cpu")) as trainer:
        loader: Any = DataLoader(Numbers(), batch_size=10, collate_fn=into_tensor)  # type: ignore[arg-type]
        trainer.set_data_loader(loader, names=("values",))
        batches = [batch["values"] for batch in trainer.epoch(0)]
    assert torch.cat(batches).tolist() == list(range(600))


def test_batches_of_memory_of_their_own_are_not_copied() -> None:
    collate = Unshared(lambda samples: {"values": torch.stack(samples)})
    made = [torch.ones(2), torch.zeros(2)]
    assert [collate(made)["values"].tolist() for _ in range(4)] == [[[1.0, 1.0], [0.0, 0.0]]] * 4
    kept = torch.ones(2)
    same = Unshared(lambda _: kept)
    copied = [same(None) is not kept for _ in range(4)]
    assert copied == [True, True, False, False]


def test_gradients_of_a_batch_that_is_copied_are_taken() -> None:
    """As a physics-informed network takes those of its inputs."""
    points = Unshared(lambda _: torch.ones(3, requires_grad=True))(None)
    points.sum().backward()
    assert points.grad.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.complex64, torch.int64])
def test_values_of_any_type_are_watched(dtype: torch.dtype) -> None:
    kept = torch.zeros(3, dtype=dtype)
    same, copies = Unshared(lambda _: kept.fill_(len(copies))), list[Any]()
    copies += [same(None) for _ in range(1)]
    copies += [same(None) for _ in range(1)]
    copies += [same(None) for _ in range(1)]
    copies += [same(None) for _ in range(1)]
    assert all(one is not kept for one in copies)


class Locked(Own):
    """A batch that cannot be copied."""

    def __init__(self, values: torch.Tensor) -> None:
        super().__init__(values)
        self.lock = threading.Lock()


def test_a_batch_that_cannot_be_copied_is_refused_only_if_it_must_be() -> None:
    """Jobs whose batches share nothing failed in collating the first one."""
    collate = Unshared(lambda samples: Locked(torch.stack(samples)))
    assert [collate([torch.ones(1)]).values.item() for _ in range(5)] == [1.0] * 5
    shared = Unshared(lambda samples: Locked(torch.cat(samples, out=BUFFER[:1])))
    assert shared([torch.ones(1)]).values.item() == 1.0
    with pytest.raises(
        InvalidJob, match=r"collate_fn fills the memory of a batch again .* its Locked cannot be copied"
    ):
        shared([torch.zeros(1)])


@pytest.mark.filterwarnings("ignore")  # such tensors are prototypes
@pytest.mark.parametrize(
    "made",
    [
        torch.nested.nested_tensor,
        lambda samples: torch.nested.nested_tensor(samples, layout=torch.jagged),
        lambda samples: torch.masked.masked_tensor(samples[0], torch.ones(3, dtype=torch.bool)),
    ],
)
def test_a_batch_whose_values_cannot_be_read_is_trained(made: Any) -> None:
    """Its checksum failed, and with that the job."""
    collate = Unshared(lambda samples: {"values": made(samples)})
    for _ in range(5):
        batch = collate([torch.ones(3)])["values"]
        assert type(batch) is type(made([torch.ones(3)]))


def test_attributes_that_a_tensor_was_given_stay() -> None:
    def with_lengths(samples: list[torch.Tensor]) -> Any:
        batch: Any = torch.stack(samples)
        batch.lengths = [len(sample) for sample in samples]
        return batch

    assert Unshared(with_lengths)([torch.ones(3)]).lengths == [3]


def test_a_first_batch_that_is_skipped_is_not_the_one_to_watch() -> None:
    """It never changes: later batches were taken for unshared, and trained with the values of others."""
    calls: list[int] = []

    def into_tensor_later(samples: list[torch.Tensor]) -> Any:
        calls.append(1)
        return into_tensor(samples) if len(calls) > 1 else None

    collate = Unshared(into_tensor_later)
    batches = [collate([torch.full((1,), float(at))]) for at in range(6)]
    assert batches[0] is None
    assert [batch["values"].item() for batch in batches[1:]] == [1.0, 2.0, 3.0, 4.0, 5.0]


class OpenFile:
    """Samples are read from a file that is opened before worker processes are forked."""

    def __init__(self, path: Path) -> None:
        np.arange(600, dtype=np.int64).repeat(64).tofile(path)
        self.file = path.open("rb", buffering=0)

    def __len__(self) -> int:
        return 600

    def __getitem__(self, index: int) -> torch.Tensor:
        self.file.seek(index * 512)
        os.sched_yield()
        return torch.frombuffer(bytearray(self.file.read(512)), dtype=torch.int64)


def test_worker_processes_read_an_open_file_each_at_its_own_position(tmp_path: Path) -> None:
    """They shared one, and read each other's samples."""
    order, dataset = Shuffled(600, seed=3), OpenFile(tmp_path / "samples")
    dataset.file.seek(77)
    wake = threading.Event()
    loader = LeaseLoader(dataset, order=order, batch_size=10, collate_fn=None, wake=wake.set, num_workers=2)
    loader.add(LeasedPart(id=1, epoch=0, offset=0, size=80))
    await_ready(loader, wake, 8)
    taken = [loader.take().data[:, 0].tolist() for _ in range(8)]
    loader.stop()
    assert taken == [order.indices(0, at * 10, 10) for at in range(8)]
    assert dataset.file.tell() == 77

"""How many samples a batch has on which device, and what is tried to find out what fits."""

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from elche.errors import InvalidJob
from elche_worker import TrainingJob
from elche_worker.device.faults import is_out_of_memory
from elche_worker.model.batch_size import AUTO_BATCH_SIZE, largest_that_fits, nominal_batch_size, rank_batch_size
from elche_worker.run.alone import train_alone
from elche_worker.user.device import Device

CPU = Device(device="cpu")
RTX_3090 = Device(device="cuda:0", model="NVIDIA GeForce RTX 3090")
RTX_3090_TI = Device(device="cuda:1", model="NVIDIA GeForce RTX 3090 Ti")
GTX_1060 = Device(device="cuda:1", model="NVIDIA GeForce GTX 1060 6GB")
BY_NAME = {"RTX 3090": 256, "GTX 1060": 32, "": 64}


def job_with(batch_size: Any) -> TrainingJob:
    return TrainingJob(
        model=lambda: nn.Linear(1, 1),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        dataset=lambda: [0],
        train_step=lambda model, batch: model(batch).mean(),
        batch_size=batch_size,
        epochs=1,
    )


def by_memory(device: Device) -> int:
    return 200 if "3090" in device.model else 20


# The job's own batch size, equal on all ranks


@pytest.mark.parametrize(
    ("given", "dataset_size", "nominal"),
    [
        (48, 1000, 48),
        (48, 10, 48),
        ("auto", 1000, AUTO_BATCH_SIZE),
        ("auto", 100, 100),
        (BY_NAME, 1000, 64),
        ({"RTX 3090": 256, "GTX 1060": 32}, 1000, 32),
        ({"RTX 3090": "auto", "GTX 1060": 512}, 1000, AUTO_BATCH_SIZE),
        ({"": "auto"}, 70, 70),
        (by_memory, 1000, 20),
        (lambda device: "auto", 1000, AUTO_BATCH_SIZE),
    ],
)
def test_the_jobs_batch_size_is_that_of_a_device_without_a_name(given: Any, dataset_size: int, nominal: int) -> None:
    assert nominal_batch_size(job_with(given), dataset_size) == nominal


# That of one device


@pytest.mark.parametrize(
    ("given", "device", "size"),
    [
        (48, RTX_3090, 48),
        (48, CPU, 48),
        ("auto", GTX_1060, AUTO_BATCH_SIZE),
        (BY_NAME, RTX_3090, 256),
        (BY_NAME, GTX_1060, 32),
        (BY_NAME, CPU, 64),
        ({"3090": 100, "3090 Ti": 200}, RTX_3090_TI, 200),
        ({"3090 Ti": 200, "3090": 100}, RTX_3090_TI, 200),
        ({"cpu": 4, "cuda": 40}, CPU, 4),
        ({"cpu": 4, "cuda": 40}, GTX_1060, 40),
        ({"cuda:0": 4, "": 40}, RTX_3090, 4),
        ({"": 40}, GTX_1060, 40),
        (by_memory, RTX_3090, 200),
        (by_memory, CPU, 20),
    ],
)
def test_a_device_gets_what_the_longest_part_of_its_name_says(given: Any, device: Device, size: int) -> None:
    assert rank_batch_size(job_with(given), device, dataset_size=1000) == size


def test_auto_is_no_more_than_the_data_set_has() -> None:
    assert rank_batch_size(job_with("auto"), RTX_3090, dataset_size=7) == 7


def test_a_device_that_no_name_fits_is_named_with_all_names_and_the_way_out() -> None:
    job = job_with({"RTX 3090": 256, "RTX 4090": 300})
    with pytest.raises(InvalidJob) as refused:
        rank_batch_size(job, GTX_1060, dataset_size=1000)
    assert str(refused.value) == (
        'batch_size names no part of "cuda:1 NVIDIA GeForce GTX 1060 6GB"; give "" for all other devices: '
        "'RTX 3090', 'RTX 4090'"
    )


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (lambda device: 0, "batch_size must be at least 1, not 0"),
        (lambda device: None, "batch_size must be a whole number or auto, not NoneType"),
        (lambda device: 2.5, "batch_size must be a whole number or auto, not float (2.5)"),
        (lambda device: "all", "batch_size must be a whole number or auto, not 'all'"),
    ],
)
def test_a_function_that_returns_no_batch_size_is_refused(given: Callable[[Device], Any], says: str) -> None:
    with pytest.raises(InvalidJob) as refused:
        rank_batch_size(job_with(given), RTX_3090, dataset_size=1000)
    assert says in str(refused.value)


def test_a_function_that_returns_no_batch_size_is_refused_with_the_device() -> None:
    job = job_with(lambda device: 16 if "3090" in device.model else 0)
    with pytest.raises(InvalidJob) as refused:
        rank_batch_size(job, GTX_1060, dataset_size=1000)
    assert "GTX 1060" in str(refused.value)


def test_a_function_must_know_a_device_without_a_name_too() -> None:
    """Steps are counted in its batch size, whether the cluster has such a device or not."""
    sizes = {RTX_3090.model: 256, GTX_1060.model: 32}
    job = job_with(lambda device: sizes[device.model])
    assert rank_batch_size(job, GTX_1060, dataset_size=1000) == 32
    with pytest.raises(
        InvalidJob, match="batch_size of the device cpu raised KeyError: ''; it must return a number for every device"
    ):
        nominal_batch_size(job, dataset_size=1000)


@pytest.mark.parametrize("given", [{}, {3: 8}, {"": 0}, {"": "all"}, {"cpu": None}, {"": True}])
def test_a_mapping_without_sizes_is_refused_when_the_job_is_made(given: Any) -> None:
    with pytest.raises(InvalidJob, match="batch_size must"):
        job_with(given)


# What fits


class Counting(nn.Module):
    """Has a buffer that every forward changes, as BatchNorm has, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("num_seen", torch.zeros((), dtype=torch.int64), persistent=False)
        self.tried: list[int] = []

    def train_on(self, size: int, *, fits: int) -> None:
        self.tried.append(size)
        self.num_seen += size
        loss = nn.functional.dropout(self.norm(self.layer(torch.randn(size, 4)))).square().mean()
        if size > fits:
            raise torch.OutOfMemoryError("there is no more")
        loss.backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    ("fits", "found", "tried"),
    [
        (1000, 200, [200]),
        (200, 200, [200]),
        (199, 100, [200, 100]),
        (30, 25, [200, 100, 50, 25]),
        (2, 1, [200, 100, 50, 25, 12, 6, 3, 1]),
    ],
)
def test_a_batch_is_halved_until_it_fits(fits: int, found: int, tried: list[int]) -> None:
    model = Counting().eval()  # BatchNorm in train mode takes no batch of one
    assert largest_that_fits(200, lambda size: model.train_on(size, fits=fits), model, is_out_of_memory) == found
    assert model.tried == tried


def test_the_model_is_as_it_was_before() -> None:
    model = Counting()
    for _ in range(3):
        model.train_on(8, fits=8)
    model.zero_grad(set_to_none=True)
    held = {id(buffer) for buffer in model.buffers()}
    before = copy.deepcopy({**dict(model.named_parameters()), **dict(model.named_buffers())})
    state = torch.get_rng_state()
    largest_that_fits(64, lambda size: model.train_on(size, fits=20), model, is_out_of_memory)
    after = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor), name
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert held == {id(buffer) for buffer in model.buffers()}, "an optimizer or a layout may hold them"


def test_the_model_is_as_it_was_before_even_when_nothing_fits() -> None:
    model, state = Counting(), torch.get_rng_state()
    with pytest.raises(torch.OutOfMemoryError):
        largest_that_fits(4, lambda size: model.train_on(size + 1, fits=0), model, is_out_of_memory)
    assert model.tried == [5, 3, 2]
    assert int(model.num_seen) == 0
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_another_error_is_not_taken_for_a_lack_of_memory() -> None:
    tried = []

    def broken(size: int) -> None:
        tried.append(size)
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        largest_that_fits(64, broken, nn.Linear(1, 1), is_out_of_memory)
    assert tried == [64]


def test_all_random_numbers_are_as_before() -> None:
    random.seed(1)
    np.random.seed(1)
    expected = random.random(), np.random.rand()
    random.seed(1)
    np.random.seed(1)
    largest_that_fits(8, lambda size: (random.random(), np.random.rand()), nn.Linear(1, 1), is_out_of_memory)
    assert (random.random(), np.random.rand()) == expected


def test_a_model_that_makes_a_buffer_in_its_first_forward() -> None:
    class Lazy(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            if not hasattr(self, "mask"):
                self.register_buffer("mask", torch.ones(1), persistent=False)
            return super().forward(inputs) * self.mask

    model = Lazy(4, 1)
    assert largest_that_fits(8, lambda size: model(torch.zeros(size, 4)).sum().backward(), model, is_out_of_memory) == 8


def test_a_run_without_a_coordinator_counts_steps_in_the_batches_of_a_device_without_a_name() -> None:
    """As a run with one does: with the device's own, 64 samples, four steps were 256 samples instead of 64."""
    seen: list[int] = []

    def train_step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        seen.append(len(batch))
        return model(batch).sum()

    job = TrainingJob(
        model=lambda: nn.Linear(1, 1),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        dataset=lambda: torch.ones(100, 1),
        train_step=train_step,
        batch_size={"cpu": 64, "": 16},
        epochs=9,
        max_steps=4,
    )
    train_alone(job, device="cpu")
    assert sum(seen) == 64


@pytest.mark.parametrize("given", [{"": "auto"}, lambda device: "auto"])
def test_auto_is_refused_with_manual_optimization_wherever_the_job_trains(given: Any) -> None:
    job = TrainingJob(
        model=lambda: nn.Linear(1, 1),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        dataset=lambda: torch.ones(100, 1),
        train_step=lambda model, batch, optimizer: {"loss": 0.0},
        batch_size=given,
        manual_optimization=True,
        epochs=1,
    )
    with pytest.raises(InvalidJob, match="batch_size 'auto' has no effect with manual_optimization: give a number"):
        train_alone(job, device="cpu")

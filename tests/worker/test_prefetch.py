"""How many batches wait on a device, what moves them there, and that each is there before it is read."""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from elche_worker import Trainer, TrainerConfig, TrainingJob
from elche_worker.data import prefetch
from elche_worker.data.dataset import Shuffled
from elche_worker.data.lease_loader import MAX_READY, LeasedPart, LeaseLoader, LoadedBatch
from elche_worker.data.prefetch import (
    MAX_DEPTH,
    CudaTransfer,
    DeviceMemory,
    DeviceTransfer,
    Resident,
    new_transfer,
    prefetch_depth,
)
from elche_worker.device.streams import CudaStreams, DeviceStreams
from elche_worker.device.transfer import num_bytes, tensors_in
from elche_worker.rank.acts import TrainBatch
from elche_worker.user.device import Device as Found
from support.device_ranks import alone, new_rank
from support.nccl.forked import until
from support.simulated_cuda import CUDA, DEFAULT, GB, Device, Memory

MEMORY = DeviceMemory(free=60 * GB, total=100 * GB, reserved=40 * GB, allocated=30 * GB, peak=40 * GB)
"""60 GB are free, and 10 of this process's 40 are not in use; 90 may be used: there is room for 60."""


@pytest.mark.parametrize(
    ("activation", "waiting", "batch", "depth"),
    [
        (None, 0, GB, 0),  # not measured is not 0 bytes
        (0, 0, GB, 60),
        (0, 5 * GB, GB, 65),  # what waits there already is of it
        (57.5 * GB, 0, GB, 2),
        (59.5 * GB, 0, GB, 0),
        (70 * GB, 0, GB, 0),
        (GB, 0, 1000, MAX_DEPTH),
        (GB, 0, 0, 0),
    ],
)
def test_the_depth_is_what_training_leaves(activation: int | None, waiting: int, batch: int, depth: int) -> None:
    assert prefetch_depth(MEMORY, activation_bytes=activation, waiting_bytes=waiting, batch_bytes=batch) == depth


@pytest.mark.parametrize(("free", "depth"), [(90 * GB, 39), (10 * GB, 5)])
def test_only_what_a_process_may_use_is_free(device: Device, free: int, depth: int) -> None:
    """`elche-worker --share 2` gives half to each; batches were fetched ahead into the other half, which failed."""
    device.memory = Memory(free=free, total=100 * GB, reserved=6 * GB, allocated=4 * GB, fraction=0.5)
    memory = DeviceMemory.of(CUDA)
    assert prefetch_depth(memory, activation_bytes=2 * GB, waiting_bytes=0, batch_bytes=GB) == depth


def test_on_the_host_nothing_is_moved() -> None:
    transfer = new_transfer(torch.device("cpu"), DeviceStreams())
    assert type(transfer) is DeviceTransfer
    data = {"x": torch.ones(3), "name": "a"}
    moved, event = transfer.move(data)
    assert moved is data
    assert event is None
    assert transfer.receive(data, None)["x"] is data["x"]


def test_bytes_of_a_nested_batch() -> None:
    batch = {"a": [torch.zeros(4), (torch.zeros(2, dtype=torch.int64), "text")], "b": 7}
    assert num_bytes(batch) == 16 + 16
    assert len(list(tensors_in(batch))) == 2


class Numbers:
    """Sample i is i."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(float(index))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """A device on which nothing may have gone wrong at the test's end."""
    with Device().in_order(monkeypatch) as device:
        yield device


class Fed:
    """A loader of small batches on a device, and its consumer."""

    def __init__(self, dataset: object = None) -> None:
        self._changed = threading.Condition()
        self.streams = CudaStreams(CUDA)
        self.transfer = CudaTransfer(CUDA, self.streams)
        order = Shuffled(100_000 if dataset is None else len(dataset), 0)  # type: ignore[arg-type]
        self.loader = LeaseLoader(
            dataset or Numbers(), order=order, batch_size=2, collate_fn=None, transfer=self.transfer, wake=self._wake
        )
        self._num_leases = 0

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def lease(self, num_batches: int) -> None:
        self._num_leases += 1
        self.loader.plan()
        self.loader.add(LeasedPart(id=self._num_leases, epoch=0, offset=0, size=2 * num_batches))

    def wait_for(self, num_ready: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.loader.num_ready >= num_ready, timeout=100)

    def train(self, num_batches: int) -> None:
        for _ in range(num_batches):
            self.wait_for(1)
            batch = self.loader.take()
            data = self.transfer.receive(batch.data, batch.event)
            assert data.is_cuda
            float((data * 2).sum())


def test_batches_are_there_before_they_are_read_and_their_memory_until_they_were(device: Device) -> None:
    fed = Fed()
    with fed.streams.compute():
        for _ in range(4):
            fed.lease(5)
            fed.train(5)
    fed.loader.stop()
    assert DEFAULT not in device.num_operations
    assert device.num_operations[fed.streams._copies.name] >= 10, "later leases were copied beside training"


def test_the_first_lease_is_not_prefetched_and_later_ones_up_to_the_greatest_depth(device: Device) -> None:
    fed = Fed()
    with fed.streams.compute():
        fed.lease(MAX_READY + 10)
        fed.wait_for(MAX_READY)
        assert fed.transfer.room is None, "not measured"
        fed.train(MAX_READY + 10)
        fed.lease(MAX_DEPTH + 20)
        fed.wait_for(MAX_DEPTH)
        assert fed.transfer.room == 0
        fed.train(MAX_DEPTH + 20)
    fed.loader.stop()


def test_nothing_is_prefetched_where_memory_is_tight_and_again_when_it_is_not(device: Device) -> None:
    fed = Fed()
    with fed.streams.compute():
        fed.lease(3)
        fed.train(3)
        device.memory.peak = 60 * GB  # of which 10 are what training needs beyond what stays
        device.memory.allocated = device.memory.reserved = 50 * GB
        device.memory.free = 19 * GB  # of 9 that may be used
        fed.lease(3)
        assert fed.transfer.room is None
        fed.train(3)
        device.memory.free = 21 * GB
        fed.lease(3)
        assert fed.transfer.room
        fed.train(3)
    fed.loader.stop()


def test_what_is_set_aside_stays_free_as_long_as_there_is_so_much(device: Device) -> None:
    fed = Fed()
    device.memory.free, device.memory.total = 200, 1000
    fed.transfer.set_aside_bytes = 70
    with fed.streams.compute():
        fed.lease(3)
        fed.train(3)
        fed.lease(1)
        assert (fed.transfer.room, fed.transfer.spare_bytes) == (3, 100), "batches of 8 bytes in the other 30"
        fed.train(1)
        device.memory.free = 160
        fed.lease(1)
        assert (fed.transfer.room, fed.transfer.set_aside_bytes) == (7, 0)
        fed.train(1)
    fed.loader.stop()


def test_the_peak_is_a_running_maximum_without_what_stays_and_what_waits(device: Device) -> None:
    fed = Fed()
    memory = device.memory
    with fed.streams.compute():
        fed.lease(3)
        fed.train(3)
        memory.allocated, memory.peak = 8 * GB, 12 * GB
        fed.lease(3)
        assert fed.transfer._activation_bytes == 4 * GB - 8, "less one batch of two float32"
        fed.train(3)
        memory.allocated = 9 * GB
        fed.lease(3)
        assert fed.transfer._activation_bytes == 4 * GB - 8, "the most so far"
        fed.wait_for(3)
        fed.train(3)
        memory.peak = 20 * GB
        fed.lease(1)
        assert fed.transfer._activation_bytes == 11 * GB - 8 - 3 * 8, "three batches waited meanwhile"
        fed.train(1)
    fed.loader.stop()


def test_where_memory_runs_out_what_waits_leaves_the_device_in_order_and_fewer_wait_from_then_on(
    device: Device,
) -> None:
    fed = Fed()
    with fed.streams.compute():
        fed.lease(3)
        fed.train(3)
        fed.lease(20)
        fed.wait_for(20)
        assert fed.loader.make_room()
        ready = [batch for batch in fed.loader._ready if isinstance(batch, LoadedBatch)]
        assert not any(batch.event is not None or batch.data.is_cuda for batch in ready)
        in_order = torch.tensor([float(index) for index in Shuffled(100_000, 0).indices(0, 0, 40)])
        assert torch.equal(torch.cat([batch.data for batch in ready]), in_order)
        assert not fed.loader.make_room(), "none is left there"
        fed.train(20)
        fed.lease(30)
        assert fed.transfer.room == 10
        fed.train(30)
    fed.loader.stop()


def test_a_batch_for_which_there_is_no_memory_waits_in_the_hosts(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may have taken what was free: the job failed, though training had all that it needs."""
    fed, move = Fed(), prefetch.to_device

    def with_room_for_six(data: torch.Tensor, to: torch.device) -> torch.Tensor:
        if threading.current_thread() is not threading.main_thread() and fed.transfer._num_moved == 6:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return move(data, to)

    with fed.streams.compute():
        fed.lease(3)
        fed.train(3)
        monkeypatch.setattr(prefetch, "to_device", with_room_for_six)
        fed.lease(20)
        until(lambda: fed.loader.num_ready >= MAX_READY or any(isinstance(one, Exception) for one in fed.loader._ready))
        ready = [batch for batch in fed.loader._ready if isinstance(batch, LoadedBatch)]
        assert [batch.event is not None for batch in ready] == [True] * 6 + [False] * (MAX_READY - 6)
        fed.train(20)
        fed.lease(1)
        assert fed.transfer.room == 3
        fed.train(1)
    fed.loader.stop()


class Full:
    """Raises as a device without memory does, until it is asked a second time."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self) -> None:
        self.num_calls += 1
        if self.num_calls == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")


@pytest.mark.parametrize("what", ["an evaluation", "a batch that waits in the host's memory"])
def test_where_memory_runs_out_beside_a_step_what_waits_leaves_the_device_and_it_is_tried_again(
    device: Device, tmp_path: Path, what: str
) -> None:
    full = Full()
    with new_rank(tmp_path, alone(), evaluate=lambda model: full() or {"size": 1.0}) as rank:
        rank.round(may_be_checkpoint=True)
        rank.lease(10)
        until(lambda: rank.replica.loader.num_ready == 10)
        transfer, receive = rank.replica.loader.transfer, rank.replica.loader.transfer.receive
        assert transfer.room
        if what == "an evaluation":
            rank.look(evaluates=True)
        else:
            transfer.receive = lambda data, event: full() or receive(data, event)  # type: ignore[method-assign]
            rank.replica.train(TrainBatch(0, 1.0))
        assert full.num_calls >= 2
        assert not transfer.room
    device.problems = {one: None for one in device.problems if "the cache is emptied" not in one}


def test_the_loader_is_begun_on_the_ranks_device(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """With worker processes it starts a thread that pins memory, on the device of the thread that begins it. That of a
    new thread is the first one, on which each rank of the host then had a context.
    """
    begun_on: list[str] = []
    begin = DataLoader.__iter__
    monkeypatch.setattr(DataLoader, "__iter__", lambda self: begun_on.append(device.stream.name) or begin(self))
    fed = Fed()
    fed.loader.stop()
    assert begun_on == [fed.streams._copies.name]


def test_what_is_ready_is_given_up_when_the_feed_stops(device: Device) -> None:
    fed = Fed()
    with fed.streams.compute():
        fed.lease(20)
        fed.wait_for(MAX_READY)
        fed.loader.stop()
        assert fed.loader.num_ready == 0


def test_a_small_data_set_is_kept_on_the_device(device: Device) -> None:
    fed = Fed(TensorDataset(torch.arange(40.0)))
    fed.transfer.receive = lambda data, event, receive=fed.transfer.receive: receive(data, event)[0]  # type: ignore[method-assign, misc]
    with fed.streams.compute():
        fed.lease(10)
        fed.train(10)
    fed.loader.stop()
    assert DEFAULT not in device.num_operations


def test_a_data_set_on_the_device_is_copied_again_where_it_has_changed() -> None:
    inputs, labels = torch.arange(3.0), torch.zeros(3)
    source, copied = TensorDataset(inputs, labels), []

    def copies_of(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        copied.append(len(tensors))
        return tuple(tensor.clone() for tensor in tensors)

    resident = Resident(source, copies_of)
    assert len(resident) == 3
    assert [one.tolist() for one in resident[1]] == [1, 0]
    assert len(copied) == 1, "only once, as long as they stay as they are"
    labels[1] = 5
    assert resident[1][1] == 5
    source.tensors = (inputs, labels + 2)
    assert resident[1][1] == 7
    assert len(copied) == 3


JOB = TrainingJob(
    model=lambda: torch.nn.Linear(1, 1),
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    dataset=Numbers,
    train_step=lambda model, batch: model(batch[:, None] / 1e5).square().mean(),
    batch_size=10,
    epochs=2,
    max_steps=40,
)


@pytest.fixture
def works(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulated device is taken for one that computes: what tries devices asks CUDA itself."""
    monkeypatch.setattr("elche_worker.device.discovery.try_here", lambda name: Found(device=name))


@pytest.mark.usefixtures("works")
def test_a_job_on_one_device_prefetches(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_rng_state", torch.get_rng_state)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state: None)
    moved: list[object] = []
    move = CudaTransfer.move
    monkeypatch.setattr(CudaTransfer, "move", lambda *given: moved.append(one := move(*given)) or one)
    replace(JOB, num_workers=0).run(device="cuda")
    assert sum(event is not None for _, event in moved) > 10  # type: ignore[misc]
    assert DEFAULT not in device.num_operations


class Rows(Numbers):
    """Sample i is a row with i."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)])


@pytest.mark.usefixtures("works")
def test_a_loop_of_ones_own_prefetches_and_trains_every_batch_in_order(device: Device) -> None:
    """What it queues itself goes where it says; here that is a stream of its own."""
    moved: list[int] = []
    with CudaStreams(CUDA).compute():
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        optimizer.param_groups[0]["params"] = list(model.to(CUDA).parameters())  # the simulation makes new ones
        with Trainer.setup(model, optimizer, TrainerConfig(device="cuda:0")) as trainer:
            trainer.set_data_loader(DataLoader(Rows(), batch_size=4), forward_input="input", names=("input",))
            trainer.set_loss_fn(lambda context: context.output.square().mean())
            seen: list[float] = []
            for epoch in trainer.epochs(2):
                for batch in trainer.epoch(epoch):
                    trainer.forward_batch(batch)
                    seen += batch["input"][:, 0].tolist()
                    trainer.step()
                    assert trainer._data is not None
                    transfer = trainer._data._transfer
                    assert isinstance(transfer, CudaTransfer)
                    moved.append(transfer._num_moved)
    assert seen == [float(one) for one in range(60)] * 2
    assert moved[0] == 0, "not measured"
    assert moved[-1] > 20
    assert DEFAULT not in device.num_operations

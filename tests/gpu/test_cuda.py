"""What only a CUDA device shows: two streams, events both ways, times without waiting; `pytest -m gpu`.

The gate runs those with `is_simulated` on a simulated device, and the type checker reads all of them.
"""

import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import FileStore, HashStore, Store

from elche_worker import TrainingJob
from elche_worker.collectives.averaging import Averaging
from elche_worker.collectives.header import AveragingOptions, Row
from elche_worker.collectives.operations import Collectives
from elche_worker.collectives.process_group import ProcessGroupCollectives
from elche_worker.data.dataset import Shuffled
from elche_worker.data.lease_loader import LeasedPart, LeaseLoader
from elche_worker.data.prefetch import MAX_DEPTH, CudaTransfer
from elche_worker.device.build import build_of
from elche_worker.device.streams import CudaStreams, pin_accumulators
from elche_worker.model.layout import Layout
from elche_worker.model.step import TrainStep, build_model
from elche_worker.outer import SGD
from elche_worker.telemetry.meter import Meter
from elche_worker.telemetry.timing import MAX_AHEAD, DeviceTimer
from elche_worker.trainer import Trainer

needs_gpu = pytest.mark.usefixtures("needs_gpu")
either = pytest.mark.usefixtures("is_simulated")
CUDA = torch.device("cuda:0")
NOT_ALONE = AveragingOptions(outer=SGD(lr=1.0))
"""With an outer optimizer one rank makes whole rounds, too."""


def sleep(cycles: int) -> None:
    """Keeps the current stream busy."""
    busy: Any = torch.cuda._sleep  # untyped
    busy(cycles)


def row(layout: Layout, *, weight: int = 1) -> Row:
    return Row(1, 1, 1, layout.hash, weight, 1, 0, 0, 0, 1)


def group(backend: str, store: Store, position: int, size: int) -> Collectives:
    return ProcessGroupCollectives(
        store, backend=backend, attempt=1, generation=1, position=position, size=size, peer="127.0.0.1:1", device=CUDA
    )


def linear(value: float) -> nn.Linear:
    model = nn.Linear(512, 512).to(CUDA)
    nn.init.constant_(model.weight, value)
    return model


@pytest.mark.parametrize("keeps_snapshot", [False, True])
def test_gpu_models_average_over_gloo_through_pinned_memory(is_simulated: bool, keeps_snapshot: bool) -> None:
    store = HashStore()

    def one(position: int) -> float:
        streams = CudaStreams(CUDA)
        with streams.compute():
            model = linear(float(position + 1))
            layout = Layout(model)
            averaging = Averaging(layout, AveragingOptions(), wake=lambda: None, streams=streams)
            averaging.start(group("gloo", store, position, 2), row(layout), keeps_snapshot=keeps_snapshot)
            assert is_simulated or layout.flat_buffers["float32"].is_pinned()
            averaging.complete(has_newer_steps=keeps_snapshot)
            return model.weight.mean().item()

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(one, range(2))) == [1.5, 1.5]


@either
def test_nccl_averages_on_the_device() -> None:
    streams = CudaStreams(CUDA)
    with streams.compute():
        model = linear(3.0)
        layout = Layout(model)
        averaging = Averaging(layout, NOT_ALONE, wake=lambda: None, streams=streams)
        alone = group("nccl", HashStore(), 0, 1)
        for _ in range(3):
            averaging.start(alone, row(layout, weight=5), keeps_snapshot=True)
            averaging.order_change()
            model.weight.data.add_(1.0)
            averaging.complete(has_newer_steps=True)
        assert layout.flat_buffers["float32"].is_cuda
        assert model.weight.mean().item() == pytest.approx(6.0)


@either
def test_every_collective_of_nccl_runs_beside_training_and_the_group_can_be_aborted() -> None:
    streams = CudaStreams(CUDA)
    with streams.compute():
        values = torch.arange(512.0, device=CUDA)
    streams.hand_over()
    with streams.communication():
        alone = group("nccl", HashStore(), 0, 1)
        alone.all_reduce(values)
        alone.broadcast(values, 0)
        (rows,) = alone.all_gather(torch.arange(3))
        exchanged = alone.all_to_all(values.view(1, -1))
    streams.take_back(rows, exchanged)
    with streams.compute():
        assert rows.tolist() == [0, 1, 2]
        assert exchanged[0].tolist() == values.tolist() == list(range(512))
    alone.abort()


@either
def test_the_collective_sees_all_steps_before_it_and_none_after() -> None:
    """The snapshot is of the queued steps, however far the host is ahead of the device."""
    streams = CudaStreams(CUDA)
    with streams.compute():
        model = linear(0.0)
        layout = Layout(model)
        averaging = Averaging(layout, NOT_ALONE, wake=lambda: None, streams=streams)
        alone = group("nccl", HashStore(), 0, 1)
        sleep(50_000_000)
        model.weight.data.add_(1.0)
        averaging.start(alone, row(layout), keeps_snapshot=True)
        averaging.order_change()
        model.weight.data.add_(10.0)
        averaging.complete(has_newer_steps=True)
        assert set(layout.flat_buffers["float32"][: 512 * 512].tolist()) == {1.0}
        assert model.weight.mean().item() == 11.0


@needs_gpu
def test_times_are_the_device_s_and_the_host_is_two_batches_ahead_at_most() -> None:
    timer = DeviceTimer()
    started_s = time.perf_counter()
    for _ in range(MAX_AHEAD):
        timer.start()
        sleep(100_000_000)
        timer.stop()
    ahead_s = time.perf_counter() - started_s
    timer.start()
    timer.stop()
    times = timer.finish()
    assert len(times) == MAX_AHEAD + 1
    assert ahead_s < times[0] / 1000


@either
def test_no_step_waits_for_the_host_or_uses_the_default_stream() -> None:
    """A rank's own step, as its loop makes it."""
    job = TrainingJob(
        model=lambda: linear(0.1),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.1),
        dataset=lambda: [0],
        train_step=lambda model, batch: model(batch).square().mean(),
        batch_size=64,
        epochs=1,
        max_grad_norm=1.0,
        precision="bf16",
    )
    streams = CudaStreams(CUDA)
    with streams.compute():
        built = build_model(job, CUDA, "job.py")
        accumulators = pin_accumulators(built.model)
        step, timer, meter = TrainStep(job, built, CUDA, "job.py"), DeviceTimer(), Meter(reads_losses=False)
        batch = torch.randn(64, 512, device=CUDA)
        step.run(batch, 64)  # the first one makes the optimizer's state
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(5):
                timer.start()
                loss, scalars = step.run(batch, 64)
                timer.stop()
                meter.add_batch(0, 64, loss, scalars)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.cuda.default_stream(CUDA).query()
        assert accumulators


def test_an_overlapped_round_over_gloo_adds_only_what_others_did(is_simulated: bool) -> None:
    """What was brought is copied from the host's memory only when the device has put it there."""
    streams = CudaStreams(CUDA)
    with streams.compute():
        width = 256 if is_simulated else 4096
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(8))).to(CUDA)
        layout = Layout(model)
        averaging = Averaging(layout, NOT_ALONE, wake=lambda: None, streams=streams)
        alone = group("gloo", HashStore(), 0, 1)
        for value in range(1, 4):
            sleep(50_000_000)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(float(value))
            averaging.start(alone, row(layout), keeps_snapshot=True)
            averaging.order_change()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.5)
            averaging.complete(has_newer_steps=True)
            assert {one.item() for p in model.parameters() for one in (p.min(), p.max())} == {value + 0.5}


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    """Sample i is a row of i."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((1024,), float(index))


@either
@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_wait_on_the_device_and_none_is_read_before_it_is_there(num_workers: int) -> None:
    gc.collect()  # else a forked worker may collect what tests before have left, and dies of a process group
    streams, changed, seen = CudaStreams(CUDA), threading.Condition(), []

    def wake() -> None:
        with changed:
            changed.notify_all()

    transfer = CudaTransfer(CUDA, streams)
    loader = LeaseLoader(
        Rows(), order=Shuffled(4096, 0), batch_size=16, collate_fn=None, wake=wake, transfer=transfer,
        num_workers=num_workers, pins_memory=True,
    )  # fmt: skip
    num_prefetched = 0
    with streams.compute():
        for lease in range(4):
            loader.plan()
            loader.add(LeasedPart(id=lease + 1, epoch=0, offset=lease * 1024, size=1024))
            for _ in range(64):
                with changed:
                    assert changed.wait_for(lambda: loader.is_ready, timeout=30)
                batch = loader.take()
                num_prefetched += batch.event is not None
                data = transfer.receive(batch.data, batch.event)
                sleep(1_000_000)
                seen.append(data.amin(1).eq(data.amax(1)).all() * data[:, 0].sum())
                del data, batch  # its memory may go to another batch, once it is read
        assert sum(one.item() for one in seen) == sum(range(4096))
    assert num_prefetched > 128
    assert torch.cuda.default_stream(CUDA).query()
    loader.stop()


@needs_gpu
def test_prefetched_batches_leave_training_the_memory_that_it_needs() -> None:
    streams = CudaStreams(CUDA)
    transfer = CudaTransfer(CUDA, streams)
    data = torch.zeros(64, 1024).pin_memory()
    with streams.compute():
        moved = transfer.receive(*transfer.move(data))
        activations = torch.empty(256 << 20, device=CUDA)
        del activations
        transfer.plan()
        assert transfer._activation_bytes is not None
        assert abs(transfer._activation_bytes - (1 << 30)) < 64 << 20
        assert transfer.room == MAX_DEPTH, "this is a large device and a small batch"
        assert moved.is_cuda


@either
def test_a_small_data_set_is_kept_on_the_device() -> None:
    dataset = torch.utils.data.TensorDataset(torch.arange(100.0), torch.arange(100))
    wake = threading.Event()
    loader = LeaseLoader(
        dataset,
        order=Shuffled(100, 0),
        batch_size=10,
        collate_fn=None,
        wake=wake.set,
        transfer=CudaTransfer(CUDA, CudaStreams(CUDA)),
    )
    loader.add(LeasedPart(id=1, epoch=0, offset=0, size=100))
    seen: list[float] = []
    while len(seen) < 100:
        assert wake.wait(400)
        wake.clear()
        while loader.is_ready:
            one = loader.take()
            values, _ = loader.transfer.receive(one.data, one.event)
            assert values.is_cuda
            seen += values.tolist()
    loader.stop()
    assert sorted(seen) == list(range(100))


@needs_gpu
def test_a_loop_of_ones_own_is_timed_by_the_device() -> None:
    """Row G10: a batch's time is what the device took, although the host was done long before."""
    model = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096) for _ in range(8)))
    trainer = Trainer.setup(model, torch.optim.SGD(model.parameters(), lr=0.01))
    dataset = torch.utils.data.TensorDataset(torch.randn(4096, 4096))
    trainer.set_data_loader(
        torch.utils.data.DataLoader(dataset, batch_size=4096), forward_input="input", names=("input",)
    )
    trainer.set_loss_fn(lambda context: context.output.square().mean())
    host_ms = device_ms = 0.0
    for epoch in range(3):  # the first ones warm up
        for batch in trainer.epoch(epoch):
            started_s = time.perf_counter()
            trainer.forward_batch(batch)
            host_ms = (time.perf_counter() - started_s) * 1000
            trainer._stepper.clock.end_batch()
            device_ms = trainer._stepper.clock.take_batch_ms(waits=True)[-1]
            trainer.step()
    assert device_ms > 2 * host_ms


def test_a_build_names_its_device_and_versions(is_simulated: bool) -> None:
    build = build_of(CUDA, needs_encryption=False)
    assert build.device_type == "cuda"
    assert build.device_id
    assert is_simulated or build.cuda == torch.version.cuda
    assert build.nccl


@needs_gpu
@pytest.mark.multigpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are not two CUDA devices")
def test_two_gpus_average_over_nccl(tmp_path: Path) -> None:
    store = FileStore(str(tmp_path / "store"), 2)

    def one(position: int) -> float:
        device = torch.device("cuda", position)
        torch.cuda.set_device(device)
        streams = CudaStreams(device)
        with streams.compute():
            model = nn.Linear(64, 64).to(device)
            nn.init.constant_(model.weight, float(position + 1))
            layout = Layout(model)
            averaging = Averaging(layout, AveragingOptions(), wake=lambda: None, streams=streams)
            both = ProcessGroupCollectives(
                store, backend="nccl", attempt=1, generation=1, position=position, size=2, peer="127.0.0.1:1",
                device=device,
            )  # fmt: skip
            averaging.start(both, row(layout, weight=position * 2 + 1), keeps_snapshot=False)
            averaging.complete(has_newer_steps=False)
            return model.weight.mean().item()

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(one, range(2))) == [1.75, 1.75]

"""A rank's rounds over NCCL, by its strict stand-in, on the simulated device."""

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from elche_worker.collectives import nccl
from elche_worker.collectives.averaging import Averaging
from elche_worker.collectives.header import AveragingOptions, Row
from elche_worker.collectives.operations import CollectiveFailed
from elche_worker.collectives.process_group import ProcessGroupCollectives
from elche_worker.device.streams import CudaStreams
from elche_worker.model.layout import Layout
from elche_worker.outer import Nesterov
from support.nccl import bootstrap, nccl_in_use, words
from support.nccl.communicator import pace
from support.nccl.forked import SHORT, ends, until
from support.simulated_cuda import CUDA, Device
from support.simulated_cuda import device as current_device
from support.worlds import Worlds

SOON_S = 20.0
"""For what happens within milliseconds where the machine is free."""
A_WHILE_S = 0.2
"""Long enough for what should not happen."""


def group(store: dist.Store, position: int = 0, size: int = 2, backend: str = "nccl") -> ProcessGroupCollectives:
    return ProcessGroupCollectives(
        store, backend=backend, attempt=1, generation=1, position=position, size=size, peer="127.0.0.1:1", device=CUDA
    )


class Rank:
    """A model on the device, and its rounds."""

    def __init__(self, collectives: ProcessGroupCollectives, **options: Any) -> None:
        self.streams = CudaStreams(CUDA)
        self.collectives = collectives
        with self.streams.compute():
            self.model = nn.Linear(2, 1, bias=False).to(CUDA)
            with torch.no_grad():
                self.model.weight.fill_(float(collectives.position + 1))
            self.layout = Layout(self.model)
        self.averaging = Averaging(self.layout, AveragingOptions(**options), wake=lambda: None, streams=self.streams)

    @property
    def collective(self) -> "Future[Any]":
        assert self.averaging._running is not None
        return self.averaging._running

    def enter(self, round_id: int = 1) -> None:
        row = Row(
            attempt=1, generation=1, round=round_id, layout_hash=self.layout.hash, weight=1 + self.collectives.position,
            finite=1, cut=0, local_step=0, compute_us=0, version=round_id,
        )  # fmt: skip
        with self.streams.compute():
            self.averaging.start(self.collectives, row, keeps_snapshot=True)

    def train(self, number: float) -> None:
        """A step whose size depends on the rank."""
        with self.streams.compute(), torch.no_grad():
            self.averaging.order_change()
            self.model.weight.add_(torch.tensor([0.1, -0.3]).to(CUDA) * number * (1 + self.collectives.position))

    def complete(self, *, has_newer_steps: bool = False) -> list[float]:
        with self.streams.compute():
            self.averaging.complete(has_newer_steps=has_newer_steps)
            return self.model.weight.detach()[0].tolist()  # type: ignore[no-any-return]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """On which nothing may have been out of order."""
    with Device().in_order(monkeypatch) as device, nccl_in_use(monkeypatch):
        yield device


@contextmanager
def two_ranks(backend: str = "nccl", **options: Any) -> Iterator[list[Rank]]:
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as threads:
        groups = threads.map(lambda position: group(store, position, backend=backend), range(2))
        ranks = [Rank(one, **options) for one in groups]
    try:
        yield ranks
    finally:
        pace.may_run.set()
        for rank in ranks:
            rank.collectives.abort()
        wait([one for rank in ranks if (one := rank.averaging._running) is not None], SOON_S)


def test_two_ranks_average(device: Device) -> None:
    with two_ranks() as ranks:
        for rank in ranks:
            rank.enter()
        assert [rank.complete() for rank in ranks] == [[pytest.approx(5 / 3)] * 2] * 2


def after_three_rounds(backend: str, *, is_overlapped: bool, options: dict[str, Any]) -> list[list[float]]:
    """The first round is of ranks that are equal, as is a job's."""
    with two_ranks(backend, **options) as ranks:
        for rank in ranks:
            with rank.streams.compute(), torch.no_grad():
                rank.model.weight.fill_(1.0)
        for round_id in range(1, 4):
            for rank in ranks:
                rank.train(round_id - 1)
                rank.enter(round_id)
                if is_overlapped:
                    rank.train(0.7)
            values = [rank.complete(has_newer_steps=is_overlapped) for rank in ranks]
    return values


@pytest.mark.parametrize("is_overlapped", [False, True], ids=["blocking", "overlapped"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weighting": "uniform"},
        {"merge": "adascale"},
        {"compress": "bf16"},
        {"compress": "int8"},
        {"compress": "topk"},
        {"outer": Nesterov(lr=0.5, momentum=0.5)},
    ],
    ids=["samples", "uniform", "adascale", "bf16", "int8", "topk", "nesterov"],
)
def test_rounds_over_nccl_and_over_gloo_leave_the_same_bits(
    device: Device, options: dict[str, Any], is_overlapped: bool
) -> None:
    over_gloo, over_nccl = (
        after_three_rounds(backend, is_overlapped=is_overlapped, options=options) for backend in ("gloo", "nccl")
    )
    assert over_nccl == over_gloo
    assert is_overlapped or over_nccl[0] == over_nccl[1]


def test_a_result_that_comes_late_is_added_to_what_was_trained_meanwhile(device: Device) -> None:
    with two_ranks() as ranks:
        pace.hold("ALLREDUCE")
        for rank in ranks:
            rank.enter()
            with rank.streams.compute(), torch.no_grad():
                rank.averaging.order_change()
                rank.model.weight.add_(10)
        pace.may_run.set()
        assert [rank.complete(has_newer_steps=True) for rank in ranks] == [[pytest.approx(10 + 5 / 3)] * 2] * 2


def test_a_round_is_not_done_before_its_values_are_there(device: Device) -> None:
    with two_ranks() as ranks:
        pace.hold("ALLREDUCE")
        for rank in ranks:
            rank.enter()
        finished, _ = wait([rank.collective for rank in ranks], A_WHILE_S)
        assert not finished


def test_a_round_that_is_aborted_in_its_header_has_failed(device: Device) -> None:
    with two_ranks() as (rank, _):
        rank.enter()
        finished, _ = wait([rank.collective], A_WHILE_S)
        assert not finished
        assert rank.averaging.abort(SOON_S)
        with pytest.raises(CollectiveFailed):
            rank.complete()


@pytest.mark.parametrize("has_newer_steps", [False, True])
def test_a_round_that_is_aborted_in_its_values_has_failed_and_leaves_the_model(
    device: Device, has_newer_steps: bool
) -> None:
    """The abort returns without a word, and leaves garbage in the buffers."""
    with two_ranks() as ranks:
        pace.hold("ALLREDUCE")
        for rank in ranks:
            rank.enter()
        until(lambda: len(pace.held) == 2)  # both have agreed on the header
        for rank in ranks:
            assert rank.averaging.abort(SOON_S)
            with pytest.raises(CollectiveFailed, match="was aborted"):
                rank.complete(has_newer_steps=has_newer_steps)
            with rank.streams.compute():
                assert rank.model.weight.detach()[0].tolist() == [float(rank.collectives.position + 1)] * 2


def test_what_follows_an_abort_has_failed_in_the_words_of_a_collective(device: Device) -> None:
    with two_ranks() as (rank, _):
        rank.collectives.abort()
        with rank.streams.communication(), pytest.raises(CollectiveFailed):
            rank.collectives.all_reduce(torch.ones(4, device=CUDA))


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("CUDA error: uncorrectable ECC error encountered", RuntimeError),
        ("NCCL error: remote process exited or there was a network error", CollectiveFailed),
    ],
)
def test_a_broken_device_is_not_taken_for_a_lost_peer(device: Device, message: str, kind: type[Exception]) -> None:
    def broken(tensors: Any) -> None:
        raise RuntimeError(message)

    with two_ranks() as (rank, _):
        communicator = rank.collectives._on_device
        assert communicator is not None
        communicator._group.allreduce = broken
        with rank.streams.communication(), pytest.raises(kind, match=message.partition(":")[0]) as raised:
            rank.collectives.all_reduce(torch.ones(4, device=CUDA))
        assert type(raised.value) is kind


def test_a_group_is_not_ready_before_all_its_ranks_are_there(device: Device) -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(group, store, 0)
        finished, _ = wait([first], A_WHILE_S)
        others = threads.submit(group, store, 1)
        assert first.result(SOON_S).size == others.result(SOON_S).size == 2
    assert not finished


def test_a_communicator_is_not_there_before_its_ranks_are_whatever_the_environment_says(device: Device) -> None:
    """Else a rank would wait for it in a round, which it could not leave when another rank dies."""
    store = dist.HashStore()
    with patch.dict(os.environ, {"TORCH_NCCL_USE_COMM_NONBLOCKING": "1"}), ThreadPoolExecutor(2) as threads:
        nccl.keep_survivors_alive()
        first = threads.submit(nccl.Communicator, store, 0, 2, CUDA)
        finished, _ = wait([first], A_WHILE_S)
        threads.submit(nccl.Communicator, store, 1, 2, CUDA).result(SOON_S)
        first.result(SOON_S)
    assert not finished


def test_a_communicator_for_which_there_is_no_memory_finds_what_was_cached_the_next_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks that train may have reserved all of the card: when one had died, the others could not meet any more."""
    text = words.nccl_error("unhandled cuda error", "ncclUnhandledCudaError", "Cuda failure 2 'out of memory'")
    make = bootstrap.init_rank

    def with_room_if_emptied(*given: Any) -> Any:
        if not any("the cache is emptied" in problem for problem in device.problems):
            raise dist.DistBackendError(text)
        return make(*given)

    with Device().in_use(monkeypatch) as device, nccl_in_use(monkeypatch):
        monkeypatch.setattr(bootstrap, "init_rank", with_room_if_emptied)
        with pytest.raises(CollectiveFailed, match=r"(?s)could not meet.*out of memory"):
            group(dist.HashStore(), size=1)
        group(dist.HashStore(), size=1).abort()


def outlasts_its_timeout() -> None:
    """A round that takes longer than its group's timeout, as beside a rank that evaluates for long."""
    nccl.keep_survivors_alive()
    nccl.PATIENCE = timedelta(milliseconds=50)
    communicator = nccl.Communicator(dist.HashStore(), 0, 1, CUDA)
    pace.hold()
    with CudaStreams(CUDA).communication():
        communicator._group.allreduce([torch.ones(4, device=CUDA)])
    beats = communicator._group._shared.beats
    until(lambda: communicator._group._shared.beats > beats + 20)


def has_a_kernel_that_fails() -> None:
    """The model's, beside a collective: its error is to be raised where the host waits, with a traceback."""
    nccl.keep_survivors_alive()
    communicator = nccl.Communicator(dist.HashStore(), 0, 1, CUDA)
    pace.hold()
    with CudaStreams(CUDA).communication():
        communicator._group.allreduce([torch.ones(4, device=CUDA)])
        current_device().error = "device-side assert triggered"
        until(communicator._group._watchdog.is_set)
        with pytest.raises(RuntimeError, match="device-side assert"):
            torch.cuda.current_stream().synchronize()


def in_processes(folder: Path) -> list[int]:
    return ends([outlasts_its_timeout, has_a_kernel_that_fails], [SHORT, SHORT])


def test_neither_a_round_that_takes_long_nor_an_error_of_the_model_ends_the_process(
    worlds: Worlds, tmp_path: Path
) -> None:
    """The watchdog would; the job then has no traceback."""
    assert worlds.run(1, in_processes, tmp_path) == [[0, 0]]

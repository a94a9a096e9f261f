"""How much of a device's memory rounds take, counted by the simulated device beside what a bare loop takes.

docs/gpus.md has the numbers.
"""

import gc
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elche_worker.collectives.averaging import ValuesPlace
from elche_worker.collectives.operations import CollectiveFailed
from elche_worker.device import chunks
from elche_worker.outer import Adam, Nesterov
from support.device_ranks import Pair, Rank, alone, new_rank, on_device
from support.simulated_cuda import CPU, CUDA, Device


def large() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 256), nn.Linear(256, 256), nn.Linear(256, 1))


P = 4 * sum(one.numel() for one in large().parameters())
"""Bytes of the trained parameters."""
LITTLE = 64
"""Bytes of what is beside: sums of losses, a batch."""
ADAMW = {"model": large, "optimizer": lambda model: torch.optim.AdamW(model.parameters())}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """A device on which nothing may have gone wrong at the test's end, and that has no room to fetch batches ahead."""
    gc.freeze()  # what is there already is not looked through at each `live_bytes`
    with Device().in_order(monkeypatch) as device:
        device.memory.free = 0
        yield device
    gc.unfreeze()


def live_bytes(device: Device) -> int:
    gc.collect()
    return device.live_bytes


def bare(device: Device, rank: Rank) -> tuple[int, int]:
    """Bytes that a loop holds between two batches, and at most in one."""
    rank.lease(1)  # it always has more to train
    rank.train(1)
    device.peak_bytes = 0
    rank.train(1)
    held_bytes = live_bytes(device)
    assert 3 * P <= held_bytes < 3.1 * P, "parameters and moments; gradients are gone"
    return held_bytes, device.peak_bytes


@pytest.mark.parametrize("averaging", ["blocking", "overlapped"])
@pytest.mark.parametrize("compress", [None, "int8"])
def test_one_device_alone_keeps_nothing(device: Device, tmp_path: Path, averaging: str, compress: Any) -> None:
    with new_rank(tmp_path, alone(), averaging=averaging, compress=compress, **ADAMW) as rank:
        bare_bytes, bare_peak_bytes = bare(device, rank)
        for at in range(3):
            rank.round(meanwhile=0 if averaging == "blocking" else 1, may_be_checkpoint=at == 1)
            assert live_bytes(device) <= bare_bytes + LITTLE
        assert not rank.replica.layout.has_result, "nor has the host"
        assert device.peak_bytes <= bare_peak_bytes + LITTLE


@pytest.mark.parametrize(("memory", "num_copies"), [("device", 1), ("host", 0)])
def test_one_device_alone_keeps_what_may_be_asked_for_where_rounds_hold_their_values(
    device: Device, tmp_path: Path, memory: Any, num_copies: int
) -> None:
    """Until its next round. To copy it to the host took an H100 30 ms at each epoch's end."""
    with new_rank(tmp_path, alone(), memory=memory, **ADAMW) as rank:
        bare_bytes, _ = bare(device, rank)
        rank.round(may_be_checkpoint=True)
        assert rank.replica.layout.has_result
        kept_bytes = live_bytes(device) - bare_bytes - num_copies * P
        assert abs(kept_bytes) <= LITTLE
        rank.round(may_be_checkpoint=False)
        assert not rank.replica.layout.has_result
        assert live_bytes(device) <= bare_bytes + LITTLE


CASES: dict[str, dict[str, Any]] = {
    '`merge="mean"`, blocking': {"merge": "mean", "averaging": "blocking"},
    '`merge="mean"`': {"merge": "mean"},
    "**the default**": {},
    '`outer_optimizer="nesterov"`': {"outer_optimizer": Nesterov()},
    '`outer_optimizer="adam"`': {"outer_optimizer": Adam()},
    "`compress` is set": {"compress": "int2"},
}
"""As docs/gpus.md calls them."""


def documented(case: str) -> tuple[float, float]:
    """How many P rounds hold on the device, and take beside that while they are made, with memory="device"."""
    text = (Path(__file__).parents[2] / "docs" / "gpus.md").read_text(encoding="utf-8")
    found = re.search(rf"^\| {re.escape(case)} \| ([0-9.]+) P \| ([0-9.]+) P", text, re.MULTILINE)
    assert found is not None, case
    return float(found[1]), float(found[2])


@pytest.fixture
def chunk_bytes(monkeypatch: pytest.MonkeyPatch) -> int:
    """Of a model whose tensors are many times larger."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", P // 20)
    return P // 20


def counted(device: Device, rank: Rank) -> tuple[int, int, int]:
    """Bytes beyond a bare loop's: held between rounds, in a round beside that, and in a round beside a batch."""
    held_bytes, batch_bytes = bare(device, rank)
    for _ in range(2):
        rank.enter()
        rank.hold()
        rank.train(1)
    kept_bytes, device.peak_bytes = live_bytes(device), 0
    rank.enter()
    rank.hold()
    round_bytes, device.peak_bytes = device.peak_bytes, 0
    rank.enter()
    if rank.replica._job.overlaps:
        rank.train(1)
    beside_bytes, device.peak_bytes = device.peak_bytes, 0
    rank.hold()
    round_bytes = max(round_bytes, device.peak_bytes)
    return kept_bytes - held_bytes, round_bytes - kept_bytes, beside_bytes - batch_bytes


@pytest.mark.parametrize("case", CASES)
def test_on_the_device_rounds_hold_what_the_documentation_says(
    device: Device, tmp_path: Path, chunk_bytes: int, case: str
) -> None:
    with new_rank(tmp_path, on_device(), memory="device", **CASES[case], **ADAMW) as rank:
        kept_bytes, more_bytes, _ = counted(device, rank)
        needed_bytes = rank.replica.layout.size_bytes * rank.replica.averaging.num_copies(rank.replica._job.overlaps)
    kept, more = documented(case)
    of_rows_bytes = 0.2 * P  # at most: float64 for each of 256 values, where large models have thousands to a row
    assert kept_bytes == pytest.approx(kept * P, abs=of_rows_bytes)
    largest_bytes = 4 * 256 * 256
    assert more_bytes <= more * P + 2 * largest_bytes + of_rows_bytes, "beside temporaries of the largest tensor"
    assert kept_bytes <= needed_bytes + of_rows_bytes, "what is to be free before it is taken"


@pytest.mark.parametrize("case", CASES)
def test_in_host_memory_rounds_take_two_chunks_of_the_device_at_most(
    device: Device, tmp_path: Path, chunk_bytes: int, case: str
) -> None:
    with new_rank(tmp_path, on_device(), memory="host", **CASES[case], **ADAMW) as rank:
        kept_bytes, more_bytes, beside_a_batch_bytes = counted(device, rank)
    assert kept_bytes <= LITTLE
    assert more_bytes <= 2 * chunk_bytes + LITTLE
    assert beside_a_batch_bytes <= 2 * chunk_bytes + LITTLE


class Failing(Pair):
    """A pair in which a peer goes after the third part of the values."""

    num_parts = 0

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self.num_parts += 1
        if self.num_parts == 3:
            raise CollectiveFailed("a peer is gone")
        super().all_reduce(tensor)


def values(rank: Rank) -> list[torch.Tensor]:
    return [one.detach().cpu().clone() for one in rank.replica.model.parameters()]


@pytest.mark.parametrize("memory", ["device", "host"])
def test_a_round_that_fails_between_two_chunks_leaves_nothing(
    device: Device, tmp_path: Path, chunk_bytes: int, memory: str
) -> None:
    failing = Failing(attempt=1, generation=1, device=CUDA)
    with new_rank(tmp_path, failing, memory=memory, merge="mean", **ADAMW) as rank:
        rank.train(2)
        before = values(rank)
        if memory == "device":
            failing.num_parts = 2  # there the group itself cuts
        rank.enter()
        with pytest.raises(CollectiveFailed):
            rank.hold()
        assert all(map(torch.equal, values(rank), before))
        rank.round()
        assert all(map(torch.isfinite, map(torch.sum, values(rank))))


@pytest.mark.parametrize(("free_bytes", "place"), [(100 * P, ValuesPlace.DEVICE), (P, ValuesPlace.PINNED)])
def test_auto_holds_them_on_the_device_if_training_leaves_room(
    device: Device, tmp_path: Path, capfd: pytest.CaptureFixture[str], free_bytes: int, place: ValuesPlace
) -> None:
    device.memory.total, device.memory.free = 1000 * P, 100 * P + free_bytes  # of which a tenth is not to be used
    with new_rank(tmp_path, on_device(), **ADAMW) as rank:
        rank.enter()
        rank.hold()
        assert rank.replica.averaging.place is ValuesPlace.PAGEABLE, "nothing is known of training"
        assert rank.replica.layout.device == CPU
        for _ in range(2):
            rank.round(meanwhile=1)
            assert rank.replica.averaging.place is place
            assert rank.replica.layout.device == (CUDA if place is ValuesPlace.DEVICE else CPU)
    (line,) = [one for one in capfd.readouterr().err.splitlines() if "memory='auto'" in one]
    assert ("on the device" in line) == (place is ValuesPlace.DEVICE)

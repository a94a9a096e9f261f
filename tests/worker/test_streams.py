"""On a device that computes beside the host, every read comes after its write, and nothing uses the default stream.

A rank's own parts run on a simulated device (`simulated_cuda`), which sees what they do and knows what is in order.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from elche_worker.collectives.averaging import Averaging
from elche_worker.collectives.operations import CollectiveFailed, Collectives
from elche_worker.collectives.process_group import ProcessGroupCollectives
from elche_worker.device import streams
from elche_worker.device.streams import CudaStreams
from elche_worker.outer import SGD, Nesterov
from elche_worker.rank.checkpoint_capture import CheckpointCapture
from support.device_ranks import GROUPS, Pair, Rank, new_rank, on_device
from support.simulated_cuda import CUDA, DEFAULT, Device


class Stuck(Pair):
    """A pair whose other rank never comes."""

    def __init__(self, **what: Any) -> None:
        super().__init__(**what)
        self.is_aborted = threading.Event()

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self.is_aborted.wait()
        raise CollectiveFailed("it was aborted")

    def abort(self) -> None:
        self.is_aborted.set()


def gloo(store: dist.Store, position: int = 0, size: int = 1) -> Collectives:
    return ProcessGroupCollectives(
        store, backend="gloo", attempt=1, generation=1, position=position, size=size, peer="127.0.0.1:1", device=CUDA
    )


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """A device on which nothing may have gone wrong at the test's end."""
    with Device().in_order(monkeypatch) as device:
        yield device


@pytest.fixture(params=GROUPS)
def group(request: pytest.FixtureRequest) -> Collectives:
    return GROUPS[request.param]()


def test_batches_are_trained_in_order(device: Device, tmp_path: Path) -> None:
    with new_rank(tmp_path, on_device()) as rank:
        rank.train(4)
    assert DEFAULT not in device.num_operations


def test_what_the_users_file_made_when_it_was_imported_is_there_when_it_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On the default stream, for which the computing one does not wait by itself."""
    with Device().in_use(monkeypatch) as device:
        constant = torch.ones(4, device=CUDA)
        with CudaStreams(CUDA).compute():
            constant.sum()
    assert not [problem for problem in device.problems if "nothing orders" in problem]


def test_a_round_is_entered_with_all_steps_before_it(device: Device, tmp_path: Path, group: Collectives) -> None:
    with new_rank(tmp_path, group, averaging="overlapped") as rank:
        rank.train(2)
        rank.enter()
        rank.hold()


def test_what_is_averaged_is_what_was_entered_while_training_goes_on(
    device: Device, tmp_path: Path, group: Collectives
) -> None:
    with new_rank(tmp_path, group, averaging="overlapped") as rank:
        for _ in range(3):
            rank.round(meanwhile=2)


@pytest.mark.parametrize("policy", ["cadence", "sync"])
def test_a_result_is_applied_after_it_has_come(device: Device, tmp_path: Path, group: Collectives, policy: str) -> None:
    with new_rank(tmp_path, group, averaging="blocking", policy=policy) as rank:
        for _ in range(3):
            rank.round()


@pytest.mark.parametrize("policy", ["cadence", "sync"])
def test_a_checkpoint_has_the_result_and_the_next_round_waits_for_it(
    device: Device, tmp_path: Path, group: Collectives, policy: str
) -> None:
    with new_rank(tmp_path, group, policy=policy) as rank:
        for _ in range(3):
            rank.round(meanwhile=1 if policy == "cadence" else 0, may_be_checkpoint=True)
            rank.write()
        rank.replica.checkpoints.writer._thread.shutdown()
        assert [one.WhichOneof("message") for one in rank.said] == ["checkpoint_saved"] * 3


def test_a_checkpoint_of_a_round_does_not_have_the_training_thread_wait_for_the_device(
    device: Device, tmp_path: Path
) -> None:
    """Moments, buffers and what the merge knows are copied while it trains on."""
    changes: dict[str, Any] = {"optimizer": lambda model: torch.optim.AdamW(model.parameters())}
    with new_rank(tmp_path, on_device(), memory="device", **changes) as rank:
        rank.round(meanwhile=1)  # what is measured once
        before = device.num_waits.get(device.thread, 0)
        for _ in range(2):
            rank.round(meanwhile=1, may_be_checkpoint=True)
            rank.write()
        assert device.num_waits.get(device.thread, 0) == before
        rank.replica.checkpoints.writer._thread.shutdown()


def test_a_checkpoint_is_written_when_its_copies_have_come(
    device: Device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    events = []
    computed = CudaStreams.computed
    monkeypatch.setattr(CudaStreams, "computed", lambda streams: events.append(computed(streams)) or events[-1])
    with new_rank(tmp_path, GROUPS["over gloo"]()) as rank:
        rank.round(may_be_checkpoint=True)
        assert not events[-1].query()
        assert rank.replica.checkpoints.capture._thread.submit(events[-1].query).result()  # after the copy


def test_an_evaluation_sees_the_result_and_training_goes_on_from_its_own(
    device: Device, tmp_path: Path, group: Collectives
) -> None:
    with new_rank(tmp_path, group) as rank:
        for _ in range(2):
            rank.round(meanwhile=1, may_be_checkpoint=True)
            rank.look(evaluates=True, saves_final=True)
            rank.train(1)


def test_a_rank_that_leaves_ends_the_collective_that_it_waits_in(device: Device, tmp_path: Path) -> None:
    with new_rank(tmp_path, Stuck(attempt=1, generation=1, device=CUDA)) as rank:
        rank.train(2)
        rank.enter()
        assert not rank.replica.averaging.is_done
        rank.replica.leave()
        assert rank.replica.averaging.is_done
        with pytest.raises(CollectiveFailed):
            rank.replica.apply_result()


def test_two_ranks_average_what_they_bring(device: Device, tmp_path: Path) -> None:
    """Over gloo, in the host's memory, from which the result goes to each rank's device."""
    store = dist.HashStore()

    def one(position: int) -> list[float]:
        with new_rank(tmp_path / str(position), gloo(store, position, 2), seed=position) as rank:
            rank.enter()  # nobody has trained: all begin with the source's model
            rank.hold()
            for _ in range(2):
                rank.round(meanwhile=position)
            rank.replica.loader.stop()
            return rank.replica.layout.flat_buffers["float32"].tolist()

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(one, range(2))
    assert first == second


@pytest.mark.parametrize("outer", [SGD(lr=0.7), Nesterov(lr=0.7, momentum=0.5)])
@pytest.mark.parametrize("compress", [None, "int8"])
def test_an_outer_step_and_what_compression_loses_stay_where_averages_are_made(
    device: Device, tmp_path: Path, outer: Any, compress: str | None
) -> None:
    with new_rank(tmp_path, on_device(), outer_optimizer=outer, compress=compress) as rank:
        for _ in range(3):
            rank.round(meanwhile=1, may_be_checkpoint=True)
            rank.write()
        rank.replica.checkpoints.writer._thread.shutdown()


def test_memory_of_a_checkpoint_follows_the_group_to_the_device(device: Device, tmp_path: Path) -> None:
    with new_rank(tmp_path, gloo(dist.HashStore()), outer_optimizer=SGD(lr=0.7)) as rank:
        rank.round()
        assert not rank.replica.averaging.reduction._memories["float32"].last.is_cuda
        rank.replica.generations.in_use = on_device()
        rank.round(meanwhile=1)
        assert rank.replica.averaging.reduction._memories["float32"].last.is_cuda


def rounds(rank: Rank) -> None:
    for _ in range(2):
        rank.round(meanwhile=1)


def checkpoints(rank: Rank) -> None:
    for _ in range(3):
        rank.round(may_be_checkpoint=True)
        rank.write()
    rank.replica.checkpoints.writer._thread.shutdown()


def checkpoints_after_a_look(rank: Rank) -> None:
    """The hook sees the result in the model, which is swapped for it, and back."""
    for _ in range(3):
        rank.round(meanwhile=1, may_be_checkpoint=True)
        rank.write()
    rank.replica.checkpoints.writer._thread.shutdown()


def joining(rank: Rank) -> None:
    """A newcomer brings nothing into its first round, so that nobody looks whether its values are finite."""
    rank.enter()
    rank.train(1)
    rank.hold()


def checkpoint_of_the_first_round(rank: Rank) -> None:
    rank.enter(may_be_checkpoint=True)
    rank.hold()
    rank.write()
    rank.replica.checkpoints.writer._thread.shutdown()


def evaluations(rank: Rank) -> None:
    for _ in range(2):
        rank.round(meanwhile=1)
        rank.look(evaluates=True)


def batches(rank: Rank) -> None:
    for _ in range(4):
        rank.train(3)


@pytest.mark.parametrize("path", [checkpoints_after_a_look, joining, checkpoint_of_the_first_round])
def test_other_paths_are_in_order_too(device: Device, tmp_path: Path, group: Collectives, path: Any) -> None:
    with new_rank(tmp_path, group, after_round=lambda model, version: None) as rank:
        path(rank)


@pytest.mark.parametrize("path", [checkpoints, evaluations, joining])
def test_a_moving_average_of_the_weights_is_in_order_too(
    device: Device, tmp_path: Path, group: Collectives, path: Any
) -> None:
    with new_rank(tmp_path, group, ema=0.9) as rank:
        path(rank)


@pytest.mark.parametrize("memory", ["device", "host"])
@pytest.mark.parametrize("path", [checkpoints_after_a_look, evaluations])
def test_paths_are_in_order_wherever_rounds_hold_their_values(
    device: Device, tmp_path: Path, memory: str, path: Any
) -> None:
    with new_rank(tmp_path, on_device(), after_round=lambda model, version: None, memory=memory) as rank:
        path(rank)


NOTHING = "nothing orders them"


@pytest.mark.parametrize(
    ("owner", "name", "over", "path", "found"),
    [
        (CudaStreams, "hand_over", "on the device", joining, NOTHING),
        (CudaStreams, "hand_over", "on the device", checkpoints_after_a_look, NOTHING),
        (CudaStreams, "take_back", "on the device", rounds, "is given back"),
        (CudaStreams, "take_back", "on the device", evaluations, "is given back"),
        (CudaStreams, "take_back", "on the device", checkpoints, NOTHING),
        (CudaStreams, "finish_communication", "over gloo", rounds, "in layout.py"),
        (Averaging, "order_change", "on the device", rounds, NOTHING),
        (CudaStreams, "communication", "on the device", rounds, "on the default stream"),
        (CudaStreams, "communication", "on the device", checkpoints, "on the default stream"),
        (CudaStreams, "copies", "on the device", batches, "on the default stream"),
        (CudaStreams, "receive", "on the device", batches, NOTHING),
        (streams, "_lend", "on the device", batches, "is given back"),
        (CheckpointCapture, "finish_copy", "on the device", checkpoints, NOTHING),
    ],
    ids=lambda one: one if isinstance(one, str) else getattr(one, "__name__", None),
)
def test_without_one_of_its_orders_a_path_is_found_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, owner: Any, name: str, over: str, path: Any, found: str
) -> None:
    device = Device()
    is_context = name in ("communication", "copies")
    monkeypatch.setattr(owner, name, lambda *_: device.on(None, anew=True) if is_context else None)
    # A divergence that is measured makes the host wait, and hides what is missing: `sync` measures none.
    policy = "sync" if path is checkpoints else "cadence"
    changes: dict[str, Any] = {"policy": policy}
    if (name, path) == ("take_back", checkpoints):  # what ranks see of bounds makes the host wait, too
        changes["merge"] = "mean"
    if path is checkpoints_after_a_look:  # of a model all of which is averaged: to copy the rest makes the host wait
        changes |= {"merge": "mean"}  # to copy what is known of the gains makes it wait too
        changes |= {"after_round": lambda model, version: None, "model": lambda: nn.Linear(3, 1)}
    with device.in_use(monkeypatch), new_rank(tmp_path, GROUPS[over](), **changes) as rank:
        for _ in range(5 if path is batches else 1):  # a busy host may wait for the device by chance, and so hide it
            path(rank)
            if any(found in problem for problem in device.problems):
                break
    assert any(found in problem for problem in device.problems), device.problems


def test_a_cache_that_is_emptied_and_a_device_that_is_waited_for_are_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Device().in_use(monkeypatch) as device:
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
    assert len(device.problems) == 2

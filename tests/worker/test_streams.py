"""On a device that computes beside the host, every read comes after its write, and nothing uses the default stream.

A rank's own parts run on a simulated device (`simulated_cuda`), which sees what they do and knows what is in order.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from elche.v1 import rank_pb2
from elche_worker import TrainingJob
from elche_worker.collectives.operations import CollectiveFailed, Collectives, SoloCollectives
from elche_worker.collectives.process_group import ProcessGroupCollectives
from elche_worker.data.lease_loader import Lease
from elche_worker.device import streams
from elche_worker.device.streams import CudaStreams
from elche_worker.outer import SGD, Nesterov
from elche_worker.rank.acts import EnterRound, ResolveCheckpoint, TrainBatch, UseResult
from elche_worker.rank.checkpoint_capture import CheckpointCapture
from elche_worker.rank.main import _build
from elche_worker.rank.replica import Replica
from elche_worker.rank.replica_group import SingleProcess
from elche_worker.session.launch import Launch
from support.simulated_cuda import CUDA, DEFAULT, Device

BATCH_SIZE = 4


class Pair(SoloCollectives):
    """Stands for NCCL, which is not here, with two ranks alike: collectives go to the stream that is current."""

    size = 2

    def all_gather(self, row: torch.Tensor) -> list[torch.Tensor]:
        row = row.to(self.device)
        return [row, row.clone()]

    def all_reduce(self, tensor: torch.Tensor) -> None:
        tensor.mul_(2)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        tensor.add_(0)


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


def on_device() -> Collectives:
    return Pair(attempt=1, generation=1, device=CUDA)


class Samples:
    """Fetched one by one, so that they are not kept on the device."""

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((3,), float(index)), torch.tensor([float(index % 2)])


def model() -> nn.Module:
    frozen = nn.Linear(4, 4).requires_grad_(False)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), frozen, nn.Linear(4, 1))


def train_step(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return nn.functional.mse_loss(model(x), y)


def evaluate(model: nn.Module) -> dict[str, float]:
    return {"size": float(sum(one.detach().abs().sum() for one in model.parameters()))}


JOB = TrainingJob(
    model=model,
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
    dataset=Samples,
    train_step=train_step,
    evaluate=evaluate,
    batch_size=BATCH_SIZE,
    epochs=4,
)


class Rank:
    """One rank's parts, as its process builds them, without the loop that says when."""

    def __init__(self, folder: Path, group: Collectives, **changes: Any) -> None:
        job = replace(JOB, **changes)
        launch = Launch(
            coordinator="127.0.0.1:1", secret="", job_id="job", rank=group.position, device=str(CUDA), label="",
            source="", file_name="train.py", output_dir=str(folder),
        )  # fmt: skip
        self._changed = threading.Condition()
        self.streams = CudaStreams(CUDA)
        self.said: list[rank_pb2.ConverseRequest] = []
        with self.streams.compute():
            parts, self._accumulators = _build(
                launch, job, SingleProcess(), wake=self._wake, timeline=None, streams=self.streams
            )
            self.replica = Replica(
                launch, job, parts, channel=None, streams=self.streams, wake=self._wake, tell=self.said.append  # type: ignore[arg-type]
            )  # fmt: skip
        self.replica.generations.in_use = group
        self.replica.model.train()
        self._num_rounds = self._num_leases = 0

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def lease(self, num_batches: int) -> None:
        size, self._num_leases = num_batches * BATCH_SIZE, self._num_leases + 1
        offset = (self._num_leases * size) % 200
        self.replica.take_lease(Lease(id=self._num_leases, epoch=0, offset=offset, size=size))

    def train(self, num_batches: int) -> None:
        self.lease(num_batches)
        for _ in range(num_batches):
            with self._changed:
                assert self._changed.wait_for(lambda: self.replica.loader.is_ready, timeout=10)
            self.replica.train(TrainBatch(0, 1.0))

    def enter(self, *, may_be_checkpoint: bool = False) -> None:
        self._num_rounds += 1
        self.replica.enter_round(EnterRound(self.replica.row(self._num_rounds, 1), may_be_checkpoint=may_be_checkpoint))

    def hold(self) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.replica.averaging.is_done, timeout=10)
        self.replica.apply_result()

    def round(self, *, meanwhile: int = 0, may_be_checkpoint: bool = False) -> None:
        """Trains two batches, enters, trains on meanwhile, and takes the result in."""
        self.train(2)
        self.enter(may_be_checkpoint=may_be_checkpoint)
        self.train(meanwhile)
        self.hold()

    def look(self, **what: bool) -> None:
        asked = {"evaluates": False, "calls_back": False, "saves_final": False, **what}
        self.replica.use_result(UseResult(round=self._num_rounds, version=1, epoch=0, offset=0, size=0, **asked))

    def write(self) -> None:
        order = rank_pb2.WriteCheckpoint(name=f"v{self._num_rounds}", training="{}")
        self.replica.resolve_checkpoint(ResolveCheckpoint(self._num_rounds, self._num_rounds, is_written=True), order)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """A device on which nothing may have gone wrong at the test's end."""
    with Device().in_order(monkeypatch) as device:
        yield device


@contextmanager
def new_rank(folder: Path, group: Collectives, **changes: Any) -> Iterator[Rank]:
    rank = Rank(folder, group, **changes)
    with rank.streams.compute():
        yield rank
        rank.replica.loader.stop()


GROUPS = {"on the device": on_device, "over gloo": lambda: gloo(dist.HashStore())}


@pytest.fixture(params=GROUPS)
def group(request: pytest.FixtureRequest) -> Collectives:
    return GROUPS[request.param]()


def test_batches_are_trained_in_order(device: Device, tmp_path: Path) -> None:
    with new_rank(tmp_path, on_device()) as rank:
        rank.train(4)
    assert DEFAULT not in device.num_operations


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


def evaluations(rank: Rank) -> None:
    for _ in range(2):
        rank.round(meanwhile=1)
        rank.look(evaluates=True)


def batches(rank: Rank) -> None:
    for _ in range(4):
        rank.train(3)


@pytest.mark.parametrize("path", [checkpoints_after_a_look, joining])
def test_other_paths_are_in_order_too(device: Device, tmp_path: Path, group: Collectives, path: Any) -> None:
    with new_rank(tmp_path, group, after_round=lambda model, version: None) as rank:
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
    if path is checkpoints_after_a_look:  # of a model all of which is averaged: to copy the rest makes the host wait
        changes |= {"merge": "mean"}  # to copy what is known of the gains makes it wait too
        changes |= {"after_round": lambda model, version: None, "model": lambda: nn.Linear(3, 1)}
    with device.in_use(monkeypatch), new_rank(tmp_path, GROUPS[over](), **changes) as rank:
        path(rank)
    assert any(found in problem for problem in device.problems), device.problems


def test_a_cache_that_is_emptied_and_a_device_that_is_waited_for_are_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Device().in_use(monkeypatch) as device:
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
    assert len(device.problems) == 2

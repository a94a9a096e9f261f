"""Replays of recorded ranks: rounds that are lost, and recordings that lack something or say otherwise."""

import shutil
import struct
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from zlib import crc32

import pytest
import torch

from elche.errors import InvalidJob
from elche_worker import replay
from elche_worker.collectives.operations import CollectiveFailed, Collectives
from elche_worker.data.lease_loader import LeasedPart
from elche_worker.device.streams import DeviceStreams
from elche_worker.rank.acts import EnterRound, JoinGeneration, TrainBatch
from elche_worker.rank.main import build
from elche_worker.rank.replica import Replica
from elche_worker.rank.replica_group import ReplicaGroup
from elche_worker.replaying.collectives import ReplayedMeeting
from elche_worker.session.launch import Launch
from elche_worker.telemetry.audit import MAGIC
from elche_worker.user.loading import load_job

SOURCE = """
import sys
import torch
from torch import nn
from torch.utils.data import TensorDataset
from elche_worker import TrainingJob

job = TrainingJob(
    model=lambda: nn.Sequential(nn.Linear(3, 300), nn.ReLU(), nn.Linear(300, 1)),
    optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=float(sys.argv[1])),
    dataset=lambda: TensorDataset(torch.randn(400, 3, generator=torch.Generator().manual_seed(0)), torch.ones(400, 1)),
    train_step=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
    batch_size=4, epochs=2, audit=True, averaging="overlapped", compress="auto",
)
"""
ENTERED, RECEIVED, DIGEST = 2, 3, -1
LAYOUTS = {1: "<QIQIQ", ENTERED: "<QQQQQQQ", RECEIVED: "<QQQQQIBQQ", 4: "<QQ", 5: "<QQQ", 6: "<Q", 7: "<QIQIQ"}
LAYOUTS |= {8: "<QQIIB", 9: "<QIQQ", 10: "<QQ"}


class Failing:
    """A rank's collectives that fail in some rounds: before the header, after it, or when all others have all."""

    def __init__(self, inner: Any, fails: dict[int, str]) -> None:
        self._inner, self._fails, self._now, self._has_header = inner, fails, "", False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def begin(self, round_id: int) -> None:
        self._now, self._has_header = self._fails.get(round_id, ""), False
        self._fail_if("before")

    def all_gather(self, row: torch.Tensor) -> list[torch.Tensor]:
        self._fail_if("after" if self._has_header else "")
        self._has_header = True
        return cast(list[torch.Tensor], self._inner.all_gather(row))

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self._fail_if("after")
        self._inner.all_reduce(tensor)

    def finish(self) -> None:
        self._fail_if("late")

    def _fail_if(self, when: str) -> None:
        if when and self._now == when:
            raise CollectiveFailed("so the test wants it")


class Recorded:
    """Ranks that train and record, in the test's hands."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.replicas: list[Replica] = []
        self._meetings: dict[int, ReplayedMeeting] = {}
        self._fails: dict[tuple[int, int], str] = {}
        """By rank and round."""
        self._num_leased = 0

    def begin(self) -> Replica:
        """One more rank."""
        rank = len(self.replicas)
        launch = Launch(
            coordinator="",
            secret="",
            job_id="digits-1",
            rank=rank,
            incarnation=rank + 1,
            device="cpu",
            label="cpu",
            source=SOURCE,
            file_name=str(self.folder / "train.py"),
            output_dir=str(self.folder),
            verify_rounds=True,
            arguments=["0.01"],
        )
        wake: Callable[[], None] = lambda: None  # noqa: E731
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", [launch.file_name, *launch.arguments])
            job = load_job(launch.source, launch.file_name)
            parts, _ = build(launch, job, ReplicaGroup(), wake=wake, timeline=None, streams=DeviceStreams())
        parts.loader.fetch_in_step()

        def meet(act: JoinGeneration) -> Collectives:
            inner = self._meetings[act.generation].collectives(act, torch.device("cpu"))
            fails = {number: when for (whose, number), when in self._fails.items() if whose == rank}
            return cast(Collectives, Failing(inner, fails))

        nobody: Any = None
        streams = DeviceStreams()
        self.replicas.append(
            Replica(
                launch, job, parts, channel=nobody, streams=streams, wake=wake, send=lambda message: None, meet=meet
            )
        )
        return self.replicas[-1]

    def fail(self, number: int, *when: str) -> None:
        """Has a round fail on each rank, by place, in its own way; "": not."""
        self._fails |= {(rank, number): one for rank, one in enumerate(when)}

    def meet(self, generation: int, *ranks: int) -> None:
        self._meetings[generation] = ReplayedMeeting(len(ranks))
        for position, rank in enumerate(ranks):
            self.replicas[rank].join_generation(JoinGeneration(1, generation, position, len(ranks), "gloo"))
        for rank in ranks:
            assert not self.replicas[rank].finish_build(generation)

    def train(self, rank: int, num_batches: int) -> None:
        replica = self.replicas[rank]
        for _ in range(num_batches):
            number = self._num_leased = self._num_leased + 1
            lease = LeasedPart(id=number, epoch=0, offset=4 * (number - 1), size=4, granted=number)
            replica.take_lease(lease)
            replica.train(TrainBatch(replica.progress.samples, replica.rates.factor))

    def round(
        self,
        number: int,
        generation: int,
        *ranks: int,
        newer: int = 1,
        dead: int | None = None,
        idle: int | None = None,
    ) -> None:
        """A round, in which each rank trains newer batches, but not the idle one, which lacks the model. The dead one
        never applies it. Each has another level.
        """
        for rank in ranks:
            row = self.replicas[rank].row(number, generation)
            self.replicas[rank].enter_round(EnterRound(replace(row, level=1 + (number + rank) % 4)))
        for rank in ranks:
            self.train(rank, 0 if rank == idle else newer)
        for rank in ranks:
            if rank != dead:
                try:
                    self.replicas[rank].apply_result()
                except CollectiveFailed:
                    pass

    @property
    def place(self) -> Path:
        return self.folder / "audit" / "digits-1"


@pytest.fixture
def recorded(tmp_path: Path) -> Recorded:
    """Two ranks, of which one dies in a round; rounds are lost, each in another way, and a third rank joins."""
    run = Recorded(tmp_path)
    run.begin()
    run.begin()
    run.fail(3, "before", "before")
    run.fail(4, "after", "after")
    run.fail(5, "late", "late")
    run.meet(1, 0, 1)
    for number in range(1, 5):
        run.round(number, 1, 0, 1, newer=0 if number == 1 else 2)
    run.round(5, 1, 0, 1)
    run.begin()
    run.meet(2, 0, 1, 2)
    run.round(6, 2, 0, 1, 2, idle=2)
    run.round(7, 2, 0, 1, 2, newer=3)
    run.round(8, 2, 0, 1, 2, dead=1)
    run.meet(3, 0, 2)
    run.round(9, 3, 0, 2)
    run.round(10, 3, 0, 2, idle=2)
    run.fail(12, "after", "", "after")  # of the first rank alone the last result is kept nowhere, and made anew there
    run.meet(4, 0)
    run.round(11, 4, 0)
    run.meet(5, 0, 2)
    for number in range(12, 18):
        run.round(number, 5, 0, 2, newer=2, idle=2 if number < 14 else None)  # it lacks what round 11 has made
    for replica in run.replicas:
        if replica.audit.log is not None:
            replica.audit.log.flush()
        replica.leave()
    return run


def test_ranks_that_lose_rounds_die_and_join_are_repeated_bit_for_bit(recorded: Recorded, tmp_path: Path) -> None:
    done = replay(recorded.folder)
    assert (done.round, done.difference, done.num_compared) == (17, "", 12)
    assert [one.rank for one in done.ranks] == [0, 1, 2]
    first = recorded.replicas[0]
    first.keep_result()
    for name, tensor in first.model.state_dict().items():
        assert torch.equal(tensor, done.model.state_dict()[name]), name
    third = next(one for one in done.ranks if one.rank == 2).replica
    for ours, theirs in zip(recorded.replicas[2].optimizers, third.optimizers, strict=True):
        for one, other in zip(ours.state.values(), theirs.state.values(), strict=True):
            assert torch.equal(one["exp_avg"], other["exp_avg"])


@pytest.mark.parametrize("number", [1, 2, 6, 7, 8])
def test_a_replay_ends_with_the_round_that_is_asked_for(recorded: Recorded, tmp_path: Path, number: int) -> None:
    done = replay(recorded.folder, until_round=number, out=tmp_path / "out")
    assert (done.round, done.difference) == (number, "")
    assert max(one.replica.entered.round for one in done.ranks) == number
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_a_difference_is_found_and_its_round_named(recorded: Recorded) -> None:
    path = recorded.place / "rank-2-3.bin"
    _change(path, lambda numbers: [*numbers[:DIGEST], numbers[DIGEST] ^ 1] if numbers[1] == 7 else numbers)
    done = replay(recorded.folder)
    assert done.difference == "round 7 of generation 2 on rank 2 (rank-2-3.bin): the parameters"
    assert replay(recorded.folder, until_round=6).difference == ""


def _change(path: Path, change: Callable[[list[int]], list[int]]) -> None:
    """Changes the records of results in a file of a rank, and makes its checksums right."""
    data = path.read_bytes()
    assert data.startswith(MAGIC)
    at = 16 + int.from_bytes(data[12:16], "little")
    made, crc = bytearray(data[: at + 4]), crc32(data[:at])
    at += 4
    while at < len(data):
        layout = LAYOUTS[data[at]]
        numbers = list(struct.unpack_from(layout, data, at + 1))
        if data[at] == RECEIVED:
            numbers = change(numbers)
        record = bytes([data[at]]) + struct.pack(layout, *numbers)
        crc = crc32(record, crc)
        made += record + struct.pack("<I", crc)
        at += len(record) + 4
    path.write_bytes(made)


def no_file_of_a_rank(place: Path) -> None:
    (place / "rank-1-2.bin").unlink()


def a_file_that_was_cut(place: Path) -> None:
    path = place / "rank-0-1.bin"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def a_changed_byte(place: Path) -> None:
    data = bytearray((place / "rank-0-1.bin").read_bytes())
    data[-30] ^= 1
    (place / "rank-0-1.bin").write_bytes(data)


def no_entry_into_a_round_that_all_have_lost(place: Path) -> None:
    """A file that ends before round 4, of which the other rank had the header."""
    path = place / "rank-1-2.bin"
    data = path.read_bytes()
    sizes = {kind: 1 + struct.calcsize(layout) + 4 for kind, layout in LAYOUTS.items()}
    at = 20 + int.from_bytes(data[12:16], "little")
    while not (data[at] == ENTERED and struct.unpack_from(LAYOUTS[ENTERED], data, at + 1)[2] == 4):
        at += sizes[data[at]]
    path.write_bytes(data[:at])
    for other in ("rank-0-1.bin", "rank-2-3.bin"):
        _end_after(place / other, 4)


def _end_after(path: Path, number: int) -> None:
    """Ends a file before the first round after this one."""
    data = path.read_bytes()
    at = 20 + int.from_bytes(data[12:16], "little")
    while at < len(data) and not (
        data[at] == ENTERED and struct.unpack_from(LAYOUTS[ENTERED], data, at + 1)[2] > number
    ):
        at += 1 + struct.calcsize(LAYOUTS[data[at]]) + 4
    path.write_bytes(data[:at])


def no_job(place: Path) -> None:
    next(place.glob("job-*.py")).unlink()


def no_files(place: Path) -> None:
    shutil.rmtree(place)


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (no_file_of_a_rank, "round 1 of generation 1 had 2 ranks, and files of 1 contain it"),
        (a_file_that_was_cut, "had 2 ranks, and files of 1 contain it|had 3 ranks, and files of 2 contain it"),
        (no_entry_into_a_round_that_all_have_lost, "round 4 of generation 1 had 2 ranks, and files of 1 contain it"),
        (a_changed_byte, r"rank-0-1.bin is damaged at byte \d+"),
        (no_job, r"job-[0-9a-f]+\.py, the job's file, is missing"),
        (no_files, "has no files of ranks: it was not run with --audit true"),
    ],
    ids=[
        "no_file_of_a_rank",
        "a_file_that_was_cut",
        "no_entry",
        "a_changed_byte",
        "no_job",
        "no_files",
    ],
)
def test_what_is_missing_or_damaged_is_named_in_one_line(
    recorded: Recorded, damage: Callable[[Path], None], why: str
) -> None:
    damage(recorded.place)
    with pytest.raises(InvalidJob, match=why) as raised:
        replay(recorded.folder)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("number", "why"),
    [
        (18, "there is no round 18: the recording has rounds 1 to 17"),
        (0, "there is no round 0: the recording has rounds 1 to 17"),
        (3, "round 3 has no result: its ranks have lost it"),
    ],
)
def test_a_round_that_has_no_result_is_refused(recorded: Recorded, number: int, why: str) -> None:
    with pytest.raises(InvalidJob, match=why):
        replay(recorded.folder, until_round=number)


def test_an_attempt_that_there_is_not_is_refused(recorded: Recorded) -> None:
    with pytest.raises(InvalidJob, match="has attempts 1, and none with number 2"):
        replay(recorded.folder, attempt=2)

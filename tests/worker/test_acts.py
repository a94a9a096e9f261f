"""What a leader tells its group, on the wire; and which part of a batch each process of a group trains."""

import threading
from dataclasses import astuple
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from elche_worker.collectives.header import Row
from elche_worker.data.dataset import as_dataset, order_of
from elche_worker.data.lease_loader import LeasedPart, LeaseLoader, LoadedBatch, part_of
from elche_worker.rank.acts import (
    KINDS,
    Act,
    ApplyResult,
    EndRound,
    EnterRound,
    FinishBuild,
    JoinGeneration,
    ResolveCheckpoint,
    TakeLease,
    TrainBatch,
    UseResult,
    decode,
    encode,
)
from elche_worker.telemetry.meter import Meter

LARGE = 2**63 - 1
ROW = Row(1, 2, 3, LARGE, 5, 1, 2**40, 8, 9, 10)
ACTS: list[Act] = [
    TrainBatch(2**50, 0.1),
    TrainBatch(0, float("inf")),
    TakeLease(LeasedPart(id=1, epoch=2, offset=2**40, size=4)),
    EnterRound(ROW, may_be_checkpoint=True),
    EnterRound(ROW, keeps_result=True),
    EndRound(),
    ApplyResult(),
    ResolveCheckpoint(3, 4, is_written=False),
    UseResult(1, 2, True, 3, 4, 5, False, True),
    JoinGeneration(1, 2, 0, 3, "gloo, or what it may be called: é"),
    FinishBuild(2),
]


@pytest.mark.parametrize("act", ACTS, ids=lambda act: type(act).__name__)
def test_what_is_told_is_what_is_heard(act: Act) -> None:
    heard = decode(encode(act))
    assert heard == act
    assert [type(one) for one in astuple(heard)] == [type(one) for one in astuple(act)]


def test_every_act_can_be_told() -> None:
    assert {type(act) for act in ACTS} == set(KINDS.values())


@pytest.mark.parametrize("size", [0, 1, 2, 7, 16, 17])
@pytest.mark.parametrize("num_parts", [1, 2, 3, 5])
def test_parts_are_equal_but_for_one_and_the_leader_has_one_first(size: int, num_parts: int) -> None:
    bounds = [part_of(size, position, num_parts) for position in range(num_parts)]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == size
    assert all(end == start for (_, end), (start, _) in pairwise(bounds))
    sizes = [end - start for start, end in bounds]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


def batches_of(member: int, group_size: int) -> list[LoadedBatch]:
    """Those of a member, of an epoch of 7 samples in batches of 5."""
    ready = threading.Event()
    dataset = TensorDataset(torch.arange(7))
    order = order_of(as_dataset(dataset, ""), None, 0, "")
    loader = LeaseLoader(
        dataset, order=order, batch_size=5, collate_fn=None, wake=ready.set, member=member, group_size=group_size
    )
    loader.add(LeasedPart(id=1, epoch=0, offset=0, size=7))
    batches: list[LoadedBatch] = []
    while len(batches) < 2:
        assert ready.wait(400)
        ready.clear()
        while loader.is_ready:
            batches.append(loader.take())
    loader.stop()
    return batches


def test_members_fetch_their_parts_of_every_batch_or_a_stand_in() -> None:
    whole = batches_of(0, 1)
    parts = [batches_of(member, 3) for member in range(3)]
    assert [[batch.own_size for batch in of_member] for of_member in parts] == [[2, 1], [2, 1], [1, 0]]
    for index, batch in enumerate(whole):
        assert [of_member[index].size for of_member in parts] == [batch.size] * 3
        trained = torch.cat([of[index].data[0][: of[index].own_size] for of in parts])
        assert torch.equal(trained, batch.data[0])
    assert len(parts[2][1].data[0]) == 1


def test_sums_of_members_make_those_of_the_batch() -> None:
    """Losses count by the members' parts; what a stand-in has recorded does not."""
    meters = [Meter(reads_losses=True) for _ in range(3)]
    recorded: list[tuple[float, float, dict[str, Any]]] = [
        (2.0, 0.5, {"a": (1.0, 1)}),
        (4.0, 0.5, {"a": (2.0, 1)}),
        (float("nan"), 0.0, {"a": (9.0, 1)}),
    ]
    for meter, (loss, fraction, scalars) in zip(meters, recorded, strict=True):
        meter.add_batch(0, 8, torch.tensor(loss), scalars, fraction)
    leader, *others = (meter.take_work() for meter in meters)
    for other in others:
        leader.add_part(other.part())
    (work,) = leader.to_messages()
    assert (work.num_batches, work.num_samples, work.loss_sum) == (1, 8, 3.0)
    assert (work.scalars["a"].sum, work.scalars["a"].count) == (3.0, 2)

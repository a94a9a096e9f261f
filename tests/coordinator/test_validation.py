"""Bounds of messages: what is just within is taken, and one more is refused by name."""

import math
from typing import Any

import pytest
from google.protobuf.message import Message

from elche.ready import MAX_TENSORS, MAX_TENSORS_CHARS
from elche.v1 import agent_pb2, job_pb2, rank_pb2, store_pb2
from elche_coordinator.services.validation import (
    MAX_CHARACTERS,
    MAX_ENTRIES,
    MAX_INTEGER,
    MAX_SPANS,
    NUM_RANKS,
    first_problem,
)
from elche_worker.telemetry import meter, timeline
from elche_worker.trainer import attached


def tensors(num: int, num_characters: int) -> rank_pb2.Ready:
    """So many names with so many characters together."""
    longest = -(-num_characters // num)
    names = ["x" * longest] * (num - 1)
    return rank_pb2.Ready(tensors=[*names, "x" * (num_characters - longest * (num - 1))])


def settings(num: int) -> job_pb2.JobSpec:
    return job_pb2.JobSpec(settings={str(number): "1" for number in range(num)})


def work(*nums: int) -> rank_pb2.SyncAck:
    """The work of an epoch for each number, with so many scalars."""
    one = rank_pb2.ScalarSum(sum=1.0, count=1)
    return rank_pb2.SyncAck(work=[rank_pb2.EpochWork(scalars={str(name): one for name in range(num)}) for num in nums])


def recording(num_rounds: int, num_parts: int, num_slices: int) -> job_pb2.JobSpec:
    part = job_pb2.RankPart(slices=[job_pb2.Slice(size=1)] * num_slices)
    return job_pb2.JobSpec(replay=[job_pb2.RecordedRound(parts=[part] * num_parts)] * num_rounds)


PAIRS: dict[str, tuple[Message, Message, str]] = {
    "a text": (
        agent_pb2.AgentHello(host="h" * 255),
        agent_pb2.AgentHello(host="h" * 256),
        "AgentHello.host has 256 characters; at most 255 are taken",
    ),
    "a text without a bound of its own": (
        store_pb2.GetRequest(key="k" * MAX_CHARACTERS),
        store_pb2.GetRequest(key="k" * (MAX_CHARACTERS + 1)),
        f"GetRequest.key has 4097 characters; at most {MAX_CHARACTERS} are taken",
    ),
    "a job's id": (
        job_pb2.WatchJobRequest(job_id="j" * 200),
        job_pb2.WatchJobRequest(job_id="j" * 201),
        "WatchJobRequest.job_id has 201 characters; at most 200 are taken",
    ),
    "a list": (
        store_pb2.WaitRequest(keys=["k"] * MAX_ENTRIES),
        store_pb2.WaitRequest(keys=["k"] * (MAX_ENTRIES + 1)),
        "WaitRequest.keys has 10001 entries; at most 10000 are taken",
    ),
    "all maps of a list": (
        work(*[1000] * 10),
        work(*[1000] * 10, 1),
        "SyncAck.work has 10001 scalars in all; at most 10000 are taken",
    ),
    "all lists in the lists of a list": (
        recording(1000, 2, 99),
        recording(1000, 2, 100),
        "JobSpec.replay has 202000 parts and slices in all; at most 200000 are taken",
    ),
    "many empty messages": (
        recording(100_000, 0, 0),
        recording(100_001, 0, 0),
        "JobSpec.replay has 100001 entries; at most 100000 are taken",
    ),
    "the last entry of a list": (
        job_pb2.JobSpec(secrets=["A", "B" * 64]),
        job_pb2.JobSpec(secrets=["A", "B" * 65]),
        "JobSpec.secrets has 65 characters; at most 64 are taken",
    ),
    "all texts of a list": (
        tensors(1000, MAX_TENSORS_CHARS),
        tensors(1000, MAX_TENSORS_CHARS + 1),
        f"Ready.tensors has {MAX_TENSORS_CHARS + 1} characters; at most {MAX_TENSORS_CHARS} are taken",
    ),
    "a list with a bound of its own": (
        tensors(MAX_TENSORS, MAX_TENSORS),
        tensors(MAX_TENSORS + 1, MAX_TENSORS + 1),
        f"Ready.tensors has {MAX_TENSORS + 1} entries; at most {MAX_TENSORS} are taken",
    ),
    "a map": (settings(200), settings(201), "JobSpec.settings has 201 entries; at most 200 are taken"),
    "a map's keys": (
        agent_pb2.AgentHello(labels={"k" * 200: ""}),
        agent_pb2.AgentHello(labels={"k" * 201: ""}),
        "AgentHello.labels has 201 characters; at most 200 are taken",
    ),
    "a map's values": (
        agent_pb2.AgentHello(labels={"k": "v" * 200}),
        agent_pb2.AgentHello(labels={"k": "v" * 201}),
        "AgentHello.labels has 201 characters; at most 200 are taken",
    ),
    "an integer": (
        rank_pb2.BatchesTrained(local_step=MAX_INTEGER),
        rank_pb2.BatchesTrained(local_step=MAX_INTEGER + 1),
        f"BatchesTrained.local_step is {MAX_INTEGER + 1}; at most {MAX_INTEGER} is taken",
    ),
    "an integer with a bound of its own": (
        job_pb2.ScaleJobRequest(num_ranks=10_000),
        job_pb2.ScaleJobRequest(num_ranks=10_001),
        "ScaleJobRequest.num_ranks is 10001; at most 10000 is taken",
    ),
    "a message in a message": (
        rank_pb2.ConverseRequest(ready=rank_pb2.Ready(device="d" * 255)),
        rank_pb2.ConverseRequest(ready=rank_pb2.Ready(device="d" * 256)),
        "Ready.device has 256 characters; at most 255 are taken",
    ),
    "a message in a list in a message": (
        agent_pb2.AttendRequest(hello=agent_pb2.AgentHello(slots=[agent_pb2.Slot(), agent_pb2.Slot(model="m" * 255)])),
        agent_pb2.AttendRequest(hello=agent_pb2.AgentHello(slots=[agent_pb2.Slot(), agent_pb2.Slot(model="m" * 256)])),
        "Slot.model has 256 characters; at most 255 are taken",
    ),
    "a number that must be one": (
        rank_pb2.BatchesTrained(loss_sum=math.nan, data_wait_ms=1.0),
        rank_pb2.BatchesTrained(data_wait_ms=math.nan),
        "BatchesTrained.data_wait_ms is nan; it must be a finite number",
    ),
    "a number that may be infinite": (
        rank_pb2.Ready(overhead_target=math.inf),
        rank_pb2.Ready(overhead_target=math.nan),
        "Ready.overhead_target is nan; it must be a finite number",
    ),
    "a number that may not be infinite": (
        rank_pb2.BatchesTrained(batch_ms=[1.0, 2.0]),
        rank_pb2.BatchesTrained(batch_ms=[1.0, -math.inf]),
        "BatchesTrained.batch_ms is -inf; it must be a finite number",
    ),
}


@pytest.mark.parametrize("what", PAIRS)
def test_what_is_just_within_its_bound_is_taken_and_one_more_is_refused_by_name(what: Any) -> None:
    within, beyond, problem = PAIRS[what]
    assert first_problem(within) == ""
    assert first_problem(beyond) == problem


def test_what_is_listed_by_rank_has_no_more_entries_than_the_job_has_ranks() -> None:
    """30 ranks that acknowledged rounds with 5,000 rows each let the calls of others wait for 20 s."""
    within = rank_pb2.SyncAck(header=[rank_pb2.HeaderRow(weight=1)] * 30)
    beyond = rank_pb2.HeaderReported(header=[rank_pb2.HeaderRow(weight=1)] * 31)
    links = rank_pb2.Probed(ranks=range(31))
    before = NUM_RANKS.set(30)
    try:
        assert first_problem(within) == ""
        assert first_problem(beyond) == "HeaderReported.header has 31 entries; the job has 30 ranks"
        assert first_problem(links) == "Probed.ranks has 31 entries; the job has 30 ranks"
    finally:
        NUM_RANKS.reset(before)
    assert first_problem(beyond) == ""


def test_a_rank_sends_no_more_than_is_taken() -> None:
    longest = rank_pb2.BatchesTrained(batch_ms=[1.0] * 64)
    assert meter.MAX_BATCH_TIMES == attached.MAX_BATCH_TIMES == 64
    assert first_problem(longest) == ""
    longest.batch_ms.append(1.0)
    assert first_problem(longest) == "BatchesTrained.batch_ms has 65 entries; at most 64 are taken"
    assert timeline.MAX_SPANS == MAX_SPANS

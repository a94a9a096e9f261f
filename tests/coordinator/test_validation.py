"""Bounds of messages: what is just within is taken, and one more is refused by name."""

import math
from typing import Any

import pytest
from google.protobuf.message import Message

from elche.ready import MAX_TENSORS, MAX_TENSORS_CHARS
from elche.v1 import agent_pb2, job_pb2, rank_pb2, store_pb2
from elche_coordinator.services.validation import MAX_CHARACTERS, MAX_ENTRIES, MAX_INTEGER, first_problem


def tensors(num: int, num_characters: int) -> rank_pb2.Ready:
    """So many names with so many characters together."""
    longest = -(-num_characters // num)
    names = ["x" * longest] * (num - 1)
    return rank_pb2.Ready(tensors=[*names, "x" * (num_characters - longest * (num - 1))])


def settings(num: int) -> job_pb2.JobSpec:
    return job_pb2.JobSpec(settings={str(number): "1" for number in range(num)})


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

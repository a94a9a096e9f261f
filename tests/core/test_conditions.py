"""Which devices a job may have: conditions on them, hosts' labels, and devices that are offered several times."""

import pickle
from collections.abc import Iterable

import pytest

from elche.errors import InvalidJob
from elche.selector import check_conditions, check_label, parse
from elche_coordinator.core.messages.events import AgentJoined, AgentLost
from elche_coordinator.core.messages.ids import AgentId, JobId
from elche_coordinator.core.messages.spec import Slot
from elche_coordinator.core.records import fleet
from elche_coordinator.core.records.fleet import AgentRecord
from elche_coordinator.core.records.machine import JobPhase
from support.clusters import Cluster

GIB = 2**30
H200 = Slot(device="cuda:0", model="NVIDIA H200", memory_bytes=139 * GIB)


class Lab(Cluster):
    """One host with an H200 in zone eu, one with two old cards in zone us, and two slots on a CPU."""

    def __init__(self, **quotas: int) -> None:
        super().__init__(2, **quotas)
        self.join("big", H200, zone="eu")
        self.join("old", *(Slot(device=f"cuda:{index}", model="GTX 1060", memory_bytes=6 * GIB) for index in range(2)))

    def join(self, host: str, *slots: Slot, **labels: str) -> None:
        self.handle(AgentJoined(agent_id=AgentId(host), host=host, slots=slots, labels=labels))

    def hosts_of(self, name: str) -> list[str]:
        return [record.host for record in self.core.jobs[JobId(name)].ranks.values()]


@pytest.mark.parametrize(
    ("condition", "hosts"),
    [
        ("device=cuda", ["big", "old", "old"]),
        ("device=cuda:1", ["old"]),
        ("device!=cpu", ["big", "old", "old"]),
        ("model=*h200*", ["big"]),
        ("memory>=6GiB", ["big", "old", "old"]),
        ("memory >= 6.5 GB", ["big"]),
        ("host=old", ["old", "old"]),
        ("zone=e*", ["big"]),
        ("zone!=eu", ["host", "host", "old", "old"]),
    ],
)
def test_a_job_gets_only_devices_that_meet_its_condition(condition: str, hosts: list[str]) -> None:
    lab = Lab()
    lab.submit("job", 0, conditions=(condition,))
    assert lab.hosts_of("job") == hosts


def test_all_conditions_hold_together() -> None:
    lab = Lab()
    lab.submit("job", 0, conditions=("device=cuda", "zone!=eu"))
    assert lab.hosts_of("job") == ["old", "old"]


def test_who_waits_for_a_device_does_not_hold_back_those_who_use_others() -> None:
    lab = Lab()
    lab.submit("first", 1, conditions=("model=*H200*",))
    lab.submit("second", 1, conditions=("model=*H200*",))
    lab.submit("third", 1, conditions=("zone=eu",))
    lab.submit("any", 4)
    lab.submit("small", 1, conditions=("device=cpu",))
    assert lab.started == ["first", "any"]
    assert lab.reason("second") == "waits for 1 free slot: 0 of 1 slots with model=*H200* are free"
    assert lab.reason("third").startswith("waits behind job second: ")
    assert lab.reason("small") == "waits for 1 free slot: 0 of 2 slots with device=cpu are free"
    lab.end("any")
    assert lab.started == ["first", "any", "small"], "nobody else can use what has come free"
    lab.end("first")
    assert lab.started == ["first", "any", "small", "second"]


def test_what_somebody_waits_for_goes_to_nobody_behind() -> None:
    lab = Lab()
    lab.submit("first", 1, conditions=("zone=eu",))
    lab.submit("large", 3, conditions=("device=cuda",))
    lab.submit("any", 2)
    lab.submit("more", 1)
    assert lab.hosts_of("any") == ["host", "host"], "two of three devices are free, and kept"
    assert lab.reason("more").startswith("waits behind job large: waits for 3 free slots: 2 of 3 slots")
    lab.end("first")
    assert lab.started == ["first", "any", "large"]


def test_who_may_give_slots_that_the_waiting_job_cannot_use_is_not_asked() -> None:
    lab = Lab()
    lab.submit("low", 5)
    lab.submit("high", 1, priority=5, conditions=("model=*H200*",))
    assert lab.core.jobs[JobId("low")].phase is JobPhase.STARTING
    assert lab.started == ["low"]
    lab.end("low")
    assert lab.hosts_of("high") == ["big"]


def test_whoever_has_only_such_slots_makes_room() -> None:
    lab = Lab()
    lab.submit("low", 1, conditions=("device=cuda", "zone=eu"))
    lab.submit("high", 1, priority=5, conditions=("model=*H200*",))
    assert lab.hosts_of("high") == ["big"]
    assert lab.core.jobs[JobId("low")].phase is JobPhase.QUEUED


def test_two_jobs_share_a_device_and_no_job_gets_it_twice() -> None:
    lab = Cluster(0)
    half = Slot(device="cuda:0", memory_bytes=70 * GIB)
    slots = (half, Slot(device="cuda:1", memory_bytes=70 * GIB)) * 2
    lab.handle(AgentJoined(agent_id=AgentId("big"), host="big", slots=slots))
    lab.submit("a", 0)
    assert [record.device for record in lab.core.jobs[JobId("a")].ranks.values()] == ["cuda:0", "cuda:1"]
    lab.submit("b", 2)
    assert lab.started == ["a", "b"]
    lab.submit("c", 3)
    lab.submit("d", 1)
    assert lab.reason("c").endswith("0 of 2 slots are free; start more workers"), "as many as one job can have"
    lab.end("a")
    assert lab.started == ["a", "b", "d"], "nobody waits for one that needs three devices"


def test_a_device_that_its_host_offers_to_one_job_several_times_goes_to_several_of_its_ranks() -> None:
    """`elche run --device cuda:0 --ranks 2` waited forever."""
    cluster = Cluster(0)
    slots = (Slot(device="cuda:0", repeats=True),) * 2
    cluster.handle(AgentJoined(agent_id=AgentId("big"), host="big", slots=slots))
    cluster.submit("job", 2)
    assert [record.device for record in cluster.core.jobs[JobId("job")].ranks.values()] == ["cuda:0", "cuda:0"]


def test_a_host_that_joins_brings_what_a_job_waits_for() -> None:
    cluster = Cluster(2)
    cluster.submit("job", 1, conditions=("zone=eu",))
    assert cluster.reason("job") == "waits for 1 free slot: no host offers any with zone=eu; start more workers"
    slots = (Slot(device="cpu"),)
    cluster.handle(AgentJoined(agent_id=AgentId("a"), host="a", slots=slots, labels={"zone": "us"}))
    assert not cluster.started
    cluster.handle(AgentJoined(agent_id=AgentId("b"), host="b", slots=slots, labels={"zone": "EU"}))
    assert cluster.started == ["job"]


@pytest.mark.parametrize(
    ("text", "mend"),
    [
        ("gpu", "write NAME=PATTERN"),
        ("memory=20GiB", "memory>=20GiB is how to ask for memory"),
        ("model>=H200", "model is compared by = or !=, only memory by >="),
        ("memory>=much", "write 20GiB or 20GB"),
        ("=x", "write NAME=PATTERN"),
        ("model==H200", "write NAME=PATTERN"),
        ("memory>=20", "write 20GiB or 20GB"),
        ("zone=", "write NAME=PATTERN"),
        ("zone=" + "x" * 300, "write NAME=PATTERN"),
    ],
)
def test_what_is_no_condition_is_refused_with_its_mend(text: str, mend: str) -> None:
    with pytest.raises(InvalidJob, match=mend):
        parse(text)


def test_conditions_are_counted_and_labels_checked() -> None:
    with pytest.raises(InvalidJob, match="at most 16"):
        check_conditions(["a=b"] * 17)
    for name, value in (("", "x"), ("memory", "x"), ("zone", ""), ("a b", "x")):
        with pytest.raises(InvalidJob, match="is not a label"):
            check_label(name, value)


def test_a_host_is_asked_once_for_what_jobs_want(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 75 queued jobs of 16 conditions of their own, each submission took 1 s of processor."""
    lab, asked = Lab(), list[str]()
    meeting = AgentRecord.meeting

    def counted(host: AgentRecord, conditions: Iterable[str]) -> frozenset[int]:
        asked.append(host.host)
        return meeting(host, conditions)

    monkeypatch.setattr(AgentRecord, "meeting", counted)
    for number in range(100):
        lab.submit(f"job {number}", 1, conditions=(f"zone=none{number}",))
    asked.clear()
    lab.submit("one more", 1, conditions=("zone=nowhere",))
    assert sorted(asked) == ["big", "host", "old"]
    asked.clear()
    lab.join("new", H200)
    assert asked == ["new"] * 102, "101 sets of conditions, and none"
    asked.clear()
    lab.handle(AgentLost(agent_id=AgentId("old")))
    assert asked == []


def test_what_is_remembered_of_hosts_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "MAX_REMEMBERED", 20)
    lab = Lab()
    for number in range(30):
        lab.submit(f"job {number}", 1, conditions=(f"zone=none{number}",))
        lab.join(f"host {number}", H200, zone=f"none{number}")
        lab.handle(AgentLost(agent_id=AgentId(f"host {number - 1}")))
    assert lab.hosts_of("job 29") == ["host 29"]
    known = lab.core.fleet._meeting
    assert lab.core.fleet._num_remembered == sum(1 + len(slots) for hosts in known.values() for slots in hosts.values())
    assert lab.core.fleet._num_remembered <= 20
    assert not pickle.loads(pickle.dumps(lab.core.fleet))._meeting, "nor is it written with each state"

"""Hosts that can start no ranks, such as with a full disk: they get none, their ranks go on, and jobs are told why."""

from typing import Any

import pytest

from elche_coordinator.core.messages.commands import Command, StartRank
from elche_coordinator.core.messages.events import (
    AgentJoined,
    DrainRequested,
    HostFitnessChanged,
    RankExited,
    RankStarted,
)
from elche_coordinator.core.messages.ids import AgentId, JobId, Rank
from elche_coordinator.core.messages.spec import JobSpec, Slot
from elche_coordinator.core.records.machine import JobPhase
from support.clusters import Cluster

FULL = "--work-dir runs cannot be written (No space left on device)"


def tell(cluster: Cluster, problem: str) -> list[JobId]:
    """The jobs that begin as the host says what it can."""
    commands = cluster.handle(HostFitnessChanged(agent_id=AgentId("host"), problem=problem))
    return [command.job_id for command in commands if isinstance(command, StartRank)]


def cannot_start(cluster: Cluster, rank: int) -> list[Command]:
    """What follows when the host says that it cannot start a rank of the job."""
    record = cluster.core.jobs[JobId("job")].ranks[Rank(rank)]
    address = record.address
    return cluster.handle(RankExited(**address, agent_id=AgentId("host"), exit_code=1, log_tail=FULL, not_started=True))


def join(cluster: Cluster, folder: str = "", num_slots: int = 1) -> list[StartRank]:
    """The ranks that begin as another host joins."""
    slots = (Slot(device="cpu"),) * num_slots
    another = AgentJoined(agent_id=AgentId("another"), host="another", slots=slots, folder=folder)
    return [command for command in cluster.handle(another) if isinstance(command, StartRank)]


def test_a_host_on_a_full_disk_gets_no_ranks_and_those_that_run_there_go_on() -> None:
    """Each job that was placed beside them failed, one after the other."""
    cluster = Cluster(2)
    cluster.submit("first", 1)
    assert tell(cluster, FULL) == []
    cluster.submit("more", 1)
    assert cluster.started == ["first"]
    assert cluster.core.jobs[JobId("first")].phase is JobPhase.STARTING
    assert cluster.reason("more") == f"waits for 1 free slot: 0 of 2 slots are free; host host can start none: {FULL}"
    assert cluster.core.fleet.hosts()[0].problem == FULL
    assert tell(cluster, "") == ["more"]


def test_a_job_that_waits_is_told_of_a_drained_host() -> None:
    """It was only told that no slot was free, while none trained."""
    cluster = Cluster(1)
    cluster.handle(DrainRequested(agent_id=AgentId("host"), is_drained=True))
    cluster.submit("job", 1)
    assert cluster.reason("job") == "waits for 1 free slot: 0 of 1 slots are free; host host is drained"


def test_a_rank_that_its_host_could_not_start_fails_no_job_and_begins_on_another_host() -> None:
    """The disk filled in the moment before it was to start."""
    cluster = Cluster(1)
    cluster.submit("job", 1)
    tell(cluster, FULL)
    cannot_start(cluster, 0)
    assert cluster.core.jobs[JobId("job")].phase is JobPhase.QUEUED
    (start,) = join(cluster)
    assert start.agent_id == "another"


@pytest.mark.parametrize("kind", [{"is_loop": True}, {"settings": {"on_rank_loss": '"fail"'}}])
def test_what_may_lose_no_rank_and_has_not_begun_goes_back_to_the_queue(kind: dict[str, Any]) -> None:
    """A script with its own loop, or a job that fails with a rank, failed when the disk was full just before."""
    cluster = Cluster(2)
    cluster.submit("job", 2, **kind)
    tell(cluster, FULL)
    cannot_start(cluster, 0)
    assert cluster.core.jobs[JobId("job")].phase is JobPhase.QUEUED
    starts = join(cluster, num_slots=2)
    assert [(start.agent_id, start.rank) for start in starts] == [("another", 0), ("another", 1)]
    assert cluster.core.jobs[JobId("job")].phase is JobPhase.STARTING


def test_a_script_of_which_a_rank_has_begun_is_not_begun_again() -> None:
    cluster = Cluster(2)
    cluster.submit("job", 2, is_loop=True)
    first = cluster.core.jobs[JobId("job")].ranks[Rank(0)]
    cluster.handle(RankStarted(**first.address, agent_id=AgentId("host"), log_path="/log"))
    tell(cluster, FULL)
    cannot_start(cluster, 1)
    assert cluster.core.jobs[JobId("job")].phase is JobPhase.ENDED
    assert FULL in cluster.core.jobs[JobId("job")].reason


def test_a_job_whose_checkpoint_is_on_such_a_host_says_what_it_waits_for() -> None:
    cluster = Cluster(0)
    join(cluster, folder="its folder")
    cluster.core.fleet.set_problem(AgentId("another"), FULL)
    spec = JobSpec(name="job", source_hash="", file_name="", num_ranks=1, resume_work_folder="its folder")
    assert cluster.core.fleet.why_no_checkpoint(spec) == f"can start no rank ({FULL})"


def test_a_job_that_starts_on_a_host_which_can_start_none_says_so_until_its_ranks_are_started() -> None:
    """Where its orders do not arrive, the job stayed in `starting`, with no word about it."""
    cluster = Cluster(1)
    cluster.submit("job", 1)
    before = cluster.reason("job")
    tell(cluster, "its orders do not arrive")
    assert cluster.reason("job") == "rank 0 waits for host host: its orders do not arrive"
    tell(cluster, "")
    assert cluster.reason("job") == before
    tell(cluster, FULL)
    address = cluster.core.jobs[JobId("job")].ranks[Rank(0)].address
    cluster.handle(RankStarted(**address, agent_id=AgentId("host"), log_path="/runs/job/rank-0.log"))
    assert cluster.reason("job") == before, "it was started before, and loads the file"

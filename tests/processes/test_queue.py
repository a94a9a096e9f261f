"""Jobs of different priorities and projects share a real host."""

from collections.abc import Callable
from pathlib import Path

import pytest

from elche_client import Client, JobState
from elche_client.events import JobView
from support.real_processes import Command, Mark, agent, coordinator, eventually

JobFile = Callable[..., Path]
HeldBack = Callable[[Path], Path]


def view(client: Client, job_id: str) -> JobView:
    return next(one for one in client.jobs() if one.job_id == job_id)


def num_training(client: Client, job_id: str) -> int:
    return sum(rank.state in ("training", "averaging") for rank in view(client, job_id).ranks)


@pytest.mark.gate
def test_a_job_shrinks_and_goes_back_to_the_queue_for_those_of_higher_priority(
    mark: Mark, tmp_path: Path, held_back: HeldBack, elche: Callable[..., Command]
) -> None:
    has_gone = tmp_path / "has-gone"
    with (
        coordinator(mark, tmp_path) as one,
        agent(mark, tmp_path, one.address, devices="cpu,cpu"),
        Client(one.address, token="") as client,
    ):
        path = held_back(has_gone)
        low = client.submit(path, name="low", num_ranks=2, min_ranks=1, epochs=20)
        eventually(lambda: num_training(client, low.id) == 2, "both ranks train")
        (host,) = client.hosts()
        assert [(slot.device, slot.job_id, slot.rank) for slot in host.slots] == [
            ("cpu", low.id, 0),
            ("cpu", low.id, 1),
        ]
        assert elche("hosts", "--coordinator", one.address).out.count(low.id) == 2
        asks = ("submit", str(path), "--ranks", "1", "--priority", "5", "--epochs", "8")
        done = elche(*asks, "--coordinator", one.address)
        assert done.code == 0, done.err
        middle = client.job(done.out.strip())
        eventually(lambda: num_training(client, middle.id) == 1, "it has got a slot")
        high = client.submit(path, name="high", num_ranks=2, priority=9, epochs=2)
        eventually(lambda: view(client, low.id).reason.startswith("waits "), "the least important waits")
        assert view(client, low.id).state is JobState.QUEUED
        assert f"{low.id}: waits " in elche("jobs", "--coordinator", one.address).out
        has_gone.touch()
        assert high.result().state is JobState.SUCCEEDED
        for job, epochs in ((middle, 8), (low, 20)):
            result = job.result()
            assert result.state is JobState.SUCCEEDED
            assert result.committed_samples == (500,) * epochs


def test_a_coordinator_that_is_started_again_has_its_new_quotas(mark: Mark, tmp_path: Path, job_file: JobFile) -> None:
    path = job_file("linear.py")
    with coordinator(mark, tmp_path, env={"ELCHE_QUOTAS": "vision=0"}) as one, Client(one.address, token="") as client:
        job = client.submit(path, num_ranks=1, project="vision", epochs=1)
        assert view(client, job.id).reason.startswith("waits for 1 of the 0 slots that vision may have")
    with (
        coordinator(mark, tmp_path) as one,
        agent(mark, tmp_path, one.address, devices="cpu"),
        Client(one.address, token="") as client,
    ):
        assert client.job(job.id).result().state is JobState.SUCCEEDED


@pytest.mark.long(reason="core/test_shares.py shows it")
def test_what_is_more_than_a_quota_waits(mark: Mark, tmp_path: Path, job_file: JobFile) -> None:
    with (
        coordinator(mark, tmp_path, env={"ELCHE_QUOTAS": "vision=1 *=2"}) as one,
        agent(mark, tmp_path, one.address, devices="cpu,cpu"),
        Client(one.address, token="") as client,
    ):
        path = job_file("linear.py")
        first = client.submit(path, num_ranks=1, project="vision", epochs=150)
        second = client.submit(path, num_ranks=1, project="vision", epochs=1)
        other = client.submit(path, num_ranks=1, epochs=1)
        assert other.result().state is JobState.SUCCEEDED, "a slot is free that vision may not have"
        assert view(client, second.id).reason == "waits for 1 of the 1 slots that vision may have: 1 are taken"
        first.cancel()
        assert second.result().state is JobState.SUCCEEDED


@pytest.mark.long(reason="core/test_conditions.py shows it")
def test_a_job_trains_on_the_host_whose_label_it_asks_for(
    mark: Mark, tmp_path: Path, job_file: JobFile, elche: Callable[..., Command]
) -> None:
    for name in ("us", "eu"):
        (tmp_path / name).mkdir()
    with (
        coordinator(mark, tmp_path) as one,
        agent(mark, tmp_path / "us", one.address, "--label", "zone=us", devices="cpu"),
        Client(one.address, token="") as client,
    ):
        asks = ("submit", str(job_file("linear.py")), "--ranks", "2", "--coordinator", one.address)
        done = elche(*asks, "--on", "zone=eu", "--epochs", "1")
        assert done.code == 0, done.err
        job = client.job(done.out.strip())
        assert view(client, job.id).reason.endswith("no host offers any with zone=eu; start more workers")
        assert elche(*asks, "--on", "zone").err.startswith("elche: 'zone' is not a condition on devices: write ")
        labels = ("--label", "zone=eu", "--share", "2")
        with agent(mark, tmp_path / "eu", one.address, *labels, devices="cpu"):
            assert job.result().state is JobState.SUCCEEDED
            assert len(job.result().ranks) == 2
            listed = elche("hosts", "--coordinator", one.address).out
            assert "zone=eu" in listed
            assert "zone=us" in listed
        eventually(lambda: [dict(host.labels) for host in client.hosts()] == [{"zone": "us"}], "the other has left")


@pytest.mark.gate
def test_twelve_jobs_on_four_slots_all_end_in_the_order_of_their_priorities(
    mark: Mark, tmp_path: Path, job_file: JobFile, held_back: HeldBack
) -> None:
    all_wait = tmp_path / "all-wait"
    with (
        coordinator(mark, tmp_path) as one,
        agent(mark, tmp_path, one.address, devices="cpu,cpu,cpu,cpu", env={"OMP_NUM_THREADS": "1"}) as other,
        Client(one.address, token="") as client,
    ):
        path = job_file("linear.py")
        first = client.submit(held_back(all_wait), name="first", num_ranks=4, epochs=10, priority=9)
        eventually(lambda: num_training(client, first.id) == 4, "all slots are taken")
        sizes = [1, 2, 3, 4]
        jobs = [client.submit(path, num_ranks=sizes[at % 4], epochs=1, priority=at % 3) for at in range(12)]
        all_wait.touch()
        for job in jobs:
            assert job.result().committed_samples == (500,)
        log = other.log.read_text()
        started = sorted(range(12), key=lambda at: log.index(f"job={jobs[at].id} "))
        assert started == sorted(range(12), key=lambda at: (-(at % 3), at))

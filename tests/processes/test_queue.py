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

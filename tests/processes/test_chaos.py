"""Faults on purpose hit what they name, are survived and reported, and are refused where they are not allowed."""

import json
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

import elche_audit
from elche.errors import Forbidden, InvalidJob
from elche_client import Client
from elche_client.events import Fault
from support.real_processes import Agent, Cluster, Command, Coordinator, Mark, agent, coordinator, eventually

ALLOWED = {"ELCHE_ALLOW_CHAOS": "1"}
HeldBack = Callable[[Path], Path]


@contextmanager
def under_fire(mark: Mark, folder: Path) -> Iterator[tuple[Coordinator, Agent, Client]]:
    with (
        coordinator(mark, folder, env=ALLOWED) as one,
        agent(mark, folder, one.address) as other,
        Client(one.address, token="") as client,
    ):
        yield one, other, client


def trains(client: Client, job_id: str) -> bool:
    """True if both ranks train."""
    ranks = client.get(job_id).ranks
    return len(ranks) == 2 and all(rank.num_batches and rank.state in ("training", "averaging") for rank in ranks)


def test_faults_are_refused_where_they_are_not_allowed(
    cluster: Cluster, elche: Callable[..., Command], held_back: HeldBack, tmp_path: Path
) -> None:
    handle = cluster.client.submit(held_back(tmp_path / "go on"), num_ranks=1)
    done = elche("chaos", handle.id, "--coordinator", cluster.address)
    assert done.code == 2
    assert done.err.splitlines()[-1] == (
        "elche: faults are not allowed here: start the coordinator with --allow-chaos"
    ), done.err
    with pytest.raises(Forbidden):
        cluster.client.inject(handle.id, Fault.COORDINATOR)


@pytest.mark.gate
def test_each_fault_hits_what_it_names_and_no_sample_is_lost(mark: Mark, held_back: HeldBack, tmp_path: Path) -> None:
    path = held_back(tmp_path / "go on")
    with under_fire(mark, tmp_path) as (one, other, client):
        handle = client.submit(path, num_ranks=2, min_ranks=1, audit=True, output_dir=tmp_path / "out")

        def hit(fault: Fault, *, seconds: float = 0.5) -> None:
            eventually(lambda: trains(client, handle.id), f"both ranks train before {fault}")
            client.inject(handle.id, fault, rank=1, seconds=seconds)

        hit(Fault.RANK)
        eventually(lambda: "rank=1 incarnation=2 exited member=0 code=-9" in other.log.read_text(), "it is killed")
        hit(Fault.STOP)
        hit(Fault.NETWORK)
        eventually(lambda: other.log.read_text().count(" connected as ") == 2, "its worker attends again")
        rank_log = tmp_path / "out" / "rank-1.log"
        eventually(lambda: "this rank goes on, and tries again" in rank_log.read_text(), "its session is cut, too")
        assert "given" not in other.log.read_text(), "a rank was given up whose process lives"
        hit(Fault.DISK, seconds=2.0)
        eventually(lambda: "jobs wait until they can: the disk is full" in one.log.read_text(), "nothing is written")
        with pytest.raises(InvalidJob, match="has no rank 7"):
            client.inject(handle.id, Fault.RANK, rank=7)
        with pytest.raises(InvalidJob, match="a fault lasts from 0 to 600 s, not 601"):
            client.inject(handle.id, Fault.STOP, seconds=601)
        (tmp_path / "go on").touch()
        handle.result()
        assert one.log.read_text().count("a fault on purpose: FAULT_") == 4
        with pytest.raises(InvalidJob, match="is succeeded: there is nothing to break"):
            client.inject(handle.id, Fault.RANK)
    verdict = elche_audit.judge(tmp_path / "out")
    assert elche_audit.exit_code(verdict) == 0, elche_audit.lines(verdict)


def test_a_worker_and_a_coordinator_are_killed(mark: Mark, held_back: HeldBack, tmp_path: Path) -> None:
    with under_fire(mark, tmp_path) as (one, other, client):
        handle = client.submit(held_back(tmp_path / "go on"), num_ranks=2)
        eventually(lambda: trains(client, handle.id), "both ranks train")
        client.inject(handle.id, Fault.AGENT, rank=1)
        assert other.process.wait(400) == -signal.SIGKILL
        client.inject(handle.id, Fault.COORDINATOR)
        assert one.process.wait(400) == -signal.SIGKILL


def test_a_job_under_fire_is_reported(
    mark: Mark, elche: Callable[..., Command], held_back: HeldBack, tmp_path: Path
) -> None:
    with under_fire(mark, tmp_path) as (one, other, client), ThreadPoolExecutor() as threads:
        handle = client.submit(
            held_back(tmp_path / "go on"), num_ranks=2, min_ranks=1, audit=True, output_dir=tmp_path / "out"
        )
        eventually(lambda: trains(client, handle.id), "both ranks train")
        fire = ("chaos", handle.id, "--coordinator", one.address, "--mtbf", "1s", "--what", "rank", "--json")
        told = threads.submit(elche, *fire, "--seed", "7")
        eventually(lambda: other.log.read_text().count("FAULT_KILL_RANK") > 1, "two faults have come")
        (tmp_path / "go on").touch()
        done = told.result()
    report = json.loads(done.out)
    assert done.code == 0, done.err
    assert report["state"] == "succeeded"
    assert report["faults"]["rank"] > 1
    assert report["ranks_lost"] > 0
    assert report["committed_samples"] == [500] * 3
    assert report["audit"]["verdict"] == "proven"
    assert "killed" in done.err
    assert f"job {handle.id}: a fault each 1.0 s on average, of rank; seed 7" in done.err

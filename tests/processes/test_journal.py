"""The journal of real jobs: it replays bit for bit, tells no secret, and outlives the coordinator when a job fails."""

import json
import urllib.request
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from elche.errors import InvalidJob, JobFailed
from elche.v1 import job_pb2
from elche.v1.job_pb2_grpc import JobServiceStub
from elche_client import Client
from elche_coordinator.journal.replaying import CannotReplay, replay
from support.real_processes import Cluster, Command, Mark, agent, coordinator, eventually

JobFile = Callable[..., Path]
BROKEN = """
import dataclasses

def broken(model, batch):
    raise KeyError("nothing is like that")

job = dataclasses.replace(job, train_step=broken)
"""


def events_of(lines: list[str]) -> list[str]:
    return [next(iter(json.loads(line)["event"])) for line in lines[1:]]


def post(url: str) -> dict[str, str]:
    request = urllib.request.Request(url, headers={"content-type": "application/json"}, data=b"{}")
    with urllib.request.urlopen(request, timeout=400) as response:
        return json.loads(response.read())  # type: ignore[no-any-return]


def got(url: str) -> str:
    with urllib.request.urlopen(url, timeout=400) as response:
        return response.read().decode()  # type: ignore[no-any-return]


def test_a_real_job_replays_from_its_submission_to_its_end(
    cluster: Cluster, job_file: JobFile, elche: Callable[..., Command]
) -> None:
    job = cluster.client.submit(
        job_file(),
        num_ranks=2,
        slow_factors={1: 2.0},
        arguments=["--key", "hunter-argument"],
        environment={"SECRET": "hunter-environment"},
        epochs=4,
        checkpoint_every_epochs=2,
    )
    job.result()
    job.cancel()  # it has ended: this is refused
    text = cluster.client.journal(job.id)
    lines = text.splitlines()
    events = events_of(lines)
    assert events[0] == "JobSubmitted"
    assert {"RankStarted", "RankReady", "GroupFormed", "BatchesTrained", "ResultReceived"} <= set(events)
    assert events.count("RankExited") == 2
    assert replay(lines) == len(events)
    assert '"JobResult":{' in text
    assert '"succeeded"' in text
    assert "hunter" not in text
    assert "nn.Linear" not in text, "the source is not in it"
    (refused,) = [line for line in lines if "JobCancelled" in line]
    refusal = {"state": "job is ended", "trigger": "JobCancelled", "why": "its outcome is decided"}
    assert json.loads(refused)["refusals"] == [refusal]

    to = ("--coordinator", cluster.address)
    printed = elche("journal", job.id, "--json", *to).out.splitlines()
    assert printed[1 : len(lines)] == lines[1:]  # a deadline may have passed since
    newest = elche("journal", job.id, "--json", "-n", "3", *to).out.splitlines()
    assert len(newest) == 4
    with pytest.raises(CannotReplay, match=r"begins after \d+ events"):
        replay(newest)
    shown = elche("journal", job.id, *to).out
    assert "JobSubmitted" in shown
    assert "-> StartRank 1" in shown
    assert "refused, because job is ended: JobCancelled has no place there" in shown
    page = cluster.coordinator.page_url
    assert got(f"{page}/api/jobs/{job.id}/journal").splitlines()[1 : len(lines)] == lines[1:]
    assert got(f"{page}{post(f'{page}/api/jobs/{job.id}/journal')['link']}").splitlines()[1 : len(lines)] == lines[1:]


def test_the_journal_of_a_job_that_failed_is_there_after_a_restart(
    mark: Mark, job_file: JobFile, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    path = job_file("linear.py", BROKEN)
    with (
        coordinator(mark, tmp_path, data=data) as one,
        agent(mark, tmp_path, one.address),
        Client(one.address, token="") as client,
    ):
        job = client.submit(path, num_ranks=2)
        with pytest.raises(JobFailed, match="nothing is like that"):
            job.result()
        good = client.submit(job_file("good.py", text=(Path(__file__).parent / "jobs" / "linear.py").read_text()))
        good.result()
        eventually((data / "journals" / f"{job.id}.jsonl.gz").exists, "it is on disk")
        before = client.journal(job.id).splitlines()
        assert replay(before) == len(before) - 1
    with coordinator(mark, tmp_path, data=data) as one, Client(one.address, token="") as client:
        after = client.journal(job.id).splitlines()
        assert after[1:] == before[1 : len(after)]
        assert replay(after) == len(after) - 1
        assert "nothing is like that" in "".join(after)
        assert client.journal(job.id, num_events=2).splitlines()[1:] == after[-2:]
        with pytest.raises(InvalidJob, match="has no journal"):
            client.journal(good.id)


@pytest.mark.long(reason="that of a submitted job is written in the same way")
def test_a_run_that_failed_has_its_journal_in_its_folder(
    job_file: JobFile, elche: Callable[..., Command], tmp_path: Path
) -> None:
    path = job_file("linear.py", BROKEN)
    assert elche("run", str(path), "--ranks", "2", "--out", "run", limit_s=400).code == 1
    lines = elche("journal", "run", "--json").out.splitlines()
    assert replay(lines) == len(lines) - 1
    assert "RankFailed" in elche("journal", "run", "-n", "20").out
    assert "no journal" in elche("journal", ".").complaint


def test_who_has_no_token_gets_none(mark: Mark, tmp_path: Path) -> None:
    with coordinator(mark, tmp_path, env={"ELCHE_TOKEN": "correct horse battery"}) as one:
        with grpc.insecure_channel(one.address) as channel, pytest.raises(grpc.RpcError) as refused:
            list(JobServiceStub(channel).FetchJournal(job_pb2.FetchJournalRequest(job_id="any"), timeout=400))
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_a_job_that_is_not_has_none(cluster: Cluster, elche: Callable[..., Command]) -> None:
    assert "no job has the id" in elche("journal", "nobody", "--coordinator", cluster.address).complaint

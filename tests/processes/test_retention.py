"""A coordinator remembers the newest jobs that have ended, and forgets the others whole; their files are removed by age
and bytes.
"""

import json
import os
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from processes.test_artifacts import storing

from elche.errors import InvalidJob, UnknownJob
from elche_client import Client, JobState
from elche_client.commands.prune import DAY_S, Left, too_much
from support.real_processes import Command, Mark, agent, coordinator, eventually

CHECKPOINTED = "from dataclasses import replace\njob = replace(job, checkpoint_every_epochs=1)"
JobFile = Callable[..., Path]


def test_the_oldest_jobs_are_forgotten_and_those_that_run_are_not(
    mark: Mark, tmp_path: Path, job_file: JobFile
) -> None:
    path = job_file("linear.py")
    with (
        coordinator(mark, tmp_path) as one,
        agent(mark, tmp_path, one.address, devices="cpu,cpu"),
        Client(one.address, token="") as client,
    ):
        ended = [client.submit(path, name=f"j{index}", num_ranks=1, epochs=1) for index in range(3)]
        for job in ended:
            assert job.result().state is JobState.SUCCEEDED
        waiting = client.submit(path, name="waits", num_ranks=3)
    with coordinator(mark, tmp_path, env={"ELCHE_KEEP_JOBS": "1"}) as one, Client(one.address, token="") as client:
        assert [job.job_id for job in client.jobs()] == [ended[2].id, waiting.id]
        with pytest.raises(UnknownJob):
            client.job(ended[0].id).result()
        assert client.job(ended[2].id).result().state is JobState.SUCCEEDED
        database = one.data / "elche.sqlite"
        eventually(lambda: {ended[2].id, waiting.id} == _rows(database), "the others have no records")
    with coordinator(mark, tmp_path) as one, Client(one.address, token="") as client:
        assert [job.job_id for job in client.jobs()] == [ended[2].id, waiting.id]


def _rows(database: Path) -> set[str]:
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
        return {row[0] for row in connection.execute("SELECT id FROM jobs")}


def test_what_ended_jobs_left_is_removed_by_age_and_bytes(
    mark: Mark, tmp_path: Path, job_file: JobFile, elche: Callable[..., Command]
) -> None:
    """Not what a job that waits for slots is to begin from."""
    path, work = job_file("linear.py", CHECKPOINTED), tmp_path / "work"
    with (
        coordinator(mark, tmp_path) as one,
        agent(mark, tmp_path, one.address),
        Client(one.address, token="") as client,
    ):
        first, second = (client.submit(path, num_ranks=1, epochs=1).id for _ in range(2))
        for job_id in (first, second):
            client.result(job_id)
        waiting = client.submit(path, num_ranks=3, resume=client.checkpoints(first)[-1].path)

        def pruned(*limits: str) -> set[str]:
            said = elche("prune", str(work), *limits, "--coordinator", one.address, "--json")
            assert said.code == 0, said.err
            assert set(json.loads(said.out)) == {"removed", "kept_bytes"}
            return set(json.loads(said.out)["removed"])

        assert "--days N, --gib N" in elche("prune", str(work), "--coordinator", one.address).complaint
        nowhere = elche("prune", str(tmp_path / "no"), "--gib", "0", "--coordinator", one.address)
        assert "cannot be read: No such file or directory" in nowhere.complaint
        assert pruned("--days", "1", "--gib", "100") == set()
        assert pruned("--gib", "0", "--dry-run") == {second}
        assert (work / second).is_dir()
        assert pruned("--gib", "0") == {second}
        assert not (work / second).exists()
        waiting.cancel()
        for file in (work / first).rglob("*"):
            os.utime(file, (0, 0))
        os.utime(work / first, (0, 0))
        assert pruned("--days", "1") == {first}
        refused = elche("fetch", first, "--coordinator", one.address).complaint
        assert first in refused, refused


def test_what_is_not_in_the_artifact_store_yet_stays(
    mark: Mark, tmp_path: Path, job_file: JobFile, elche: Callable[..., Command]
) -> None:
    with storing(mark, tmp_path) as (one, client, store), agent(mark, tmp_path, one.address):
        store.rmdir()  # it is not mounted
        handle = client.submit(job_file(), num_ranks=1, epochs=1)
        handle.result()
        prune = ("prune", str(tmp_path / "work"), "--gib", "0", "--coordinator", one.address)
        assert "0 of 0 ended jobs' folders removed" in elche(*prune).out
        store.mkdir()
        eventually(lambda: client.get(handle.id).artifacts == f"{store}/{handle.id}", "it is stored")
        assert f"{handle.id}: " in (said := elche(*prune).out)
        assert "1 of 1 ended jobs' folders removed; 0 B stay" in said
        assert client.download(handle.id, tmp_path / "model").stat().st_size, "it is read from the store"
        assert "1 of 1" in elche("prune", str(store), "--gib", "0", "--coordinator", one.address).out
        with pytest.raises(InvalidJob, match="cannot be read from the artifact store: No such file"):
            client.download(handle.id, tmp_path / "model")


def test_the_oldest_go_until_the_rest_fits() -> None:
    now_s = time.time()
    left = [Left(f"{days} days", 2**30, now_s - days * DAY_S) for days in (1, 5, 9, 3)]

    def gone(days: float | None, gib: float | None) -> list[str]:
        limit_s = None if days is None else days * DAY_S
        return [one.job_id for one in too_much(left, older_than_s=limit_s, gib=gib)]

    assert gone(None, None) == gone(10, 4) == []
    assert gone(4, None) == gone(4, 2) == ["9 days", "5 days"]
    assert gone(4, 1.5) == gone(None, 1) == ["9 days", "5 days", "3 days"]

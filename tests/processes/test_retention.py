"""A coordinator remembers the newest jobs that have ended, and forgets the others whole."""

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from elche.errors import UnknownJob
from elche_client import Client, JobState
from support.real_processes import Mark, agent, coordinator, eventually

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

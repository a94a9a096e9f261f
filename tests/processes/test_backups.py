"""`elche-coordinator backup` and `restore`: jobs and tokens outlive the coordinator's disk."""

import re
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from elche_client import Client
from elche_client.events import JobState, RoundReport
from support.real_processes import Command, Mark, agent, command, coordinator, eventually

NUM_SAMPLES, EPOCHS = 500, 6
JOBS = Path(__file__).parent / "jobs"


def run(mark: Mark, folder: Path, *words: object) -> Command:
    return command(mark, "elche_coordinator", *map(str, words), cwd=folder)


def test_a_backup_of_a_coordinator_that_runs_is_restored(
    mark: Mark, tmp_path: Path, waiting: Callable[[Path], Path]
) -> None:
    """Its folder is lost: what had ended is known, and what ran goes on from its checkpoint. Nobody has to restart the
    worker, whose ranks have heard more than the backup knows.
    """
    shutil.copytree(JOBS, tmp_path / "jobs")
    waits, is_restored = tmp_path / "jobs" / "waits.py", tmp_path / "is restored"
    waiting(is_restored).rename(waits)
    with ExitStack() as stack:
        one = stack.enter_context(coordinator(mark, tmp_path))
        client = stack.enter_context(Client(one.address))
        worker = stack.enter_context(agent(mark, tmp_path, one.address))
        done = client.submit(tmp_path / "jobs/linear.py", num_ranks=1, epochs=1)
        result = done.result()
        places = str(tmp_path / "checkpoints")
        options = {"checkpoint_every_epochs": 1, "checkpoint_dir": places}
        ran = client.submit(waits, num_ranks=2, epochs=EPOCHS, folder=tmp_path / "jobs", **options)
        eventually(lambda: client.checkpoints(ran.id), "it has a checkpoint")
        watch = ran.watch()
        eventually(lambda: isinstance(next(watch), RoundReport), "it trains on")
        made = run(mark, tmp_path, "backup", tmp_path / "copy", "--data", one.data)
        assert (made.code, made.err) == (0, ""), made
        assert "has 2 jobs" in made.out
        one.process.kill()
        one.process.wait()
        shutil.rmtree(one.data)
        again = tmp_path / "again"
        again.mkdir()
        put = run(mark, tmp_path, "restore", tmp_path / "copy", "--data", again / "data")
        assert (put.code, put.err) == (0, ""), put
        two = stack.enter_context(coordinator(mark, again, data=again / "data", listen=one.address))
        eventually(lambda: worker.log.read_text().count(f"job={ran.id} rank=0 ") == 3, "its ranks are started again")
        client = stack.enter_context(Client(two.address))
        assert client.job(done.id).result() == result
        is_restored.touch()
        ended = client.job(ran.id).result()
        assert ended.state is JobState.SUCCEEDED, ended.error
        assert ended.committed_samples == (NUM_SAMPLES,) * EPOCHS
        assert "this backup" in two.log.read_text()
        numbers = [
            int(one) for one in re.findall(rf"job={ran.id} rank=0 incarnation=(\d+) started", worker.log.read_text())
        ]
        assert numbers[-1] > 10**12 > numbers[0], "a time, which the coordinator before has given to no process"
        assert two.new_errors() == []


@pytest.mark.gate
def test_a_database_that_is_put_back_knows_less_than_its_ranks_and_jobs_go_back(
    mark: Mark, tmp_path: Path, waiting: Callable[[Path], Path]
) -> None:
    """As from `pg_dump`, or from a snapshot of a disk. Its ranks ended with exit code 0, for which the job failed."""
    is_restored = tmp_path / "is restored"
    job = waiting(is_restored)
    with ExitStack() as stack:
        one = stack.enter_context(coordinator(mark, tmp_path))
        client = stack.enter_context(Client(one.address, reconnect_s=100))
        worker = stack.enter_context(agent(mark, tmp_path, one.address))
        ran = client.submit(job, num_ranks=2, epochs=EPOCHS, checkpoint_every_epochs=1)
        eventually(lambda: client.checkpoints(ran.id), "it has a checkpoint")
        one.process.kill()
        one.process.wait()
        shutil.copytree(one.data, tmp_path / "copy")
        for name in ("two", "three"):
            (tmp_path / name).mkdir()
        two = stack.enter_context(coordinator(mark, tmp_path / "two", data=one.data, listen=one.address))
        before = client.jobs()[0].num_rounds
        eventually(lambda: client.jobs()[0].num_rounds > before + 1, "it trains on")
        two.process.kill()
        two.process.wait()
        stack.enter_context(coordinator(mark, tmp_path / "three", data=tmp_path / "copy", listen=one.address))
        eventually(lambda: worker.log.read_text().count(f"job={ran.id} rank=0 ") == 3, "its ranks are started again")
        is_restored.touch()
        ended = ran.result()
        assert ended.committed_samples == (NUM_SAMPLES,) * EPOCHS


def test_what_cannot_be_backed_up_or_restored_is_said_in_a_line(mark: Mark, tmp_path: Path) -> None:
    with coordinator(mark, tmp_path) as one:
        none = run(mark, tmp_path, "backup", "copy", "--data", "nowhere")
        assert (none.code, none.complaint) == (
            2,
            "elche-coordinator: nowhere has no database of a coordinator: name its folder with --data, or use pg_dump "
            "for PostgreSQL",
        )
        assert run(mark, tmp_path, "backup", "copy", "--data", one.data).code == 0
        assert "copy exists" in run(mark, tmp_path, "backup", "copy", "--data", one.data).complaint
        assert "another coordinator uses" in run(mark, tmp_path, "restore", "copy", "--data", one.data).complaint
    assert "has a database: move it away" in run(mark, tmp_path, "restore", "copy", "--data", one.data).complaint
    assert "is not a backup" in run(mark, tmp_path, "restore", "data/bundles", "--data", "new").complaint
    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == ["backup.json", "bundles", "elche.sqlite"]
    assert [path.name for path in tmp_path.glob(".copy.*")] == []


def test_a_coordinator_whose_folder_is_removed_ends_at_once(mark: Mark, tmp_path: Path) -> None:
    """What it wrote would be gone with its process."""
    with coordinator(mark, tmp_path) as one:
        shutil.rmtree(one.data)
        assert one.process.wait(400) == 1
    assert f"{one.data}/elche.sqlite was removed or replaced while in use" in one.log.read_text()


def test_a_downgrade_is_refused_with_the_way_back(mark: Mark, tmp_path: Path) -> None:
    """The folder was used by a newer version, after a backup."""
    with coordinator(mark, tmp_path) as one:
        assert run(mark, tmp_path, "backup", "copy", "--data", one.data).code == 0
    with sqlite3.connect(one.data / "elche.sqlite") as database:
        database.execute("UPDATE alembic_version SET version_num = '9999'")
    refused = run(mark, tmp_path, "--listen", "127.0.0.1:0", "--http", "off", "--data", one.data)
    assert refused.code == 2
    assert "newer version (9999" in refused.complaint
    assert "elche-coordinator restore" in refused.complaint
    assert run(mark, tmp_path, "backup", "newer", "--data", one.data).code == 0
    assert "restore it with that" in run(mark, tmp_path, "restore", "newer", "--data", "back").complaint
    assert run(mark, tmp_path, "restore", "copy", "--data", "back").code == 0
    with coordinator(mark, tmp_path, data=tmp_path / "back") as two, Client(two.address, token="") as client:
        assert client.jobs() == []

"""A run with `--audit true` proves itself, also where a rank is killed and where all is killed and resumed."""

import json
from collections.abc import Callable
from pathlib import Path

from elche_client.events import JobState
from support.real_processes import Cluster, Command, eventually

JobFile = Callable[..., Path]
SAMPLES, EPOCHS = 960, 4  # of jobs/dying.py


def test_a_run_in_which_a_rank_is_killed_is_proven(
    elche: Callable[..., Command], job_file: JobFile, tmp_path: Path
) -> None:
    path = job_file("dying.py", "BATCH_S = 0.02", "DIES_AT = {1: 12}")
    settings = ("--epochs", str(EPOCHS), "--checkpoint-every-epochs", "1", "--keep-checkpoints", "9", "--anchor", "5")
    done = elche("run", str(path), "--ranks", "2", "--audit", "true", *settings, "--out", "out", limit_s=400)
    assert done.code == 0, done.err
    assert len(list(tmp_path.glob("out/audit/*/rank-1-*.bin"))) == 2, "one file per process of the rank"
    audited = elche("audit", "out", "--json")
    assert audited.code == 0, audited.out
    told = json.loads(audited.out)
    assert (told["verdict"], told["epoch_samples"]) == ("proven", [SAMPLES] * EPOCHS)
    assert told["num_checkpoints"] == EPOCHS
    for one in told["thrown"]:  # the killed process's last batches, if a round had not taken them
        assert (one["rank"], one["reason"]) == (
            1,
            "its process was killed, or has crashed, before a round took them",
        )
    _lose_a_record(next(tmp_path.glob("out/audit/*/rank-0-*.bin")))
    audited = elche("audit", "out")
    assert audited.code == 2, audited.out
    assert "is damaged at byte" in audited.out


def test_a_submitted_job_of_which_a_rank_is_killed_and_that_is_cancelled_is_proven(
    cluster: Cluster, job_file: JobFile, elche: Callable[..., Command], tmp_path: Path
) -> None:
    """Nobody writes a `record.json` of it: its ranks are told that it is cancelled. Rank 1 is not back by then."""
    path = job_file("dying.py", "DIES_AT = {1: 12}", "AWAITS = 10_000")
    handle = cluster.client.submit(path, num_ranks=2, audit=True)
    notes = tmp_path / "rank-0"
    eventually(lambda: (tmp_path / "rank-1").exists() and "dies" in (tmp_path / "rank-1").read_text(), "rank 1 dies")
    before = notes.read_text().count("batch")
    eventually(lambda: notes.read_text().count("batch") > before + 20, "rank 0 goes on")
    handle.cancel()
    *_, result = handle.watch()
    assert result.state is JobState.CANCELLED  # type: ignore[union-attr]
    audited = elche("audit", str(cluster.agent.log.parent / "work" / handle.id), "--json")
    told = json.loads(audited.out)
    assert (audited.code, told["verdict"], told["state"]) == (0, "proven", "cancelled"), audited.out
    assert 0 < told["epoch_samples"][0] <= SAMPLES


def _lose_a_record(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2] + data[len(data) // 2 + 37 :])

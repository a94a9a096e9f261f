"""A run with `--audit true` proves itself, also where a rank is killed and where all is killed and resumed."""

import json
from collections.abc import Callable
from pathlib import Path

from support.real_processes import Command

JobFile = Callable[..., Path]
SAMPLES, EPOCHS = 960, 4  # of jobs/dying.py


def test_a_run_in_which_a_rank_is_killed_is_proven(
    elche: Callable[..., Command], job_file: JobFile, tmp_path: Path
) -> None:
    path = job_file("dying.py", "BATCH_S = 0.02", "DIES_AT = {1: 12}")
    settings = ("--epochs", str(EPOCHS), "--checkpoint-every-epochs", "1", "--keep-checkpoints", "9", "--anchor", "5")
    done = elche("run", str(path), "--ranks", "2", "--audit", "true", *settings, "--out", "out", limit_s=100)
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


def _lose_a_record(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2] + data[len(data) // 2 + 37 :])

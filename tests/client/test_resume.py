"""What `elche checkpoints` reads from the folder of a run."""

import json
from pathlib import Path

import pytest

from elche.manifest import checkpoints_in, checksum, newest
from elche_client.cli import main


def test_the_newest_checkpoint_is_the_one_that_was_saved_last_whatever_its_name(tmp_path: Path) -> None:
    for name, version in (("1-00000010", 3), ("2-00000002", 1), ("10-00000001", 2)):
        write_checkpoint(tmp_path / name, version, {})
    assert [one.name for one in checkpoints_in(tmp_path)] == ["2-00000002", "10-00000001", "1-00000010"]
    assert newest(tmp_path).name == "1-00000010"


def write_checkpoint(folder: Path, version: int, evaluated: dict[str, dict[str, float]]) -> None:
    """A checkpoint folder that holds a manifest alone."""
    evaluations = {"by_version": evaluated, "best_version": None}
    manifest = {
        "format": 2,
        "files": {"model.safetensors": {"bytes": 1000}},
        "training": {"version": version, "ledger": {"epoch": version}, "global_step": 1, "evaluations": evaluations},
        "tensors": [],
        "saved_at": version,
        "settings": {},
        "num_ranks": 1,
        "file_name": "train.py",
        "job": "j-1",
    }
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps({**manifest, "checksum": checksum(manifest)}))


def test_the_metrics_of_the_last_checkpoint_are_those_of_the_runs_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_checkpoint(tmp_path / "checkpoints" / "first", 1, {})
    write_checkpoint(tmp_path / "checkpoints" / "last", 2, {"1": {"accuracy": 0.5}})
    recorded = {"path": str(tmp_path / "checkpoints" / "last"), "metrics": {"accuracy": 0.75}, "is_best": True}
    (tmp_path / "record.json").write_text(json.dumps({"checkpoints": [recorded]}))
    assert main(["checkpoints", str(tmp_path), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [(one["metrics"], one["is_best"]) for one in listed] == [
        ({"accuracy": 0.5}, False),
        ({"accuracy": 0.75}, True),
    ]

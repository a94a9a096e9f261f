"""The best model at a job's end, from its checkpoint: beside the last one or in its place, or neither."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from elche.errors import InvalidJob
from elche_worker.model.checkpoint import About, CheckpointData, CheckpointTarget
from elche_worker.model.state import save_weights
from elche_worker.rank.best import keep_best


@pytest.fixture
def last(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_weights({"w": torch.tensor([9.0])}, path)
    return path


def checkpoint(place: str) -> str:
    path, _ = CheckpointTarget(place).write(
        "best", CheckpointData({"w": torch.tensor([2.0])}, {}), About(job="j", file_name="f", source=""), {}
    )
    return path


def there(folder: Path) -> dict[str, float]:
    """What each file of a folder holds; and there are no others."""
    return {path.stem: load_file(path)["w"].item() for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize("place", ["{}/checkpoints", "file://{}/checkpoints"])
def test_the_best_takes_the_place_of_the_last(last: Path, tmp_path: Path, place: str) -> None:
    path = checkpoint(place.format(tmp_path))
    keep_best(last, path, restores=True)
    assert there(tmp_path) == {"model": 2.0, "best": 2.0, "last": 9.0}
    assert len({file.stat().st_mode for file in tmp_path.glob("*.safetensors")}) == 1


def test_the_best_stands_beside_the_last(last: Path, tmp_path: Path) -> None:
    keep_best(last, checkpoint(str(tmp_path / "checkpoints")), restores=False)
    assert there(tmp_path) == {"model": 9.0, "best": 2.0}


@pytest.mark.parametrize("restores", [False, True])
def test_the_last_that_is_the_best_is_both(last: Path, tmp_path: Path, restores: bool) -> None:
    for _ in range(2):
        keep_best(last, "", restores=restores)
        assert there(tmp_path) == {"model": 9.0, "best": 9.0}


def test_a_disk_without_links_gets_copies(last: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    keep_best(last, checkpoint(str(tmp_path / "checkpoints")), restores=True)
    assert there(tmp_path) == {"model": 2.0, "best": 2.0, "last": 9.0}
    assert last.stat().st_nlink == 1


def test_a_damaged_checkpoint_leaves_the_last_model_alone(last: Path, tmp_path: Path) -> None:
    path = checkpoint(str(tmp_path / "checkpoints"))
    weights = Path(path) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    with pytest.raises(InvalidJob, match="is damaged"):
        keep_best(last, path, restores=True)
    assert there(tmp_path) == {"model": 9.0}

"""Checkpoints as folders: whole or not there, whatever ends the process that writes them."""

import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from elche.errors import InvalidJob
from elche.manifest import EMA, checkpoints_in, finish
from elche_worker.model.checkpoint import About, CheckpointData, CheckpointTarget, load, other_buffers, weights_of
from support import checkpoint_writer

ABOUT = About(job="job", file_name="train.py", source="job = 1\n", tensors=("weight float32 (3, 4) averaged",))
TRAINING = {"attempt": 1, "version": 7}


def kept(size: int = 4) -> CheckpointData:
    return CheckpointData({"weight": torch.arange(3.0 * size).reshape(3, size)}, {"buffers": {}, "rank": 0})


def test_a_writer_that_is_killed_at_any_moment_leaves_whole_checkpoints(tmp_path: Path) -> None:
    for attempt in range(4):
        place = tmp_path / str(attempt)
        process = subprocess.Popen([sys.executable, checkpoint_writer.__file__, str(place)])
        while not place.exists() or not any(place.glob("[0-9]*")):
            assert process.poll() is None
            time.sleep(0.001)
        time.sleep(random.random() * 0.05)  # it is killed at any moment: there is nothing to wait for
        process.kill()
        process.wait()
        found = checkpoints_in(place)
        assert 1 <= len(found) <= 3
        versions = [load(str(one)).manifest["training"]["version"] for one in found]
        assert versions == sorted(versions)
        CheckpointTarget(str(place)).keep_only([checkpoints_in(place)[-1].name])
        assert [path.name for path in place.iterdir()] == [f"1-{versions[-1]:08d}"], "drafts go as well"


def test_a_slow_writer_leaves_alone_what_was_begun_after_its_own_checkpoint(tmp_path: Path) -> None:
    """Each rank knows of the checkpoints that were there, or begun, when its own was."""
    earlier, own, later = (f"epoch-0001-step-{step:08d}-attempt-2" for step in (10, 20, 30))
    target = CheckpointTarget(str(tmp_path))
    for name in (earlier, own, later, "epoch-0009-step-00000090"):
        target.write(name, kept(), ABOUT, TRAINING)
    (tmp_path / f".epoch-0001-step-{40:08d}-attempt-2.abc").mkdir()
    (tmp_path / f".epoch-0001-step-{5:08d}-attempt-2.abc").mkdir()
    target.keep_only([own])
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {own, later, f".epoch-0001-step-{40:08d}-attempt-2.abc"}, "an earlier attempt's are nobody's"


def test_a_draft_of_what_is_to_stay_is_left_to_the_rank_that_writes_it(tmp_path: Path) -> None:
    """It was begun before one that another rank has had whole by now."""
    earlier, own = (f"epoch-0001-step-{step:08d}" for step in (10, 20))
    target = CheckpointTarget(str(tmp_path))
    target.write(own, kept(), ABOUT, TRAINING)
    (tmp_path / f".{earlier}.abc").mkdir()
    target.keep_only([earlier, own])
    assert {path.name for path in tmp_path.iterdir()} == {own, f".{earlier}.abc"}


def test_without_space_nothing_is_left_and_the_last_one_stays(tmp_path: Path) -> None:
    CheckpointTarget(str(tmp_path)).write("1-00000001", kept(), ABOUT, TRAINING)
    command = [sys.executable, checkpoint_writer.__file__, str(tmp_path), "full"]
    said = subprocess.check_output(command, text=True, timeout=100)
    assert "File too large" in said
    assert [path.name for path in tmp_path.iterdir()] == ["1-00000001"]
    assert load(str(tmp_path)).weights["weight"].shape == (3, 4)


def test_a_draft_is_no_checkpoint_until_it_is_finished_with_the_trainings_state(tmp_path: Path) -> None:
    target = CheckpointTarget(str(tmp_path))
    draft = target.write_draft(kept(), ABOUT)
    with pytest.raises(InvalidJob, match=r"is not a checkpoint and contains none.*--checkpoint-every-epochs 1"):
        checkpoints_in(tmp_path)
    with pytest.raises(InvalidJob, match="is not a checkpoint"):
        load(str(draft))
    path, size_bytes = target.write("1-00000006", kept(), ABOUT, {"attempt": 1, "version": 6})
    with pytest.raises(OSError, match="not empty"):
        finish(draft, Path(path), TRAINING)
    assert finish(draft, tmp_path / "1-00000007", TRAINING) == size_bytes
    assert not draft.exists()
    one, like = load(str(tmp_path / "1-00000007")), load(path)
    assert one.manifest["training"] == TRAINING
    assert torch.equal(one.weights["weight"], like.weights["weight"])
    files = sorted(file.name for file in (tmp_path / "1-00000007").iterdir())
    assert files == sorted(file.name for file in Path(path).iterdir())


def test_a_draft_that_is_not_whole_becomes_no_checkpoint(tmp_path: Path) -> None:
    """As after a host lost its power: the job goes back to one that can be read."""
    draft = CheckpointTarget(str(tmp_path)).write_draft(kept(), ABOUT)
    os.truncate(draft / "model.safetensors", 10)
    with pytest.raises(ValueError, match=r"model\.safetensors has 10 bytes and had"):
        finish(draft, tmp_path / "1-00000007", TRAINING)
    with pytest.raises(InvalidJob, match="contains none"):
        checkpoints_in(tmp_path)


def test_a_draft_that_a_stopped_rank_has_just_left_stays(tmp_path: Path) -> None:
    """A rank that stopped a moment later had a checkpoint to write, and removes older ones after that."""
    target = CheckpointTarget(str(tmp_path))
    target.write("1-00000001", kept(), ABOUT, TRAINING)
    new, old = (target.write_draft(kept(), ABOUT) for _ in range(2))
    os.utime(old, (0, 0))
    target.keep_only(["1-00000001"])
    assert {path.name for path in tmp_path.iterdir()} == {"1-00000001", new.name}


def test_what_is_there_is_never_overwritten(tmp_path: Path) -> None:
    target = CheckpointTarget(str(tmp_path))
    target.write("1-00000001", kept(), ABOUT, TRAINING)
    with pytest.raises(OSError, match="1-00000001"):
        target.write("1-00000001", kept(5), ABOUT, TRAINING)
    assert load(str(tmp_path)).weights["weight"].shape == (3, 4)
    assert len(list(tmp_path.iterdir())) == 1


def spoil(path: Path, how: str) -> None:
    content = path.read_bytes()
    match how:
        case "cut off":
            path.write_bytes(content[:-10])
        case "a bit flipped":
            path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
        case "gone":
            path.unlink()
        case "with another version":
            path.write_bytes(content.replace(b'"version": 7', b'"version": 6'))
        case "of another format":
            path.write_bytes(content.replace(b'"format": 2', b'"format": 0'))


@pytest.mark.parametrize(
    ("name", "how", "said"),
    [
        ("model.safetensors", "cut off", "model.safetensors has"),
        ("model.safetensors", "gone", "is not whole: model.safetensors is missing"),
        ("state.safetensors", "a bit flipped", "is damaged: state.safetensors is not what was written"),
        ("manifest.json", "gone", "is not a checkpoint and contains none: no manifest.json is in it"),
        ("manifest.json", "cut off", "is not a manifest of an elche checkpoint"),
        ("manifest.json", "with another version", "is damaged: its checksum does not match"),
        ("manifest.json", "of another format", "has format 0, and this version"),
    ],
)
def test_one_that_is_not_as_it_was_written_is_refused(tmp_path: Path, name: str, how: str, said: str) -> None:
    path, _ = CheckpointTarget(str(tmp_path)).write("1-00000001", kept(), ABOUT, TRAINING)
    spoil(Path(path) / name, how)
    with pytest.raises(InvalidJob) as refused:
        load(path)
    assert said in str(refused.value)


@pytest.mark.parametrize("place", ["{}", "file://{}"])
@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors"])
def test_of_a_folder_the_newest_whole_one_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, place: str
) -> None:
    """A job that was resumed at its coordinator failed although an older one was beside it."""
    place = place.format(tmp_path)
    target = CheckpointTarget(str(tmp_path))
    for version in (6, 7):
        target.write(f"1-0000000{version}", kept(), ABOUT, {"attempt": 1, "version": version})
    spoil(tmp_path / "1-00000007" / name, "a bit flipped")
    assert load(place).manifest["training"]["version"] == 6
    assert re.search(rf"{place}/1-00000007.* damaged", capsys.readouterr().err)
    with pytest.raises(InvalidJob, match=rf"{place}/1-00000007.* damaged"):
        load(f"{place}/1-00000007")
    spoil(tmp_path / "1-00000006" / name, "a bit flipped")
    with pytest.raises(InvalidJob, match=rf"{place}/1-0000000\d.* damaged"):
        load(place)


@pytest.mark.parametrize("url", ["memory://checkpoints", "file://{}"])
def test_a_url_holds_the_same(tmp_path: Path, url: str) -> None:
    target = CheckpointTarget(url.format(tmp_path / "remote"))
    for number in (1, 2, 3):
        path, size_bytes = target.write(f"1-0000000{number}", kept(number + 3), ABOUT, {**TRAINING, "version": number})
    target.keep_only(["1-00000002", "1-00000003"])
    assert load(path).weights["weight"].shape == (3, 6)
    assert load(target.place).manifest["training"]["version"] == 3, "the newest of a folder"
    assert size_bytes > 3 * 6 * 4
    with pytest.raises(InvalidJob, match=r"cannot be read|has none"):
        load(f"{target.place}/1-00000001")
    with pytest.raises(FileExistsError, match="1-00000003 is there already"):
        target.write("1-00000003", kept(), ABOUT, TRAINING)


def test_a_url_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(InvalidJob, match="abacus://here/there cannot be reached"):
        CheckpointTarget("abacus://here/there")


def test_tied_weights_and_hidden_buffers_come_back(tmp_path: Path) -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4))
        model[1].weight = model[0].weight
        model.register_buffer("hidden", torch.zeros(2), persistent=False)
        return model

    model = build()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.copy_(torch.randn(tensor.shape) if tensor.is_floating_point() else torch.tensor(5))
    state = {"buffers": other_buffers(model), "rank": 0}
    CheckpointTarget(str(tmp_path)).write("1-00000001", CheckpointData(weights_of(model), state), ABOUT, TRAINING)
    again = build()
    load(str(tmp_path)).restore_model(again)
    assert again[1].weight is again[0].weight
    for before, after in zip(
        (*model.parameters(), *model.buffers()), (*again.parameters(), *again.buffers()), strict=True
    ):
        assert torch.equal(before, after)
    plain = build()
    plain.load_state_dict(load(str(tmp_path)).weights)


@pytest.mark.parametrize("place", ["{}", "file://{}"])
def test_a_moving_average_is_a_model_that_plain_pytorch_reads(tmp_path: Path, place: str) -> None:
    """With what is not averaged as it is in the weights, and without buffers that a model does not save."""
    whole = {"weight": torch.zeros(2, dtype=torch.bfloat16), "counter": torch.tensor(3)}
    mean = {"weight": torch.ones(2), "hidden": torch.ones(1)}
    target = CheckpointTarget(place.format(tmp_path))
    target.write("1-00000001", CheckpointData(whole, {"rank": 0}, mean=mean), ABOUT, TRAINING)
    plain = load_file(tmp_path / "1-00000001" / EMA)
    assert plain.keys() == whole.keys()
    assert torch.equal(plain["weight"], torch.ones(2))
    loaded = load(target.place)
    assert torch.equal(loaded.model["weight"], torch.ones(2, dtype=torch.bfloat16))
    assert loaded.model["counter"] == 3
    assert torch.equal(loaded.mean["hidden"], torch.ones(1))


def test_the_first_tensor_that_has_changed_is_named(tmp_path: Path) -> None:
    CheckpointTarget(str(tmp_path)).write("1-00000001", kept(), ABOUT, TRAINING)
    loaded = load(str(tmp_path))
    loaded.check_model(["weight float32 (3, 4) averaged"])
    for now, said in ((["weight float32 (3, 5) averaged"], r"\(3, 5\)"), ([], "nothing more")):
        with pytest.raises(InvalidJob, match=rf"it had weight float32 \(3, 4\) averaged, and the job's has .*{said}"):
            loaded.check_model(now)

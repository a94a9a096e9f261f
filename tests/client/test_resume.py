"""What `elche checkpoints` and `elche resume` read from the folder of a run."""

import hashlib
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elche.errors import InvalidJob
from elche.manifest import SOURCE, DamagedCheckpoint, checkpoints_in, checksum
from elche.own_modules import path_of
from elche.v1.job_pb2 import JobSpec, RankPart, RecordedRound, Slice
from elche_client.cli.main import main
from elche_client.commands import resume
from elche_client.local.job_run import CADENCE, COMMAND
from elche_client.options import JobOptions

WEIGHTS = bytes(1000)


def test_the_newest_checkpoint_is_the_one_that_was_saved_last_whatever_its_name(tmp_path: Path) -> None:
    for name, version in (("1-00000010", 3), ("2-00000002", 1), ("10-00000001", 2)):
        write_checkpoint(tmp_path / name, version, {})
    assert [one.name for one in checkpoints_in(tmp_path)] == ["2-00000002", "10-00000001", "1-00000010"]
    assert checkpoints_in(tmp_path)[-1].name == "1-00000010"


def test_the_newest_checkpoint_of_a_job_is_its_furthest_though_its_hosts_clock_was_set_back(tmp_path: Path) -> None:
    """`elche resume` went back by all that was trained since, without a word."""
    for name, attempt, version, saved_at in (("a", 1, 9, 2.0), ("b", 2, 3, 100.0), ("c", 2, 7, 1.0)):
        write_checkpoint(tmp_path / "one" / name, version, {}, saved_at=saved_at, attempt=attempt)
    assert [one.name for one in checkpoints_in(tmp_path / "one")] == ["a", "b", "c"]
    write_checkpoint(tmp_path / "other" / "d", 1, {}, saved_at=50.0, job="j-2")
    assert checkpoints_in(tmp_path)[-1].name == "d", "of several jobs it is that of the one that has saved last"


def write_checkpoint(
    folder: Path,
    version: int,
    evaluated: dict[str, dict[str, float]],
    *,
    saved_at: float | None = None,
    attempt: int = 1,
    job: str = "j-1",
    samples: int = 0,
) -> None:
    """A checkpoint folder with one file."""
    evaluations = {"by_version": evaluated, "best_version": None}
    manifest = {
        "format": 2,
        "files": {"model.safetensors": {"bytes": len(WEIGHTS), "sha256": hashlib.sha256(WEIGHTS).hexdigest()}},
        "training": {
            "attempt": attempt,
            "version": version,
            "samples": samples,
            "ledger": {"epoch": version},
            "global_step": 1,
            "evaluations": evaluations,
        },
        "tensors": [],
        "saved_at": version if saved_at is None else saved_at,
        "settings": {},
        "num_ranks": 1,
        "file_name": "train.py",
        "job": job,
    }
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(WEIGHTS)
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


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, JobOptions, Path]]:
    """The runs that are begun: their kinds, options and files."""
    found: list[tuple[str, JobOptions, Path]] = []

    def begin(kind: str) -> Any:
        def make(*, path: Path, options: JobOptions, **more: object) -> Any:
            found.append((kind, options, path))
            return SimpleNamespace(run=lambda: 0)

        return make

    monkeypatch.setattr(resume, "LocalRun", begin("job"))
    monkeypatch.setattr(resume, "ScriptRun", begin("loop"))
    return found


def write_run(folder: Path, *, loop: bool = False, **record: Any) -> Path:
    """The folder of a run with a checkpoint, and what it was begun with."""
    checkpoint = folder / "checkpoints" / "1-00000001"
    write_checkpoint(checkpoint, 1, {})
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    del manifest["checksum"]
    manifest |= {"settings": {"batch_size": 8, "anchor": 4}, "num_ranks": 2, "file_name": str(folder / "train.py")}
    if loop:
        manifest |= {"training": {"loop": {"num_steps": 1, "epoch": 0}}, "job": "**lr=1e-3**"}
    (checkpoint / "manifest.json").write_text(json.dumps({**manifest, "checksum": checksum(manifest)}))
    (checkpoint / SOURCE).write_text("job = 'then'")
    command = {"name": "mine", "arguments": ["--then"], "environment": {"A": "then", "B": "then"}}
    command["slow_factors"] = {"1": 2.3, "2": 3.0}
    (folder / COMMAND).write_text(json.dumps(command))
    (folder / resume.RECORD).write_text(json.dumps({"state": "cancelled", "epochs": 1, **record}))
    return checkpoint


def go_on(place: Path, options: JobOptions, file: Path | None = None) -> int:
    return resume.resume_here(str(place), file, options, device="cpu", out=None, as_json=False)


def test_a_run_in_a_folder_with_an_unusual_name_is_no_damaged_one(
    tmp_path: Path, begun: list[tuple[str, JobOptions, Path]]
) -> None:
    """A space that does not break, as some systems write it, and bytes that are no UTF-8."""
    write_run(tmp_path)
    command = json.loads((tmp_path / COMMAND).read_text())
    for name in ("my\u00a0runs", os.fsdecode(b"runs-\xff")):
        (tmp_path / COMMAND).write_text(json.dumps({**command, "folder": str(tmp_path / name)}))
        assert go_on(tmp_path, JobOptions()) == 0
    assert len(begun) == 2


@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors"])
def test_a_damaged_checkpoint_is_skipped_for_the_newest_whole_one_beside_it(
    tmp_path: Path, begun: list[tuple[str, JobOptions, Path]], capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """Until the user removed it by hand, `elche resume RUN` was refused."""
    first = write_run(tmp_path)
    second, third = (first.with_name(f"1-0000000{number}") for number in (2, 3))
    for version, one in ((2, second), (3, third)):
        write_checkpoint(one, version, {})
        (one / SOURCE).write_text("job = 'then'")
    flip(third / name)
    assert go_on(tmp_path, JobOptions()) == 0
    assert begun[-1][1].resume == str(second)
    said = capsys.readouterr().err
    assert re.search(rf"{third}\S* .*is (not what was written|damaged)", said)
    assert f"resuming from {second}; what was trained after it is trained again" in said


def test_a_checkpoint_of_another_job_is_no_replacement_for_a_damaged_one(
    tmp_path: Path, begun: list[tuple[str, JobOptions, Path]]
) -> None:
    write_run(tmp_path / "one")
    damaged = write_run(tmp_path / "other")
    for name in ("model.safetensors", "manifest.json"):
        flip(damaged / name)
        with pytest.raises(DamagedCheckpoint, match=f"{damaged}.* is"):
            go_on(tmp_path, JobOptions())
    assert begun == []


def test_whole_checkpoints_are_listed_beside_a_damaged_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for version in (1, 2):
        write_checkpoint(tmp_path / str(version), version, {})
    flip(tmp_path / "2" / "manifest.json")
    assert main(["checkpoints", str(tmp_path), "--json"]) == 0
    listed = capsys.readouterr()
    assert [one["version"] for one in json.loads(listed.out)] == [1]
    assert f"{tmp_path / '2' / 'manifest.json'} is not a manifest" in listed.err


def flip(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(bytes([content[0] ^ 1]) + content[1:])


@pytest.mark.parametrize("text", ["", "{", "[]", '{"arguments": 3}', "[" * 100_000])
def test_a_run_whose_arguments_are_damaged_is_not_resumed_without_them(
    tmp_path: Path, begun: list[tuple[str, JobOptions, Path]], text: str
) -> None:
    """With another learning rate among them, say, another training went on, with code 0."""
    write_run(tmp_path)
    (tmp_path / COMMAND).write_text(text)
    with pytest.raises(InvalidJob, match=r"run\.json of the run that has written \S+ is damaged: move the checkpoint"):
        go_on(tmp_path, JobOptions())
    assert begun == []


def test_a_run_whose_arguments_cannot_be_read_is_not_resumed_without_them(
    tmp_path: Path, begun: list[tuple[str, JobOptions, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path)
    read = Path.read_text

    def refuse(path: Path, **how: Any) -> str:
        if path.name == COMMAND:
            raise PermissionError(13, "Permission denied", str(path))
        return read(path, **how)

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(PermissionError):
        go_on(tmp_path, JobOptions())
    assert begun == []


def test_what_is_asked_for_wins_over_what_the_checkpoint_was_made_with(
    tmp_path: Path, begun: list[tuple[str, JobOptions, Path]]
) -> None:
    """`elche resume RUN --anchor 9` trained on with the anchor of the checkpoint."""
    checkpoint = write_run(tmp_path)
    assert go_on(tmp_path, JobOptions()) == 0
    mine = JobOptions(
        num_ranks=3,
        slow_factors={2: 1.5},
        settings={"anchor": 9, "seed": 1},
        name="another",
        arguments=("--now",),
        environment={"A": "now"},
    )
    assert go_on(tmp_path, mine) == 0
    (kind, as_before, _), (_, as_asked, _) = begun
    assert kind == "job"
    assert as_before == JobOptions(
        resume=str(checkpoint),
        num_ranks=2,
        slow_factors={1: 2.3},  # there is no rank 2 any more
        settings={"batch_size": 8, "anchor": 4},
        name="mine",
        arguments=("--then",),
        environment={"A": "then", "B": "then"},
    )
    assert as_asked == JobOptions(
        resume=str(checkpoint),
        num_ranks=3,
        slow_factors={2: 1.5},
        settings={"batch_size": 8, "anchor": 9, "seed": 1},
        name="another",
        arguments=("--now",),
        environment={"A": "now", "B": "then"},
    )


def test_the_file_is_the_one_that_has_made_the_checkpoint(
    tmp_path: Path, begun: list[tuple[str, JobOptions, Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    copy, original, another = write_run(tmp_path) / SOURCE, tmp_path / "train.py", tmp_path / "another.py"
    go_on(tmp_path, JobOptions())
    assert f"{original} cannot be read (No such file or directory); its copy in the" in capsys.readouterr().err
    original.write_text(copy.read_text())
    go_on(tmp_path, JobOptions())
    assert "its copy" not in capsys.readouterr().err
    original.write_bytes(b"\xef\xbb\xbf" + copy.read_bytes().replace(b"\n", b"\r\n"))
    go_on(tmp_path, JobOptions())
    assert "its copy" not in capsys.readouterr().err, "as some editors save it"
    original.write_text("job = 'now'")
    go_on(tmp_path, JobOptions())
    assert f"{original} has changed since the checkpoint; its copy in the checkpoint is used" in capsys.readouterr().err
    go_on(tmp_path, JobOptions(), another)
    assert [path for _, _, path in begun] == [copy, original, original, copy, another]
    assert begun[-1][1].name == "", "another file, another name"
    copy.write_text("")
    with pytest.raises(InvalidJob, match=r"train\.py has changed since .* and the checkpoint has no copy of it: elche"):
        go_on(tmp_path, JobOptions())


def test_a_module_that_has_changed_since_the_run_is_told(
    tmp_path: Path, begun: list[tuple[str, JobOptions, Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    """A mistake in it may be mended; unnoticed, the file of then is trained with the losses of now."""
    run = tmp_path / "run"
    write_run(run)
    losses = tmp_path / "losses.py"
    losses.write_text("SIGN = 1\n")
    path_of(run, "j-1").write_text(json.dumps({"losses": [str(losses), "SIGN = 1\n"]}))
    path_of(run, "of-another-job").write_text(json.dumps({"losses": [str(losses), "SIGN = 0\n"]}))
    path_of(tmp_path, "of-another-run").write_text(json.dumps({"losses": [str(losses), "SIGN = 0\n"]}))
    go_on(run, JobOptions())
    assert "since the run began" not in capsys.readouterr().err
    losses.write_text("SIGN = -1\n")
    go_on(run, JobOptions())
    assert f"{losses} has changed since the run began; it is imported as it is now" in capsys.readouterr().err


def test_of_a_large_checkpoint_it_is_told_that_it_is_read(
    tmp_path: Path,
    begun: list[tuple[str, JobOptions, Path]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Reading one of many GiB took minutes without a word."""
    checkpoint = write_run(tmp_path)
    go_on(tmp_path, JobOptions())
    assert "to see that it is as it was written" not in capsys.readouterr().err
    monkeypatch.setattr(resume, "TOLD_BYTES", len(WEIGHTS))
    go_on(tmp_path, JobOptions())
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"elche: reading {checkpoint}, 0.0 GiB, to see that it is as it was written"


def test_modules_that_cannot_be_read_are_not_told(
    tmp_path: Path, begun: list[tuple[str, JobOptions, Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path)
    path_of(tmp_path, "j-1").write_text("{")
    go_on(tmp_path, JobOptions())
    assert "since the run began" not in capsys.readouterr().err


def test_a_loop_goes_on_as_a_loop(tmp_path: Path, begun: list[tuple[str, JobOptions, Path]]) -> None:
    """Whatever its name is: one with two asterisks was an invalid pattern of files' names."""
    write_run(tmp_path, loop=True)
    go_on(tmp_path, JobOptions())
    assert begun[0][0] == "loop"


@pytest.mark.parametrize("settings", [{}, {"epochs": 3}, {"epochs": 2}, {"anchor": 5}])
def test_a_complete_run_is_not_begun_again(
    tmp_path: Path, begun: list[tuple[str, JobOptions, Path]], settings: dict[str, object]
) -> None:
    write_run(tmp_path, state="succeeded", epochs=3)
    with pytest.raises(InvalidJob, match="is complete, with 3 epochs: there is nothing to resume unless --epochs"):
        go_on(tmp_path, JobOptions(settings=settings))
    assert begun == []


def test_a_complete_loop_is_told_where_its_epochs_are(
    tmp_path: Path, begun: list[tuple[str, JobOptions, Path]]
) -> None:
    """A loop takes no --epochs, and of a script that has changed the checkpoint's copy is used unless FILE is named."""
    write_run(tmp_path, loop=True, state="succeeded", epochs=3)
    with pytest.raises(InvalidJob, match=r"unless you set more epochs in the script: elche resume \S+ \S+\.py$"):
        go_on(tmp_path, JobOptions())
    assert begun == []


@pytest.mark.parametrize(
    ("record", "settings"),
    [
        ({"state": "succeeded", "epochs": 3}, {"epochs": 4}),
        ({"state": "succeeded", "epochs": 3}, {"max_steps": 9}),
        ({"state": "succeeded", "epochs": 3, "ended_early": "patience"}, {}),
        ({"state": "failed", "epochs": 3}, {}),
    ],
)
def test_a_run_with_more_to_do_goes_on(
    tmp_path: Path,
    begun: list[tuple[str, JobOptions, Path]],
    record: dict[str, Any],
    settings: dict[str, object],
) -> None:
    write_run(tmp_path, **record)
    assert go_on(tmp_path, JobOptions(settings=settings)) == 0
    assert begun[0][1].settings == {"batch_size": 8, "anchor": 4} | settings


@pytest.mark.parametrize("is_resumed", [False, True])
def test_a_recording_that_lacks_rounds_is_not_replayed(
    tmp_path: Path, begun: list[tuple[str, JobOptions, Path]], is_resumed: bool
) -> None:
    """Rounds that were made while the coordinator was away are not in it: another model was made, with code 0."""
    write_run(tmp_path, loop=False, state="succeeded", epochs=1, committed_samples=[24 + 8 * is_resumed])
    before = tmp_path / "before"
    write_checkpoint(before, 1, {}, samples=8)
    command = json.loads((tmp_path / COMMAND).read_text())
    command |= {
        "settings": {},
        "slow_factors": {},
        "num_ranks": 2,
        "file": "train.py",
        "resume": str(before) if is_resumed else "",
    }
    (tmp_path / COMMAND).write_text(json.dumps(command))
    (tmp_path / SOURCE).write_text("job = 'then'")
    one = JobSpec(replay=[RecordedRound(parts=[RankPart(slices=[Slice(size=8)]), RankPart(slices=[Slice(size=4)])])])
    for num_rounds in (1, 2):
        (tmp_path / CADENCE).write_bytes(one.SerializeToString() * num_rounds)
        if num_rounds == 1:
            with pytest.raises(InvalidJob, match=r"lacks rounds: it has 12 of 24 samples.*--one-process repeats"):
                replay(tmp_path)
        else:
            assert replay(tmp_path) == 0


def replay(folder: Path) -> int:
    return resume.replay_run(folder, JobOptions(), device="cpu", out=None, as_json=False)

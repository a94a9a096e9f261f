"""Checkpoints of real processes: everything dies and goes on, bit for bit where that is promised."""

import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from elche.errors import InvalidJob, JobFailed
from elche.manifest import checksum
from elche.v1 import job_pb2
from elche_client.events import Checkpoint, EpochReport, JobState
from elche_worker.model.checkpoint import load
from support.real_processes import Cluster, Command, Mark, eventually

pytestmark = pytest.mark.slow(reason="commands are started, killed and started again")

JobFile = Callable[..., Path]
NUM_SAMPLES, EPOCHS, BATCH_SIZE = 1003, 5, 16  # of jobs/counting.py
REPLACE = "import dataclasses\njob = dataclasses.replace(job, {})"
FURTHER = 20
"""Epochs by which a job goes on: checkpoints that a cancelled one was writing are not in its view, but resumed from."""
LONG = pytest.mark.long(reason="each case starts PyTorch six times; the case without this mark goes the same way")


def killed(mark: Mark, folder: Path, arguments: list[str], out: Path, after: int, kind: str) -> bool:
    """Runs a command and kills all its processes a while after so many checkpoints; whether it ended before."""
    process = subprocess.Popen(
        [sys.executable, "-m", "elche_client", *arguments, "--out", str(out)],
        cwd=folder,
        env=mark.environment({"KIND": kind}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    seen: set[Path] = set()

    def is_time() -> bool:
        seen.update(checkpoints_of(out))
        return len(seen) >= after or process.poll() is not None

    eventually(is_time, "checkpoints are written", limit_s=400)
    if process.poll() is not None:
        return False
    let_time_pass(random.random() * 0.3)
    for pid in mark.living():
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    process.wait()
    mark.assert_none_left()
    return True


def checkpoints_of(out: Path) -> list[Path]:
    """The checkpoints of a run that are not drafts."""
    found = [path.parent for path in out.glob("checkpoints/*/*/manifest.json")]
    return [path for path in found if not path.name.startswith(".")]


def let_time_pass(seconds: float) -> None:
    """The kill comes at any moment: there is no condition to wait for."""
    signal.sigtimedwait([], seconds)


def committed(out: Path) -> tuple[list[tuple[int, list[job_pb2.RankPart]]], Path]:
    """(samples, parts) of each recorded round of a run, and the checkpoint that it would go on from."""
    message = job_pb2.JobSpec()
    message.ParseFromString((out / "cadence.binpb").read_bytes())
    rounds = [(sum(s.size for part in one.parts for s in part.slices), list(one.parts)) for one in message.replay]
    newest = max(checkpoints_of(out), key=lambda path: path.name)
    return rounds, newest


@pytest.mark.gate
@pytest.mark.parametrize(
    ("kind", "num_ranks"),
    [("map", 1), pytest.param("drop_last", 1, marks=LONG), pytest.param("streams", 2, marks=LONG)],
)
def test_everything_is_killed_and_goes_on(
    mark: Mark, elche: Callable[..., Command], job_file: JobFile, tmp_path: Path, kind: str, num_ranks: int
) -> None:
    """Every sample of every epoch is counted once: by the ledger, by the rounds that count, and by the model itself."""
    path, seen, done_samples = job_file("counting.py"), Counter(), 0
    place = ["run", str(path), "--ranks", str(num_ranks)]
    for attempt, after in enumerate((2, 1)):
        out = tmp_path / f"out-{attempt}"
        assert killed(mark, tmp_path, place, out, after, kind), "it trains longer than that"
        rounds, newest = committed(out)
        until = load(str(newest)).manifest["training"]["samples"]
        for size, parts in rounds:
            if done_samples < until:
                done_samples += size
                count(seen, parts)
        assert done_samples == until
        place = ["resume", str(out)]
    done = elche(*place, "--out", "last", "--json", env={"KIND": kind}, limit_s=400)
    assert done.code == 0, done.err
    result = json.loads(done.out)
    kept = NUM_SAMPLES - NUM_SAMPLES % BATCH_SIZE if kind == "drop_last" else NUM_SAMPLES
    assert result["committed_samples"] == [kept] * EPOCHS
    for _, parts in committed(tmp_path / "last")[0]:
        count(seen, parts)
    assert sum(seen.values()) == kept * EPOCHS
    assert set(seen.values()) == {1}, "a position was committed twice"
    if num_ranks == 1:  # of more ranks the model holds the average, which cannot be counted
        counts = load_file(result["model"])["counts"]
        assert counts.sum() == kept * EPOCHS
        assert kind == "drop_last" or torch.equal(counts, torch.full_like(counts, EPOCHS))


def count(seen: Counter, parts: list[job_pb2.RankPart]) -> None:
    for part in parts:
        for one in part.slices:
            seen.update((one.epoch, position) for position in range(one.offset, one.offset + one.size))


DETERMINISTIC = """
def train_step(model, batch):
    x, y, _ = batch
    time.sleep(0.002)
    return nn.functional.mse_loss(nn.functional.dropout(model(x), 0.1), y)
def optimizer(model):
    return torch.optim.{}
import dataclasses
job = dataclasses.replace(job, train_step=train_step, optimizer=optimizer, averaging="{}", epochs=4, {})
"""


@pytest.mark.parametrize(
    ("num_ranks", "optimizer", "averaging", "more"),
    [
        (1, "AdamW(model.parameters(), lr=0.01)", "blocking", "max_grad_norm=1.0, ema=0.9"),
        pytest.param(
            2,
            "SGD(model.parameters(), lr=0.05)",
            "blocking",
            "outer_optimizer='nesterov', merge='adascale'",
            marks=LONG,
        ),
    ],
)
def test_resumed_and_uninterrupted_runs_are_equal_bit_for_bit(
    mark: Mark,
    elche: Callable[..., Command],
    job_file: JobFile,
    tmp_path: Path,
    num_ranks: int,
    optimizer: str,
    averaging: str,
    more: str,
) -> None:
    lines = DETERMINISTIC.format(optimizer, averaging, more)
    if num_ranks > 1:
        lines = lines.replace(
            "nn.functional.dropout(model(x), 0.1)", "model(x)"
        )  # each rank has its own random numbers
    path = job_file("linear.py", lines)
    ranks = ["--ranks", str(num_ranks)]
    whole = elche("run", str(path), *ranks, "--slow", "0=2", "--out", "whole", "--json")
    assert whole.code == 0, whole.err
    again = elche("replay", "whole", "--out", "again", "--checkpoint-every-epochs", "1", "--json")
    assert again.code == 0, again.err
    middle = sorted(checkpoints_of(tmp_path / "again"))[0]
    assert load(str(middle)).manifest["training"]["ledger"]["epoch"] == 2
    command = json.loads((tmp_path / "whole" / "run.json").read_text())
    (tmp_path / "whole" / "run.json").write_text(json.dumps({**command, "resume": str(middle)}))
    resumed = elche("replay", "whole", "--out", "resumed", "--json")
    assert resumed.code == 0, resumed.err
    wanted = load_file(tmp_path / "whole" / "model.safetensors")
    for name in ("again", "resumed"):
        found = load_file(tmp_path / name / "model.safetensors")
        assert all(torch.equal(found[key], wanted[key]) for key in wanted), name


# At a coordinator


def test_a_job_is_resumed_by_its_id_at_another_world_size(cluster: Cluster, job_file: JobFile) -> None:
    path = job_file("linear.py", REPLACE.format("epochs=10_000"))
    first = cluster.client.submit(path, num_ranks=2, checkpoint_every_epochs=2)
    for event in first.watch():
        if isinstance(event, Checkpoint):
            first.cancel()
            break
    with pytest.raises(JobFailed):
        first.result()
    with pytest.raises(InvalidJob, match="epochs must be at least 1"):
        first.resume(epochs=0)
    (view,) = [one for one in cluster.client.jobs() if one.job_id == first.id]
    done = view.checkpoints[-1].epoch
    second = first.resume(epochs=done + FURTHER)
    events = list(second.watch())
    assert events[-1].state is JobState.SUCCEEDED, events[-1]
    assert events[-1].epochs == done + FURTHER
    assert [event.epoch for event in events if isinstance(event, EpochReport)][-1] == done + FURTHER - 1
    third = cluster.client.submit(path, num_ranks=3, epochs=done + FURTHER + 2, resume=events[-1].checkpoints[-1].path)
    assert third.result().epochs == done + FURTHER + 2


def test_a_checkpoint_on_request(cluster: Cluster, job_file: JobFile) -> None:
    job = cluster.client.submit(job_file("linear.py", REPLACE.format("epochs=10_000")), num_ranks=2)
    watch = job.watch()
    eventually(lambda: next(watch).__class__.__name__ == "RoundReport", "it trains")
    job.checkpoint()
    saved = next(event for event in watch if isinstance(event, Checkpoint))
    assert load(saved.path).manifest["training"]["version"] == saved.version
    job.cancel()
    view = next(view for view in cluster.client.jobs() if view.job_id == job.id)
    assert [one.version for one in view.checkpoints] == [saved.version]


def test_to_a_url(cluster: Cluster, job_file: JobFile, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/remote"
    path = job_file(
        "linear.py", REPLACE.format(f"checkpoint_dir={url!r}, checkpoint_every_epochs=1, keep_checkpoints=1")
    )
    result = cluster.client.submit(path, num_ranks=2).result()
    (kept,) = result.checkpoints
    assert kept.epoch in (2, 3), "none was begun while the one before was written, as on a busy machine"
    again = cluster.client.submit(path, num_ranks=2, epochs=4, resume=kept.path.rpartition("/")[0])
    assert again.result().epochs == 4


def test_the_model_comes_to_the_client(
    cluster: Cluster, job_file: JobFile, elche: Callable[..., Command], tmp_path: Path
) -> None:
    job = cluster.client.submit(job_file(), num_ranks=2)
    with pytest.raises(InvalidJob, match="has no model; only a job that has succeeded has one"):
        cluster.client.download(job.id, tmp_path / "early")
    result = job.result(model=tmp_path / "here.safetensors")
    assert result.model == str(tmp_path / "here.safetensors")
    on_host = tmp_path / "there"
    done = elche("fetch", job.id, str(on_host), "--coordinator", cluster.address)
    assert done.code == 0, done.err
    assert on_host.read_bytes() == (tmp_path / "here.safetensors").read_bytes()
    assert not (tmp_path / "early").exists()
    torch.nn.Linear(8, 1).load_state_dict(load_file(on_host))


def test_a_model_that_is_gone_is_said(cluster: Cluster, job_file: JobFile, tmp_path: Path) -> None:
    job = cluster.client.submit(job_file(), num_ranks=1)
    Path(job.result().model).unlink()
    with pytest.raises(InvalidJob, match="cannot be read: No such file"):
        cluster.client.download(job.id, tmp_path / "here")
    assert not (tmp_path / "here").exists()


# What bad checkpoints get


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of jobs/linear.py after its second epoch, with the job's file beside it as `linear.py`."""
    folder = tmp_path_factory.mktemp("checkpoint")
    (folder / "linear.py").write_text((Path(__file__).parent / "jobs" / "linear.py").read_text())
    arguments = ["run", str(folder / "linear.py"), "--checkpoint-every-epochs", "1", "--out", str(folder / "out")]
    subprocess.run([sys.executable, "-m", "elche_client", *arguments], check=True, capture_output=True, timeout=400)
    return sorted(folder.glob("out/checkpoints/*/*"))[1]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def replace_in(path: Path, old: str, new: str) -> None:
    assert old in path.read_text()
    manifest = json.loads(path.read_text().replace(old, new))
    path.write_text(json.dumps({**manifest, "checksum": checksum(manifest)}, indent=1))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda path: truncate(path / "model.safetensors"), "model.safetensors has"),
        (
            lambda path: replace_in(path / "manifest.json", '"seed": 0', '"seed": 1'),
            "whose seed is 1, and the job's is 0",
        ),
    ],
)
def test_bad_checkpoints(
    elche: Callable[..., Command], checkpoint: Path, tmp_path: Path, spoil: Callable[[Path], None], said: str
) -> None:
    copy = tmp_path / "1-00000002"
    subprocess.run(["cp", "-r", str(checkpoint), str(copy)], check=True)
    spoil(copy)
    done = elche("resume", str(copy), "--device", "cpu")
    assert done.code == 2
    assert said in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("def model():\n    return nn.Linear(8, 1, bias=False)", "it had bias float32 (1,)"),
        pytest.param("NUM_SAMPLES = 499", "whose dataset_size is 500, and the job's is 499", marks=LONG),
    ],
)
def test_a_job_that_has_changed_since(
    elche: Callable[..., Command], checkpoint: Path, job_file: JobFile, change: str, said: str
) -> None:
    changed = job_file("linear.py", change, REPLACE.format("model=model"))
    done = elche("resume", str(checkpoint), str(changed), "--device", "cpu")
    assert done.code == 2
    assert said in done.err
    assert "Traceback" not in done.err


def test_a_place_that_cannot_be_written_to_is_counted_and_training_goes_on(cluster: Cluster, job_file: JobFile) -> None:
    job = cluster.client.submit(
        job_file(), num_ranks=2, checkpoint_every_epochs=1, checkpoint_dir="/proc/there/is/no/such/place"
    )
    result = job.result()
    assert result.epochs == 3
    assert result.checkpoints == ()
    view = next(view for view in cluster.client.jobs() if view.job_id == job.id)
    assert view.num_checkpoint_failures in (2, 3)  # two epochs may end in one round
    assert "cannot be written" in Path(view.ranks[0].log_path).read_text() + Path(view.ranks[1].log_path).read_text()


def test_plain_pytorch_reads_the_weights(checkpoint: Path) -> None:
    model = torch.nn.Linear(8, 1)
    model.load_state_dict(load_file(checkpoint / "model.safetensors"))
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


def test_checkpoints_are_listed(elche: Callable[..., Command], checkpoint: Path) -> None:
    run = checkpoint.parents[2]
    listed = json.loads(elche("checkpoints", str(run), "--json").out)
    assert [one["epoch"] for one in listed] == [1, 2, 3]
    assert str(checkpoint) in elche("checkpoints", str(run)).out

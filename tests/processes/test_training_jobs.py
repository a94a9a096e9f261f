"""What a `TrainingJob` can be told, seen from outside: every rank writes down what it was given and what it held."""

import dataclasses
import json
import math
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from real_processes import Cluster, Command
from safetensors.torch import load_file
from watched import WatchedSimulation, ranks

from elche.errors import InvalidJob
from elche_client.events import EpochReport, EvaluationReport, Event, JobResult, JobState, RoundReport
from elche_coordinator.core.messages.spec import Settings
from elche_worker import TrainingJob
from elche_worker.data.dataset import Drawn
from elche_worker.model.checkpoint import About, CheckpointData, Target, load
from elche_worker.user.loading import load_job

JobFile = Callable[..., Path]

NUM_SAMPLES, BATCH_SIZE, EPOCHS, LR = 200, 16, 4, 0.1  # of BASE
EVERY_SAMPLE_ONCE_PER_EPOCH = dict.fromkeys(range(NUM_SAMPLES), EPOCHS)

BASE = f"""
import dataclasses
import json
import math
import os
import time
from pathlib import Path

import torch
from torch import nn

from elche_worker import Shards, TrainingJob, record_scalar

NUM_SAMPLES, BATCH_SIZE, EPOCHS, LR = {NUM_SAMPLES}, {BATCH_SIZE}, {EPOCHS}, {LR}
OPTIMIZERS = []


def note(kind, *values):
    with Path(__file__).with_suffix(f".rank-{{os.environ.get('ELCHE_RANK', '0')}}").open("a") as notes:
        notes.write(json.dumps([kind, *values]) + "\\n")


def weights(model):
    return {{name: tensor.flatten().tolist() for name, tensor in model.state_dict().items()}}


class Points(torch.utils.data.Dataset):
    def __init__(self, seed=1, size=None):
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(size or NUM_SAMPLES, 4, generator=generator)
        self.y = self.x.sum(dim=1, keepdim=True)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index], index


def optimizer(model):
    OPTIMIZERS.append(torch.optim.SGD(model.parameters(), lr=LR))
    return OPTIMIZERS[-1]


def train_step(model, batch):
    x, y, indices = batch
    note("batch", indices.tolist(), OPTIMIZERS[-1].param_groups[0]["lr"] if OPTIMIZERS else None)
    time.sleep(0.002)
    return nn.functional.mse_loss(model(x), y)


job = TrainingJob(
    model=lambda: nn.Linear(4, 1),
    optimizer=optimizer,
    dataset=Points,
    train_step=train_step,
    batch_size=BATCH_SIZE,
    epochs=EPOCHS,
    anchor=2,
)
"""
REPLACE = "job = dataclasses.replace(job, {})"


@dataclass(frozen=True, slots=True)
class Trained:
    """A job that has ended, and what its ranks have noted."""

    path: Path
    events: list[Event]

    @property
    def result(self) -> JobResult:
        last = self.events[-1]
        assert isinstance(last, JobResult)
        return last

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def notes(self, rank: int) -> list[Any]:
        """[kind, values...] in order."""
        path = self.path.with_suffix(f".rank-{rank}")
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def noted(self, kind: str, rank: int) -> list[Any]:
        """The values of one kind."""
        return [values for one, *values in self.notes(rank) if one == kind]

    def batches(self, *ranks: int) -> list[list[int]]:
        """The samples of each batch of these ranks."""
        return [indices for rank in ranks for indices, _ in self.noted("batch", rank)]

    def samples(self, *ranks: int) -> Counter[int]:
        return Counter(index for indices in self.batches(*ranks) for index in indices)


def trained(cluster: Cluster, path: Path, *, fails: bool = False, **options: Any) -> Trained:
    options = {"num_ranks": 2, "verify_rounds": True, **options}
    done = Trained(path, list(cluster.client.submit(path, **options).watch()))
    assert fails or done.result.state is JobState.SUCCEEDED, done.result
    return done


def log_of(cluster: Cluster, rank: int) -> str:
    """That of a rank of the newest job."""
    return Path(cluster.client.jobs()[-1].ranks[rank].log_path).read_text()


def here(path: Path) -> TrainingJob:
    """The job of a file, to be run in this process."""
    return load_job(path.read_text(encoding="utf-8"), str(path))


@pytest.fixture
def write(job_file: JobFile) -> Callable[..., Path]:
    """Writes BASE, lines after it, and what they replace in the job."""

    def write(*lines: str, replaced: str = "") -> Path:
        return job_file("train.py", *lines, REPLACE.format(replaced), text=BASE)

    return write


# Optimizers that train_step steps itself

GAN = """
class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
        self.discriminator = nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 1))


def two_optimizers(model):
    return {
        "discriminator": torch.optim.Adam(model.discriminator.parameters(), lr=0.01),
        "generator": torch.optim.SGD(model.generator.parameters(), lr=0.02, momentum=0.9),
    }


def two_steps(model, batch, optimizers):
    note("optimizers", {name: one.param_groups[0]["lr"] for name, one in optimizers.items()})
    is_real = nn.functional.binary_cross_entropy_with_logits
    real, noise = batch[1], torch.randn(len(batch[1]), 2)
    optimizers["discriminator"].zero_grad()
    fake = model.generator(noise)
    judged, judged_fake = model.discriminator(real), model.discriminator(fake.detach())
    told = is_real(judged, torch.ones_like(judged)) + is_real(judged_fake, torch.zeros_like(judged_fake))
    told.backward()
    optimizers["discriminator"].step()
    optimizers["generator"].zero_grad()
    judged_fake = model.discriminator(fake)
    loss = is_real(judged_fake, torch.ones_like(judged_fake))
    loss.backward()
    optimizers["generator"].step()
    return {"loss": loss, "discriminator": told}
"""
TWO_OPTIMIZERS = "model=Gan, optimizer=two_optimizers, train_step=two_steps, manual_optimization=True"


def test_a_gan_steps_two_optimizers_and_is_resumed(cluster: Cluster, write: Callable[..., Path]) -> None:
    more = "optimizer_state='average', checkpoint_every_epochs=1"
    path = write(GAN, replaced=f"{TWO_OPTIMIZERS}, {more}")
    first = trained(cluster, path)
    rates = {"discriminator": 0.01, "generator": 0.02}
    assert first.noted("optimizers", 0) == [[rates]] * first.result.ranks[0].batches
    assert all(report.scalars["discriminator"] > 0 for report in first.of(EpochReport))

    before = load(first.result.checkpoints[-1].path)
    torch.manual_seed(0)
    start = here(path).model().state_dict()
    assert all(not torch.equal(before.weights[name], start[name]) for name in start), "a part was never stepped"
    adam, sgd = before.state["optimizers"]
    assert all("exp_avg" in moments for moments in adam["state"].values())
    assert all("momentum_buffer" in moments for moments in sgd["state"].values())

    again = Trained(path, list(cluster.client.resume(cluster.client.jobs()[-1].job_id, epochs=EPOCHS + 2).watch()))
    assert again.result.state is JobState.SUCCEEDED, again.result
    assert again.result.committed_samples == (NUM_SAMPLES,) * (EPOCHS + 2)
    after, _ = load(again.result.checkpoints[-1].path).state["optimizers"]
    assert after["state"][0]["step"] > adam["state"][0]["step"], "Adam began anew"


@pytest.mark.parametrize(
    "replaced",
    [
        "schedule=lambda progress: 0.5 if progress.step >= 10 else 1.0",
        "scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 10, gamma=0.5)",
    ],
)
def test_learning_rates_of_all_optimizers_follow_the_position(write: Callable[..., Path], replaced: str) -> None:
    path = write(GAN, replaced=f"{TWO_OPTIMIZERS}, {replaced}, epochs=1")
    here(path).run(device="cpu")
    rates = {
        name: [one[name] for (one,) in Trained(path, []).noted("optimizers", 0)]
        for name in ("discriminator", "generator")
    }
    assert rates["discriminator"] == pytest.approx([0.01] * 10 + [0.005] * 3)
    assert rates["generator"] == pytest.approx([0.02] * 10 + [0.01] * 3)


# Evaluation

EVALUATED = """
def eval_step(model, batch):
    x, y, indices = batch
    note("evaluated", indices.tolist(), model.training, torch.is_grad_enabled())
    return {"mse": nn.functional.mse_loss(model(x), y), "positive": (model(x) > 0.1).float().mean()}
"""


def test_a_shared_evaluation_is_that_of_one_process(cluster: Cluster, write: Callable[..., Path]) -> None:
    replaced = "eval_dataset=lambda: Points(seed=2, size=101), eval_step=eval_step"
    done = trained(cluster, write(EVALUATED, replaced=replaced), slow_factors={1: 2.0})
    job = here(done.path)
    model, held_out = job.model(), job.eval_dataset()
    model.load_state_dict(load_file(done.result.model))
    with torch.no_grad():
        predicted = model(held_out.x).double()
    errors = (predicted - held_out.y.double()).square().flatten()
    assert done.result.metrics["mse"] == pytest.approx(float(errors.mean()), rel=1e-6)
    assert done.result.metrics["positive"] == pytest.approx(float((predicted > 0.1).double().mean()), abs=1e-6)

    parts = [done.noted("evaluated", rank) for rank in (0, 1)]
    assert all(parts), "a rank took no part"
    counts = Counter(index for part in parts for indices, _, _ in part for index in indices)
    assert counts == {index: len(done.of(EvaluationReport)) for index in range(101)}
    assert {(training, grad) for part in parts for _, training, grad in part} == {(False, False)}


RISE_AND_FALL = """
class Total(nn.Module):
    def __init__(self):
        super().__init__()
        self.total = nn.Parameter(torch.zeros(()))


def one_more(model, batch):
    time.sleep(0.002)
    return -model.total


def score(model):
    return {"score": -abs(model.total.item() - 40.0), "total": model.total.item()}


def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=1.0)
"""
MONITORED = (
    "model=Total, optimizer=optimizer, train_step=one_more, evaluate=score, monitor='score', mode='max', max_anchor=3"
)


@pytest.fixture(scope="module")
def ended_early(shared_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    """Its score rises for about seven epochs, and falls from then on."""
    path = tmp_path_factory.mktemp("early") / "train.py"
    replaced = REPLACE.format(f"{MONITORED}, patience=3, epochs=60, keep_checkpoints=1")
    path.write_text("\n".join([BASE, RISE_AND_FALL, replaced]), encoding="utf-8")
    yield trained(shared_cluster, path)
    shared_cluster.mark.assert_none_left("elche rank")


def best_of(done: Trained) -> EvaluationReport:
    return max(done.of(EvaluationReport), key=lambda report: report.metrics["score"])


def test_training_ends_when_the_metric_has_not_been_better_for_a_while(ended_early: Trained) -> None:
    best, result = best_of(ended_early), ended_early.result
    assert 2 < best.epoch < 20
    num_after = sum(report.epoch > best.epoch for report in ended_early.of(EvaluationReport))
    assert 3 <= num_after < 20  # epochs of milliseconds: some were under way when patience ended
    assert result.ended_early == f"score was not better than {best.metrics['score']:g} in 3 evaluations"
    assert sum(result.committed_samples) < NUM_SAMPLES * 40


def test_the_best_checkpoint_stays_and_is_the_best_epochs_model(ended_early: Trained) -> None:
    best = best_of(ended_early)
    (marked,) = [one for one in ended_early.result.checkpoints if one.is_best]
    of_its_model = [one.epoch for one in ended_early.of(EvaluationReport) if one.metrics == best.metrics]
    assert marked.epoch == max(of_its_model) + 1  # short epochs: two may have ended in one round
    assert load(marked.path).weights["total"].item() == best.metrics["total"]
    assert all(load(one.path).weights for one in ended_early.result.checkpoints), "one that is listed is not there"


def test_the_best_checkpoint_shows_what_made_it_the_best(ended_early: Trained) -> None:
    (marked,) = [one for one in ended_early.result.checkpoints if one.is_best]
    assert dict(marked.metrics) == dict(best_of(ended_early).metrics)


def score_of(file: Path | str) -> float:
    """What RISE_AND_FALL's evaluation gives of a saved model."""
    return -abs(load_file(file)["total"].item() - 40.0)


def test_the_model_of_a_monitored_job_is_the_one_whose_evaluation_is_told(ended_early: Trained) -> None:
    result, best, last = ended_early.result, best_of(ended_early), ended_early.of(EvaluationReport)[-1]
    (marked,) = [one for one in result.checkpoints if one.is_best]
    assert (result.model_is, result.best_epoch) == (f"best of epoch {marked.epoch}", marked.epoch)
    assert (dict(result.best_metrics), dict(result.metrics)) == (best.metrics, last.metrics)
    folder = Path(result.model).parent
    assert score_of(result.model) == score_of(folder / "best.safetensors") == result.best_metrics["score"]
    assert score_of(folder / "last.safetensors") == result.metrics["score"] < result.best_metrics["score"]
    mode = os.stat(folder / "last.safetensors").st_mode
    assert {path.stat().st_mode for path in folder.glob("*.safetensors")} == {mode}


def test_a_job_that_restores_the_last_model_has_the_best_beside_it_to_fetch(
    cluster: Cluster, write: Callable[..., Path], tmp_path: Path
) -> None:
    done = trained(cluster, write(RISE_AND_FALL, replaced=f"{MONITORED}, epochs=12"), restore="last", num_ranks=1)
    result, job_id = done.result, cluster.client.jobs()[-1].job_id
    assert (result.model_is, score_of(result.model)) == ("last", result.metrics["score"])
    best = cluster.client.fetch_model(job_id, tmp_path / "best", best=True)
    assert score_of(best) == result.best_metrics["score"] > result.metrics["score"]
    assert score_of(cluster.client.fetch_model(job_id, tmp_path / "last")) == result.metrics["score"]


def test_on_one_device_the_state_is_that_of_the_best_epoch(write: Callable[..., Path]) -> None:
    def run(**changes: Any) -> tuple[float, list[dict[str, float]]]:
        told: list[dict[str, float]] = []
        job = here(write(RISE_AND_FALL, replaced=f"{MONITORED}, epochs=6"))
        state = dataclasses.replace(job, **changes).run(device="cpu", on_epoch=lambda _, metrics: told.append(metrics))
        return state.params["total"].item(), told

    total, told = run()
    assert total == max(told, key=lambda metrics: metrics["score"])["total"] < told[-1]["total"]
    total, told = run(restore="last")
    assert total == told[-1]["total"]


BESIDE = """
if __name__ == "__main__":
    handle = job.start(ranks=1, device="cpu", out="started")
    told = []
    while (metrics := handle.next_metrics()) is not None:
        told.append(metrics.metrics["score"])
    print(json.dumps([-abs(handle.join().params["total"].item() - 40.0), max(told), told[-1]]))
"""


def test_a_handle_gives_the_model_that_is_restored(cluster: Cluster, write: Callable[..., Path]) -> None:
    """Patience ends training within an epoch, so that the last evaluation is of none that is told."""
    path = write(RISE_AND_FALL, replaced=f"{MONITORED}, patience=3, epochs=60")
    path.write_text(path.read_text(encoding="utf-8") + BESIDE, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(path)],
        cwd=path.parent,
        env=cluster.mark.environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    score, best, last = json.loads(done.stdout.splitlines()[-1])
    assert score == best > last


def test_no_more_checkpoints_are_kept_than_the_job_says(ended_early: Trained) -> None:
    (marked,) = [one for one in ended_early.result.checkpoints if one.is_best]
    newest = ended_early.result.checkpoints[-1]
    assert {one.version for one in ended_early.result.checkpoints} == {marked.version, newest.version}


def test_the_best_epoch_has_a_checkpoint_on_a_slow_disk_too(cluster: Cluster, write: Callable[..., Path]) -> None:
    slow_disk = "fsync = os.fsync\nos.fsync = lambda handle: (time.sleep(0.03), fsync(handle))"
    done = trained(cluster, write(RISE_AND_FALL, slow_disk, replaced=f"{MONITORED}, epochs=12"), num_ranks=1)
    (marked,) = [one for one in done.result.checkpoints if one.is_best]
    assert marked.epoch < 12
    assert load(marked.path).weights["total"].item() == best_of(done).metrics["total"]
    assert cluster.client.jobs()[-1].num_checkpoint_failures == 0


@pytest.mark.parametrize(
    ("policy", "averaging", "num_ranks", "latency_ms", "seed"),
    [
        ("cadence", "overlapped", 2, 3.0, 6),
        ("async", "overlapped", 2, 3.0, 3),
        ("async", "overlapped", 3, 0.5, 7),
        ("async", "blocking", 2, 0.5, 38),
    ],
)
def test_the_last_epoch_of_a_monitored_job_has_a_checkpoint(
    policy: str, averaging: str, num_ranks: int, latency_ms: float, seed: int
) -> None:
    """Simulated, so that messages are late at the same moments each time."""
    settings = Settings(
        dataset_size=403,
        batch_size=16,
        num_epochs=5,
        policy=policy,
        averaging=averaging,
        anchor=2,
        seed=seed,
        has_evaluation=True,
        monitor="loss",
        keep_checkpoints=9,
    )
    simulation = WatchedSimulation(
        settings=settings,
        ranks=ranks(*[4.0, 4.4, 9.0][:num_ranks], jitter=0.5),
        seed=seed,
        latency_ms=latency_ms,
        checkpoint_ms=0.1,
        evaluate=lambda epoch: {"loss": 1 / (1 + epoch)},
    )
    last = simulation.run().checkpoints[-1]
    assert (last.epoch, last.is_best) == (5, True)


def test_a_rank_that_writes_does_not_disturb_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_writing, may_go_on, fsync = threading.Event(), threading.Event(), os.fsync
    kept, about = (
        CheckpointData({"weight": torch.ones(3)}, {"buffers": {}}),
        About(job="job", file_name="train.py", source=""),
    )

    def slowly(handle: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            is_writing.set()
            assert may_go_on.wait(10)
        fsync(handle)

    monkeypatch.setattr(os, "fsync", slowly)
    with ThreadPoolExecutor(1) as slow_rank:
        first = slow_rank.submit(Target(str(tmp_path)).write, "1-00000001", kept, about, {"version": 1})
        assert is_writing.wait(10)
        fast_rank = Target(str(tmp_path))
        fast_rank.write("1-00000002", kept, about, {"version": 2})
        fast_rank.keep_only(["1-00000001", "1-00000002"])
        may_go_on.set()
        path, _ = first.result()
    assert torch.equal(load(path).weights["weight"], torch.ones(3))


def test_patience_with_a_metric_that_is_never_a_number(cluster: Cluster, write: Callable[..., Path]) -> None:
    replaced = "evaluate=lambda model: {'score': float('nan')}, monitor='score', patience=2, epochs=50"
    done = trained(cluster, write(replaced=replaced), num_ranks=1)
    assert done.result.ended_early == "score was not a finite number in 2 evaluations"
    assert not any(one.is_best for one in done.result.checkpoints)


@pytest.mark.parametrize("value", ["torch.ones(3)", "None", "'high'"])
def test_a_metric_that_is_no_number_is_named(write: Callable[..., Path], value: str) -> None:
    job = here(write(replaced=f"evaluate=lambda model: {{'accuracy': {value}}}, epochs=1"))
    with pytest.raises(InvalidJob, match=r"evaluate\(\).*'accuracy'"):
        job.run(device="cpu")


@pytest.mark.parametrize(
    "replaced",
    [
        "evaluate=lambda model: {'accuracy': np.float32(0.5)}",
        "evaluate=lambda model: {'correct': np.int64(5)}",
        "evaluate=lambda model: {'accuracy': np.array(0.5)}",
        "train_step=lambda model, batch: {'loss': train_step(model, batch), 'accuracy': np.float32(0.5)}",
        "schedule=lambda progress: np.float32(0.5)",
    ],
)
def test_numbers_of_numpy_are_numbers(write: Callable[..., Path], replaced: str) -> None:
    here(write("import numpy as np", replaced=f"{replaced}, epochs=1")).run(device="cpu")


# Callbacks

WATCHED = """
def begin_epoch(rank, epoch):
    note("epoch", epoch, rank.epoch, rank.rank, rank.device, rank.local_step, rank.version)
    rank.lr_factor = 1 / (1 + epoch)


def take_metrics(metrics):
    note("metrics", dataclasses.asdict(metrics))


def take_checkpoint(version, model):
    note("checkpoint", version, weights(model))


def take_result(model, version):
    note("round", version, weights(model))


def evaluate(model):
    held_out = Points(seed=2)
    return {"mse": nn.functional.mse_loss(model(held_out.x), held_out.y).item()}
"""
CALLBACKS = "epoch_fn=begin_epoch, metrics_fn=take_metrics, checkpoint_fn=take_checkpoint, after_round=take_result"


@pytest.fixture(scope="module")
def watched(shared_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    """All callbacks of a training of two unequal ranks."""
    path = tmp_path_factory.mktemp("watched") / "train.py"
    replaced = REPLACE.format(f"{CALLBACKS}, evaluate=evaluate, checkpoint_every_epochs=1, keep_checkpoints=100")
    path.write_text("\n".join([BASE, WATCHED, replaced]), encoding="utf-8")
    yield trained(shared_cluster, path, slow_factors={1: 1.5})
    shared_cluster.mark.assert_none_left("elche rank")


def test_one_rank_is_told_of_every_epoch_with_its_evaluation(watched: Trained) -> None:
    told = [metrics for (metrics,) in watched.noted("metrics", 0)]
    assert watched.noted("metrics", 1) == []
    assert [metrics["epoch"] for metrics in told] == list(range(EPOCHS))
    epochs, evaluations = watched.of(EpochReport), watched.of(EvaluationReport)
    assert [metrics["metrics"] for metrics in told] == [dict(report.metrics) for report in evaluations]
    assert [metrics["loss"] for metrics in told] == pytest.approx([report.loss for report in epochs])
    assert [metrics["samples"] for metrics in told] == [NUM_SAMPLES] * EPOCHS
    assert [tuple(metrics["rank_batches"]) for metrics in told] == [report.rank_batches for report in epochs]
    assert sum(sum(metrics["rank_batches"]) for metrics in told) == len(watched.batches(0, 1))
    for metrics in told:
        assert metrics["samples_per_s"] == pytest.approx(NUM_SAMPLES / metrics["duration_s"])


def test_every_rank_is_told_of_an_epoch_before_its_first_batch(watched: Trained) -> None:
    samples: dict[int, Counter[int]] = {epoch: Counter() for epoch in range(EPOCHS)}
    for rank in (0, 1):
        begun, num_batches = -1, 0
        for kind, *values in watched.notes(rank):
            if kind == "epoch":
                epoch, own_epoch, own_rank, device, local_step, version = values
                assert epoch > begun
                assert (own_epoch, own_rank, device) == (epoch, rank, "cpu")
                assert local_step == num_batches
                assert version >= 1
                begun = epoch
            elif kind == "batch":
                num_batches += 1
                samples[begun].update(values[0])
    assert all(counts == dict.fromkeys(range(NUM_SAMPLES), 1) for counts in samples.values())


def test_the_factor_that_an_epoch_begins_with_is_that_of_all_its_batches(watched: Trained) -> None:
    for rank in (0, 1):
        epoch = -1
        for kind, *values in watched.notes(rank):
            if kind == "epoch":
                epoch = values[0]
            elif kind == "batch":
                assert values[1] == pytest.approx(LR / (1 + epoch))


def test_every_rank_sees_every_result_in_order_and_all_see_the_same(watched: Trained) -> None:
    seen = [watched.noted("round", rank) for rank in (0, 1)]
    assert [version for version, _ in seen[0]] == list(range(1, watched.result.rounds + 1))
    assert seen[0] == seen[1]
    final = {name: tensor.flatten().tolist() for name, tensor in load_file(watched.result.model).items()}
    assert seen[0][-1][1] == final


def test_whoever_writes_a_checkpoint_is_shown_its_model(watched: Trained) -> None:
    written = [(version, held) for rank in (0, 1) for version, held in watched.noted("checkpoint", rank)]
    on_disk = {one.version: load(one.path).weights for one in watched.result.checkpoints}
    assert sorted(version for version, _ in written) == sorted(on_disk)
    rounds = dict(watched.noted("round", 0))
    for version, held in written:
        assert held == {name: tensor.flatten().tolist() for name, tensor in on_disk[version].items()}
        assert held == rounds[version]


RAISING = """
def begins(rank, epoch):
    rank.lr_factor = 0.5
    raise ValueError("no such epoch")


def ends(metrics):
    raise KeyError("accuracy")


def written(version, model):
    raise OSError("no such bucket")


def averaged(model):
    raise AssertionError("it takes two arguments, so that it is never called")
"""


def test_callbacks_that_raise_are_shown_and_training_goes_on(cluster: Cluster, write: Callable[..., Path]) -> None:
    callbacks = "epoch_fn=begins, metrics_fn=ends, checkpoint_fn=written, after_round=averaged"
    done = trained(cluster, write(RAISING, replaced=f"{callbacks}, checkpoint_every_epochs=1"))
    assert done.samples(0, 1) == EVERY_SAMPLE_ONCE_PER_EPOCH
    assert done.result.checkpoints
    assert {rate for _, rate in done.noted("batch", 0)} == {LR / 2}
    logs = [log_of(cluster, rank) for rank in (0, 1)]
    for log in logs:
        assert "the callback begins raised, and training goes on" in log
        assert 'raise ValueError("no such epoch")' in log
        assert "the callback averaged raised" in log
        assert "takes 1 positional argument but 2 were given" in log
    assert "KeyError: 'accuracy'" in logs[0]
    assert "KeyError: 'accuracy'" not in logs[1]
    assert "OSError: no such bucket" in logs[0] + logs[1]
    views = cluster.client.jobs()[-1].ranks
    assert all(rank.callback_errors >= 3 for rank in views), "they are counted"


SETTING = """
from elche_worker import this_rank

KEPT = []


def begins(rank, epoch):
    KEPT[:] = [rank]
    if epoch == 2:
        rank.set_lr_scale(0.5)


def averaged(model, version):
    this_rank().set_lr(LR / version)
    note("round", version, this_rank().lr)


def ends(metrics):
    KEPT[0].set_lr(100.0)
"""


def test_rates_that_callbacks_set_are_those_of_the_next_batches_and_of_a_resume(
    cluster: Cluster, write: Callable[..., Path]
) -> None:
    """Also with what only one rank calls, which may set nothing: its rate would not be the others'."""
    callbacks = "epoch_fn=begins, after_round=averaged, metrics_fn=ends, checkpoint_every_epochs=1"
    path = write(SETTING, replaced=f"{callbacks}, averaging='blocking', max_anchor=3")
    done = trained(cluster, path)
    for rank in (0, 1):
        rate = LR
        for kind, *values in done.notes(rank):
            if kind == "round":
                version, rate = values
                assert rate == pytest.approx(LR / version)
            elif kind == "batch":
                assert values[1] in (pytest.approx(rate), pytest.approx(rate / 2)), "or an epoch began with its scale"
    assert "Misuse: set_lr is for epoch_fn and after_round, which run on every rank" in log_of(cluster, 0)
    checkpoint = done.result.checkpoints[-2]
    assert checkpoint.epoch == EPOCHS - 1
    path.with_suffix(".rank-0").unlink()
    path.with_suffix(".rank-1").unlink()
    path.write_text(path.read_text() + "\njob = dataclasses.replace(job, epoch_fn=None, after_round=None)\n")
    again = trained(cluster, path, resume=checkpoint.path)
    rates = [rate for rank in (0, 1) for _, rate in again.noted("batch", rank)]
    assert rates == pytest.approx([LR / checkpoint.version] * len(rates))


REPLACING = """
def begins(rank, epoch):
    if epoch == 1:
        rank.set_schedule(lambda progress: 0.25)
    if epoch == 2:
        rank.set_lr_scale(3.0)


def averaged(model, version):
    note("round", version)
"""


def test_a_schedule_is_replaced_and_a_scale_goes_with_it(cluster: Cluster, write: Callable[..., Path]) -> None:
    path = write(REPLACING, replaced="epoch_fn=begins, after_round=averaged, schedule=lambda progress: 0.5, epochs=3")
    done = trained(cluster, path)
    rates = [rate for rank in (0, 1) for _, rate in done.noted("batch", rank)]
    assert set(rates) == {LR / 2, LR / 4, LR / 4 * 3}
    assert len(done.noted("round", 0)) > 3, "rounds undo nothing"


def test_the_last_epochs_metrics_are_taken_in_full(cluster: Cluster, write: Callable[..., Path]) -> None:
    slow = "def take(metrics):\n    time.sleep(3.5 * (metrics.epoch == 1))\n    note('taken', metrics.epoch)"
    done = trained(cluster, write(slow, replaced="metrics_fn=take, epochs=2"), num_ranks=1)
    assert done.noted("taken", 0) == [[0], [1]]


# Learning rates

SCHEDULED = """
TOTAL_STEPS = math.ceil(EPOCHS * NUM_SAMPLES / BATCH_SIZE)


def fall(progress):
    assert progress.total_samples == EPOCHS * NUM_SAMPLES and progress.total_steps == TOTAL_STEPS
    assert progress.step == progress.samples // BATCH_SIZE
    note("position", progress.samples)
    return 1 - progress.fraction


def cosine(optimizer):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, TOTAL_STEPS, eta_min=0.01)


def take_result(model, version):
    note("round", version)
"""


def falling(samples: int) -> float:
    return LR * (1 - samples / (EPOCHS * NUM_SAMPLES))


def cosine(samples: int) -> float:
    step, total_steps = samples // BATCH_SIZE, math.ceil(EPOCHS * NUM_SAMPLES / BATCH_SIZE)
    return 0.01 + (LR - 0.01) * (1 + math.cos(math.pi * step / total_steps)) / 2


@pytest.mark.parametrize(
    ("replaced", "expected"),
    [("schedule=fall", falling), ("scheduler=cosine, policy='sync'", cosine)],
    ids=["schedule", "scheduler, sync"],
)
def test_learning_rates_are_those_of_the_position(
    cluster: Cluster, write: Callable[..., Path], replaced: str, expected: Callable[[int], float]
) -> None:
    """A rank knows what all ranks had trained at the last round, and what it has trained since then itself."""
    path = write(SCHEDULED, replaced=f"{replaced}, after_round=take_result, averaging='blocking', max_anchor=4")
    done = trained(cluster, path, slow_factors={1: 2.0})
    committed, total = {}, 0
    for report in done.of(RoundReport):
        total += report.samples
        committed[report.version] = total
    assert total == EPOCHS * NUM_SAMPLES
    for rank in (0, 1):
        position, positions, rates = 0, [], []
        for kind, *values in done.notes(rank):
            if kind == "round":
                position = committed[values[0]]
            elif kind == "batch":
                indices, rate = values
                positions.append(position)
                rates.append(rate)
                position += len(indices)
        assert len(positions) > 10
        assert rates == pytest.approx([expected(position) for position in positions], rel=1e-6)
        assert not done.noted("position", rank) or done.noted("position", rank) == [[one] for one in positions]
        assert min(rates) < 0.4 * LR


def test_a_schedule_that_returns_nothing_is_named(write: Callable[..., Path]) -> None:
    job = here(write(replaced="schedule=lambda progress: None"))
    with pytest.raises(InvalidJob, match=r"schedule\(\) must return a number.*not NoneType"):
        job.run(device="cpu")


# How much is trained


@pytest.fixture(scope="module")
def ten_steps(shared_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    """Epochs of six batches, and ten batches in all."""
    path = tmp_path_factory.mktemp("steps") / "train.py"
    replaced = "max_steps=10, epochs=3, evaluate=lambda model: {'one': 1.0}, checkpoint_every_epochs=1"
    path.write_text("\n".join([BASE, "NUM_SAMPLES = 96", REPLACE.format(replaced)]), encoding="utf-8")
    yield trained(shared_cluster, path, slow_factors={1: 1.5})
    shared_cluster.mark.assert_none_left("elche rank")


def test_max_steps_ends_training_in_the_middle_of_an_epoch(ten_steps: Trained) -> None:
    assert ten_steps.result.committed_samples == (96, 64)
    assert sum(rank.batches for rank in ten_steps.result.ranks) == 10
    assert [report.committed for report in ten_steps.of(EpochReport)] == [96, 64]
    assert [report.epoch for report in ten_steps.of(EvaluationReport)] == [0, 1]


def test_a_job_that_max_steps_has_ended_is_resumed_where_it_was(cluster: Cluster, ten_steps: Trained) -> None:
    again = cluster.client.submit(
        ten_steps.path, num_ranks=1, max_steps=None, resume=ten_steps.result.checkpoints[-1].path
    )
    assert again.result().committed_samples == (96, 96, 96)
    assert ten_steps.samples(0, 1) == dict.fromkeys(range(96), 3)


RESUMED = """
NUM_SAMPLES = 96


def fall(progress):
    note("position", progress.samples)
    return 1 - progress.fraction
"""


def test_a_resumed_job_has_the_learning_rates_of_its_file(
    cluster: Cluster, write: Callable[..., Path], ten_steps: Trained
) -> None:
    """The optimizer's state in the checkpoint has the rate of then, and the file another one."""
    checkpoint = ten_steps.result.checkpoints[-1]
    path = write(RESUMED, "LR = 0.3", replaced="schedule=fall, epochs=4, averaging='blocking'")
    done = trained(cluster, path, resume=checkpoint.path)
    assert done.result.committed_samples == (96,) * 4
    first = []
    for rank in (0, 1):
        fractions = [samples / (96 * 4) for (samples,) in done.noted("position", rank)]
        first.append(fractions[0])
        assert [rate for _, rate in done.noted("batch", rank)] == pytest.approx([0.3 * (1 - one) for one in fractions])
    assert 0.25 <= min(first) < 0.5


def test_max_steps_counts_samples_where_epochs_have_a_tail(write: Callable[..., Path]) -> None:
    """Nine full batches' worth: 100 samples, and 44 of the next epoch, which is a batch more."""
    path = write("NUM_SAMPLES = 100", replaced="max_steps=9")
    here(path).run(device="cpu")
    assert [len(batch) for batch in Trained(path, []).batches(0)] == [16] * 6 + [4] + [16] * 2 + [12]


def test_in_lockstep_unequal_ranks_make_equally_many_batches_in_a_round(
    cluster: Cluster, write: Callable[..., Path]
) -> None:
    done = trained(cluster, write("NUM_SAMPLES = 320"), slow_factors={1: 3.0}, max_batch_diff=0)
    rounds = [report.rank_batches for report in done.of(RoundReport)]
    assert done.samples(0, 1) == dict.fromkeys(range(320), EPOCHS)
    assert sum(counts[0] != counts[1] for counts in rounds) <= EPOCHS, "an epoch's last rounds aside"
    assert sum(counts[0] == counts[1] > 0 for counts in rounds) >= EPOCHS


# Which samples


def test_samples_are_drawn_as_their_weights_say(cluster: Cluster, write: Callable[..., Path]) -> None:
    """One sample in ten is of the rare class; the weights make both as likely."""
    lines = "NUM_SAMPLES = 1000\ndef balanced():\n    return [9.0 if index % 10 == 0 else 1.0 for index in range(1000)]"
    done = trained(cluster, write(lines, replaced="sample_weights=balanced, batch_size=50, seed=5"))
    assert done.result.committed_samples == (1000,) * EPOCHS
    drawn = done.samples(0, 1)
    num_drawn = 1000 * EPOCHS
    assert sum(drawn.values()) == num_drawn
    num_rare = sum(count for index, count in drawn.items() if index % 10 == 0)
    assert abs(num_rare - num_drawn / 2) < 4.5 * math.sqrt(num_drawn) / 2
    order = Drawn(np.array([9.0 if index % 10 == 0 else 1.0 for index in range(1000)]), seed=5)
    assert drawn == Counter(index for epoch in range(EPOCHS) for index in order.indices(epoch, 0, 1000))


PARTS = """
SIZES = [50, 7, 0, 100, 43]
STARTS = [sum(SIZES[:index]) for index in range(len(SIZES))]
POINTS = Points()


class Part(torch.utils.data.IterableDataset):
    def __init__(self, index):
        self.index = index

    def __iter__(self):
        return (POINTS[STARTS[self.index] + position] for position in range(SIZES[self.index]))
"""


@pytest.mark.parametrize(
    "replaced",
    [
        "dataset=lambda: Shards(SIZES, Part)",
        "dataset=lambda: [Part(index) for index in range(5)], num_workers=1",
    ],
    ids=["shards", "streams"],
)
def test_parts_are_trained_once_in_every_epoch(cluster: Cluster, write: Callable[..., Path], replaced: str) -> None:
    done = trained(cluster, write(PARTS, replaced=replaced), slow_factors={1: 1.5})
    assert done.samples(0, 1) == EVERY_SAMPLE_ONCE_PER_EPOCH
    assert done.result.committed_samples == (NUM_SAMPLES,) * EPOCHS
    assert done.batches(0)
    assert done.batches(1)


def test_parts_are_shuffled_on_one_device_too(write: Callable[..., Path]) -> None:
    path = write(PARTS, replaced="dataset=lambda: Shards(SIZES, Part)")
    here(path).run(device="cpu")
    seen = [index for indices in Trained(path, []).batches(0) for index in indices]
    epochs = {tuple(seen[start : start + NUM_SAMPLES]) for start in range(0, EPOCHS * NUM_SAMPLES, NUM_SAMPLES)}
    assert len(epochs) > 1


def test_one_rank_and_one_process_train_alike(cluster: Cluster, write: Callable[..., Path]) -> None:
    lines = "def rare():\n    return [1 + index % 3 for index in range(NUM_SAMPLES)]"
    more = "sample_weights=rare, schedule=lambda progress: 1 - progress.fraction, max_grad_norm=0.5, accumulate=3"
    path = write(lines, replaced=f"{more}, max_steps=20")
    done = trained(cluster, path, num_ranks=1, averaging="blocking")
    num_batches = len(done.batches(0))
    state = here(path).run(device="cpu")
    assert done.batches(0)[:num_batches] == done.batches(0)[num_batches:]
    for name, tensor in load_file(done.result.model).items():
        assert torch.equal(state.params[name], tensor)


def test_a_loader_is_refused_before_anything_is_started(
    elche: Callable[..., Command], write: Callable[..., Path]
) -> None:
    replaced = "dataset=lambda: torch.utils.data.DataLoader(Points(), batch_size=4, shuffle=True)"
    done = elche("run", str(write(replaced=replaced)))
    assert done.code == 2
    assert "dataset() returned a DataLoader; return the data set itself" in done.complaint


# How many samples at once


def test_each_device_has_its_batch_size_and_steps_count_in_the_jobs(
    cluster: Cluster, write: Callable[..., Path]
) -> None:
    done = trained(cluster, write(replaced="batch_size={'cpu': 8, 'RTX 3090': 256, '': 24}, drop_last=True"))
    assert {len(indices) for indices in done.batches(0, 1)} == {8}
    assert done.result.committed_samples == (192,) * EPOCHS  # 8 batches of 24
    assert max(done.samples(0, 1).values()) <= EPOCHS


def test_a_function_sees_the_device(write: Callable[..., Path]) -> None:
    path = write(replaced="batch_size=lambda device: 10 if device.device == 'cpu' else 1")
    here(path).run(device="cpu")
    assert {len(indices) for indices in Trained(path, []).batches(0)} == {10}


def test_a_device_that_is_not_named_is_told(elche: Callable[..., Command], write: Callable[..., Path]) -> None:
    done = elche("run", str(write(replaced="batch_size={'RTX 3090': 256}")), "--device", "cpu")
    assert done.code == 2
    assert 'batch_size names no part of "cpu"; give "" for all other devices: \'RTX 3090\'' in done.complaint


MEMORY = """
NUM_CALLS = 0


def limited(model, batch):
    global NUM_CALLS
    NUM_CALLS += 1
    if len(batch[0]) > 30 and NUM_CALLS > {after}:
        raise torch.OutOfMemoryError("it has room for 30 samples")
    return train_step(model, batch)
"""


def test_auto_finds_what_fits_before_training(cluster: Cluster, write: Callable[..., Path]) -> None:
    path = write(MEMORY.format(after=0), replaced="train_step=limited, batch_size='auto'")
    done = trained(cluster, path, num_ranks=1)
    assert done.batches(0)[0] == list(range(25)), "tried: 200 samples, 100, 50, and the first 25"
    assert done.samples(0) - Counter(range(25)) == EVERY_SAMPLE_ONCE_PER_EPOCH
    assert {len(indices) for indices in done.batches(0)} == {25}
    assert done.result.committed_samples == (NUM_SAMPLES,) * EPOCHS


def test_auto_backs_off_when_memory_becomes_short(cluster: Cluster, write: Callable[..., Path]) -> None:
    """The trial and the first batch fit; then a batch goes in parts, and nothing of it counts twice."""
    path = write(MEMORY.format(after=2), replaced="train_step=limited, batch_size='auto', seed=1, epochs=6")
    done = trained(cluster, path)
    assert done.result.committed_samples == (NUM_SAMPLES,) * 6
    for rank in (0, 1):
        sizes = [len(indices) for indices in done.batches(rank)]
        assert sizes[0] == 200  # the trial
        assert all(size <= 30 for size in sizes[2:])
    tried = Counter(dict.fromkeys(range(NUM_SAMPLES), 2))
    assert done.samples(0, 1) - tried == dict.fromkeys(range(NUM_SAMPLES), 6)
    assert "it goes in 8 parts from now on" in log_of(cluster, 0) + log_of(cluster, 1)


def test_a_batch_in_parts_makes_the_step_of_the_whole_batch(write: Callable[..., Path]) -> None:
    whole, parts = (
        here(write(MEMORY.format(after=after), replaced="train_step=limited, batch_size='auto', epochs=30")).run(
            device="cpu"
        )
        for after in (1000, 3)
    )
    for name, tensor in whole.params.items():
        torch.testing.assert_close(parts.params[name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("given", ["{'': 'auto'}", "lambda device: 'auto'"])
def test_auto_for_one_kind_of_device_is_auto(write: Callable[..., Path], given: str) -> None:
    replaced = f"train_step=limited, batch_size={given}, epochs=2"
    here(write(MEMORY.format(after=0), replaced=replaced)).run(device="cpu")


def test_auto_is_refused_where_train_step_steps_itself(write: Callable[..., Path]) -> None:
    with pytest.raises(InvalidJob, match="batch_size 'auto' has no effect with manual_optimization: give a number"):
        here(write(replaced="manual_optimization=True, batch_size='auto'"))


def test_the_evaluation_keeps_to_what_fits(write: Callable[..., Path]) -> None:
    lines = "def eval_step(model, batch):\n    return {'loss': limited(model, batch)}"
    replaced = "train_step=limited, batch_size='auto', epochs=2, eval_dataset=Points, eval_step=eval_step"
    here(write(MEMORY.format(after=0), lines, replaced=replaced)).run(device="cpu")


# Models that change while they train


def test_a_buffer_that_the_first_forward_makes_is_resumed(cluster: Cluster, write: Callable[..., Path]) -> None:
    lazy = """
class Lazy(nn.Linear):
    def forward(self, x):
        if not hasattr(self, "mask"):
            self.register_buffer("mask", torch.ones(1), persistent=False)
        return super().forward(x) * self.mask
"""
    path = write(lazy, replaced="model=lambda: Lazy(4, 1), checkpoint_every_epochs=1, epochs=1")
    trained(cluster, path, num_ranks=1)
    assert cluster.client.resume(cluster.client.jobs()[-1].job_id, epochs=2).result().epochs == 2

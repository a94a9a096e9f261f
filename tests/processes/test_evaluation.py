"""Evaluations that ranks share, the metric that ends a training early, and the best model."""

import dataclasses
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from elche.errors import InvalidJob, JobFailed
from elche.settings import AgreedSettings
from elche_client.events import Checkpoint, EvaluationReport, RoundReport
from elche_worker.model.checkpoint import About, CheckpointData, CheckpointTarget, load
from support.noting import BASE, BATCH_SIZE, NUM_SAMPLES, REPLACE, Trained, here, trained
from support.real_processes import Cluster, eventually
from support.watched import WatchedSimulation, ranks

EVALUATED = """
from elche_worker import this_rank


def eval_step(model, batch):
    x, y, indices = batch
    kind = "evaluated" if this_rank().version else "rehearsed"
    note(kind, indices.tolist(), model.training, torch.is_grad_enabled())
    positive = (model(x) > 0.1).flatten()
    counts = torch.stack([positive.sum(), (~positive).sum()])
    return {"mse": nn.functional.mse_loss(model(x), y), "positive": positive.float().mean(), "counts": counts}


def eval_metrics(sums):
    assert sums["counts"].dtype == torch.int64
    return {"counted": sums["counts"].sum(), "of_sums": sums["counts"][0] / sums["counts"].sum()}
"""


def test_a_shared_evaluation_is_that_of_one_process(cluster: Cluster, write: Callable[..., Path]) -> None:
    replaced = "eval_dataset=lambda: Points(seed=2, size=101), eval_step=eval_step, eval_metrics=eval_metrics"
    done = trained(cluster, write(EVALUATED, replaced=replaced), slow_factors={1: 2.0})
    job = here(done.path)
    model, held_out = job.model(), job.eval_dataset()
    model.load_state_dict(load_file(done.result.model))
    with torch.no_grad():
        predicted = model(held_out.x).double()
    errors = (predicted - held_out.y.double()).square().flatten()
    assert done.result.metrics["mse"] == pytest.approx(float(errors.mean()), rel=1e-6, abs=1e-9)
    for name in ("positive", "of_sums"):
        assert done.result.metrics[name] == pytest.approx(float((predicted > 0.1).double().mean()), abs=1e-6)
    assert {report.metrics["counted"] for report in done.of(EvaluationReport)} == {101.0}

    parts = [done.noted("evaluated", rank) for rank in (0, 1)]
    assert all(parts), "a rank took no part"
    counts = Counter(index for part in parts for indices, _, _ in part for index in indices)
    num_evaluated = len({tuple(report.metrics.items()) for report in done.of(EvaluationReport)})
    assert num_evaluated > 1
    assert counts == dict.fromkeys(range(101), num_evaluated)  # epochs that end in one round share an evaluation
    assert {(training, grad) for part in parts for _, training, grad in part} == {(False, False)}
    rehearsal = [[list(range(16)), False, False], [list(range(16, 31)), False, False]]
    assert [done.noted("rehearsed", rank) for rank in (0, 1)] == [rehearsal] * 2


AVERAGED = """
def take_start(rank, epoch):
    if epoch == 0:
        note("start", rank.model.weight.tolist())

def take_result(model, version):
    note("round", version, model.weight.tolist())

def evaluate(model):
    note("evaluated", model.weight.tolist())
    return {"one": 1.0}
"""


def test_a_moving_average_of_the_weights_is_that_of_the_rounds(cluster: Cluster, write: Callable[..., Path]) -> None:
    """What any rank has evaluated, and the final model: repeated by hand from the rounds' results and samples."""
    path = write(
        AVERAGED,
        replaced="epoch_fn=take_start, after_round=take_result, evaluate=evaluate, ema=0.9, max_anchor=2, epochs=30",
    )
    done = trained(cluster, path, slow_factors={1: 2.0})
    samples = {report.version: report.samples for report in done.of(RoundReport)}
    ((start,),) = done.noted("start", 0)
    mean, means = torch.tensor(start), []
    for version, weight in done.noted("round", 0):
        mean = mean.lerp(torch.tensor(weight), 1 - 0.9 ** (samples[version] / BATCH_SIZE))
        means.append(mean)
    assert len(means) > 3
    assert torch.equal(load_file(done.result.model)["weight"], means[-1])
    evaluated = [torch.tensor(weight) for rank in (0, 1) for (weight,) in done.noted("evaluated", rank)]
    assert len(evaluated) > 0
    assert all(any(torch.equal(one, other) for other in means) for one in evaluated)


def test_the_best_model_so_far_is_the_average_that_was_evaluated(
    cluster: Cluster, write: Callable[..., Path], tmp_path: Path
) -> None:
    path = write(AVERAGED, replaced="evaluate=evaluate, ema=0.9, epochs=100_000, monitor='one'")
    handle = cluster.client.submit(path, num_ranks=1)

    def best() -> list[Checkpoint]:
        (view,) = [one for one in cluster.client.jobs() if one.job_id == handle.id]
        return [one for one in view.checkpoints if one.is_best]

    eventually(best, "a checkpoint is the best")
    fetched = load_file(cluster.client.download(handle.id, tmp_path / "best", best=True))["weight"]
    loaded = load(best()[0].path)
    handle.cancel()
    with pytest.raises(JobFailed, match="cancelled"):
        handle.result()
    assert torch.equal(fetched, loaded.mean["weight"])
    assert not torch.equal(fetched, loaded.weights["weight"])


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
    """Its score rises for some 15 to 30 epochs, and falls from then on."""
    path = tmp_path_factory.mktemp("early") / "train.py"
    replaced = REPLACE.format(f"{MONITORED}, patience=3, epochs=300, keep_checkpoints=1")
    path.write_text("\n".join([BASE, RISE_AND_FALL.replace("40.0", "200.0"), replaced]), encoding="utf-8")
    yield trained(shared_cluster, path)
    shared_cluster.mark.assert_none_left("elche rank")


def best_of(done: Trained) -> EvaluationReport:
    return max(done.of(EvaluationReport), key=lambda report: report.metrics["score"])


def test_training_ends_when_the_metric_has_not_been_better_for_a_while(ended_early: Trained) -> None:
    best, result = best_of(ended_early), ended_early.result
    assert 2 < best.epoch < 100
    num_after = sum(report.epoch > best.epoch for report in ended_early.of(EvaluationReport))
    assert 3 <= num_after < 100  # epochs of milliseconds: some were under way when patience ended
    assert result.ended_early == f"score was not better than {best.metrics['score']:g} in 3 evaluations"
    assert sum(result.committed_samples) < NUM_SAMPLES * 200


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


def score_of(file: Path | str, goal: float = 40.0) -> float:
    """What RISE_AND_FALL's evaluation gives of a saved model."""
    return -abs(load_file(file)["total"].item() - goal)


def test_the_model_of_a_monitored_job_is_the_one_whose_evaluation_is_told(ended_early: Trained) -> None:
    result, best, last = ended_early.result, best_of(ended_early), ended_early.of(EvaluationReport)[-1]
    (marked,) = [one for one in result.checkpoints if one.is_best]
    assert (result.model_is, result.best_epoch) == (f"best of epoch {marked.epoch}", marked.epoch)
    assert (dict(result.best_metrics), dict(result.metrics)) == (best.metrics, last.metrics)
    folder = Path(result.model).parent
    assert score_of(result.model, 200.0) == score_of(folder / "best.safetensors", 200.0) == result.best_metrics["score"]
    assert score_of(folder / "last.safetensors", 200.0) == result.metrics["score"] < result.best_metrics["score"]
    mode = os.stat(folder / "last.safetensors").st_mode
    assert {path.stat().st_mode for path in folder.glob("*.safetensors")} == {mode}


def test_a_job_that_restores_the_last_model_has_the_best_beside_it_to_fetch(
    cluster: Cluster, write: Callable[..., Path], tmp_path: Path
) -> None:
    done = trained(cluster, write(RISE_AND_FALL, replaced=f"{MONITORED}, epochs=12"), restore="last", num_ranks=1)
    result, job_id = done.result, cluster.client.jobs()[-1].job_id
    assert (result.model_is, score_of(result.model)) == ("last", result.metrics["score"])
    best = cluster.client.download(job_id, tmp_path / "best", best=True)
    assert score_of(best) == result.best_metrics["score"] > result.metrics["score"]
    assert score_of(cluster.client.download(job_id, tmp_path / "last")) == result.metrics["score"]


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


@pytest.mark.long(reason="beside those that read it from the folder")
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
        timeout=400,
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
    settings = AgreedSettings(
        dataset_size=403,
        batch_size=16,
        epochs=5,
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
            assert may_go_on.wait(400)
        fsync(handle)

    monkeypatch.setattr(os, "fsync", slowly)
    with ThreadPoolExecutor(1) as slow_rank:
        first = slow_rank.submit(CheckpointTarget(str(tmp_path)).write, "1-00000001", kept, about, {"version": 1})
        assert is_writing.wait(400)
        fast_rank = CheckpointTarget(str(tmp_path))
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

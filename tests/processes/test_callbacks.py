"""What callbacks of a `TrainingJob` are told and when, and what those do that raise or set rates."""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from elche_client.events import EpochReport, EvaluationReport
from elche_worker.model.checkpoint import load
from support.noting import BASE, EPOCHS, EVERY_SAMPLE_ONCE_PER_EPOCH, LR, NUM_SAMPLES, REPLACE, Trained, log_of, trained
from support.real_processes import Cluster

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
    speeds = [metrics["rank_samples_per_s"] for metrics in told]
    assert [tuple(one) for one in speeds] == [pytest.approx(report.rank_samples_per_s) for report in epochs]
    assert sum(sum(metrics["rank_batches"]) for metrics in told) == len(watched.batches(0, 1))
    for metrics in told:
        assert metrics["samples_per_s"] == pytest.approx(NUM_SAMPLES / metrics["duration_s"])
        assert sum(metrics["rank_samples_per_s"]) == pytest.approx(metrics["samples_per_s"])


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
    versions = range(2, watched.result.rounds + 1)  # nothing is trained in the first, which spreads the start
    assert [version for version, _ in seen[0]] == list(versions)
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
    checkpoint = done.result.checkpoints[-1]
    path.with_suffix(".rank-0").unlink()
    path.with_suffix(".rank-1").unlink()
    path.write_text(path.read_text() + "\njob = dataclasses.replace(job, epoch_fn=None, after_round=None)\n")
    again = trained(cluster, path, resume=checkpoint.path, epochs=checkpoint.epoch + 2)
    rates = [rate for rank in (0, 1) for _, rate in again.noted("batch", rank)]
    assert len(rates) > 10
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
    path = write(REPLACING, replaced="epoch_fn=begins, after_round=averaged, schedule=lambda progress: 0.5, epochs=20")
    done = trained(cluster, path)
    rates = [rate for rank in (0, 1) for _, rate in done.noted("batch", rank)]
    assert set(rates) == {LR / 2, LR / 4, LR / 4 * 3}
    assert len(done.noted("round", 0)) > 3, "rounds undo nothing"


def test_the_last_epochs_metrics_are_taken_in_full(cluster: Cluster, write: Callable[..., Path]) -> None:
    slow = "def take(metrics):\n    time.sleep(3.5 * (metrics.epoch == 1))\n    note('taken', metrics.epoch)"
    done = trained(cluster, write(slow, replaced="metrics_fn=take, epochs=2"), num_ranks=1)
    assert done.noted("taken", 0) == [[0], [1]]

"""Checkpoints, going on from them, repeating a recorded cadence, and training that ends before its epochs do."""

import json
from dataclasses import replace
from random import Random

import pytest

from elche.policies import POLICIES
from elche_coordinator.core.messages.commands import SendEpochMetrics, SendOutcome, SendSyncNow
from elche_coordinator.core.messages.events import (
    CheckpointFailed,
    CheckpointRequested,
    CheckpointSaved,
    EpochMetricsTaken,
    EvaluationDone,
    RankReady,
)
from elche_coordinator.core.messages.ids import JobId, Rank
from elche_coordinator.core.messages.reports import Checkpoint, EvaluationReport, Outcome, RoundReport, UserEvent
from elche_coordinator.simulator.simulation import RankModel
from elche_coordinator.simulator.synthetic import Saved
from support.rounds import every_way
from support.watched import ranks, state_of


def written(simulation) -> list[Checkpoint]:
    return [report for report in simulation.reports if isinstance(report, Checkpoint)]


def epoch_of(saved) -> int:
    return json.loads(saved.training)["ledger"]["epoch"]


def ended_here(simulation) -> None:
    """Every living process is killed, as by a power cut; the job's end is not waited for."""
    for process in simulation.processes.values():
        process.is_alive = False


OF_RESUMED = {"epochs": 2, "dataset_size": 6000, "averaging": "blocking", "checkpoint_every_minutes": 0.5 / 60}


def resumed_run(simulate, num_saved: int):
    """The checkpoint from which a run that was killed is resumed, and the recording of the rest."""
    killed = simulate(ranks(5, 12), **OF_RESUMED)
    killed.run_until(lambda: len(killed.saved) == num_saved)
    ended_here(killed)
    saved = list(killed.saved.values())[-1]
    resumed = simulate(ranks(4, 12), **OF_RESUMED, resumed=saved)
    resumed.run()
    return saved, tuple(report.recorded for report in resumed.rounds if report.samples)


# When a round becomes a checkpoint


@every_way
def test_every_second_epoch_is_a_checkpoint(simulate, policy, averaging):
    simulation = simulate(
        ranks(5, 12), epochs=6, dataset_size=600, policy=policy, averaging=averaging, checkpoint_every_epochs=2
    )
    assert simulation.run().outcome is Outcome.SUCCEEDED
    assert [one.epoch for one in written(simulation)] == [2, 4, 6]
    assert simulation.run().checkpoints == tuple(written(simulation)), "three are kept"


def test_a_checkpoint_every_second_of_training(simulate):
    simulation = simulate(ranks(5, 12), dataset_size=20_000, anchor=2, max_anchor=4, checkpoint_every_minutes=1.0 / 60)
    result = simulation.run()
    assert len(written(simulation)) == pytest.approx(result.duration_s, abs=2)


def test_a_checkpoint_on_request_is_the_next_round(simulate):
    simulation = simulate(ranks(5, 12))
    simulation.run_until(lambda: len(simulation.rounds) == 3)
    assert not written(simulation)
    simulation.handle(CheckpointRequested(job_id=JobId("job")))
    simulation.run()
    assert [one.version for one in written(simulation)] == [5]  # round 4 was announced already


@pytest.mark.parametrize(("changes", "num"), [({}, 1), ({"max_steps": 150}, 1), ({"checkpoint_every_epochs": 1}, 3)])
def test_the_end_of_a_training_is_a_checkpoint_however_short_it_was(simulate, changes, num):
    """So that it can be gone on with for more epochs."""
    simulation = simulate(ranks(5, 12), epochs=3, dataset_size=6000, checkpoint_every_minutes=10.0, **changes)
    result = simulation.run()
    assert result.outcome is Outcome.SUCCEEDED
    assert result.checkpoints[-1].version == simulation.training.version
    assert len({one.version for one in result.checkpoints}) == len(result.checkpoints) == num


def test_who_wants_no_checkpoints_has_none_of_the_end_either(simulate):
    assert not simulate(ranks(5, 12), dataset_size=600, checkpoint_every_minutes=None).run().checkpoints


def test_only_the_newest_are_kept_and_the_best(simulate):
    losses = [0.9, 0.2, 0.8, 0.7, 0.6, 0.5]
    simulation = simulate(
        ranks(5, 12),
        epochs=6,
        dataset_size=600,
        has_evaluation=True,
        monitor="loss",
        keep_checkpoints=2,
        evaluate=lambda epoch: {"loss": losses[epoch]},
    )
    kept = simulation.run().checkpoints
    assert [(one.epoch, one.is_best, one.metrics["loss"]) for one in kept] == [
        (2, True, 0.2),
        (5, False, 0.6),
        (6, False, 0.5),
    ]
    assert sorted(one.name for one in simulation.saved.values()) == sorted(one.name for one in kept)


def test_one_that_cannot_be_written_is_counted_and_training_goes_on(simulate):
    simulation = simulate(ranks(5, 12), epochs=3, dataset_size=600, checkpoint_every_epochs=1, checkpoint_ms=1e9)
    simulation.run_until(lambda: bool(simulation.sent(SendOutcome)) and len(simulation.epochs) == 1)
    order = next(c for c in simulation.sent(SendOutcome) if c.checkpoint is not None)
    failed = {"job_id": "job", "rank": order.rank, "incarnation": order.incarnation, "version": order.version}
    simulation.handle(CheckpointFailed(**failed, reason="no space"))
    simulation.handle(CheckpointFailed(**failed, reason="no space"))
    assert simulation.training.checkpoints.num_failures == 1
    simulation.run_until(lambda: len(simulation.epochs) == 3)


def test_the_first_that_cannot_be_written_is_told_with_its_reason_and_host(simulate):
    """One line until one is written again: while a disk is full there may be one that fails each minute."""
    simulation = simulate(ranks(5), epochs=6, dataset_size=600, checkpoint_every_epochs=1, checkpoint_ms=1e9)

    def told_after(number: int) -> list[str]:
        """Has the writer save the checkpoint of this number if it is the third, and else fail."""
        simulation.run_until(lambda: len(orders()) > number)
        order = orders()[number]
        address = {"job_id": "job", "rank": order.rank, "incarnation": order.incarnation, "version": order.version}
        saved = CheckpointSaved(**address, path="/c/2", size_bytes=1, duration_s=0.1)
        failed = CheckpointFailed(**address, reason=f"/c/{number} cannot be written: no space")
        simulation.handle(saved if number == 2 else failed)
        return [one.text for one in simulation.reports if isinstance(one, UserEvent)]

    def orders() -> list[SendOutcome]:
        return [one for one in simulation.sent(SendOutcome) if one.checkpoint is not None]

    told = [told_after(number) for number in range(4)]
    host = simulation.job.ranks[0].host
    words = (
        f"cannot be written: no space, on {host}: training goes on, and would go back further if its ranks were lost"
    )
    first, second = f"/c/0 {words}", f"/c/3 {words}"
    assert told == [[first], [first], [first], [first, second]]


def test_a_rank_is_never_given_a_third_to_write(simulate):
    simulation = simulate(ranks(5), epochs=6, dataset_size=600, checkpoint_every_epochs=1, checkpoint_ms=1e6)
    simulation.run_until(lambda: len(simulation.epochs) == 6)
    assert sum(command.checkpoint is not None for command in simulation.sent(SendOutcome)) == 2
    assert simulation.training.checkpoints.num_failures == 4


# Going on from one


@every_way
@pytest.mark.parametrize("seed", range(6))
def test_everything_dies_at_any_moment_and_goes_on(simulate, policy, averaging, seed):
    """Every sample of every epoch is in the final parameters once, whatever died when, at any world size."""
    random = Random(seed)
    options = {
        "dataset_size": random.choice([403, 1000]),
        "epochs": 3,
        "policy": policy,
        "averaging": averaging,
        "drop_last": random.random() < 0.3,
        "checkpoint_every_minutes": 0.2 / 60,
        "has_evaluation": True,
        "max_batch_diff": random.choice([None, 5]),
    }
    resumed, attempts = None, 0
    while True:
        batch_ms = [random.uniform(2, 20) for _ in range(random.randint(1, 4))]
        simulation = simulate(ranks(*batch_ms), **options, resumed=resumed)
        attempts += 1
        until_s = random.uniform(0.3, 3.0) if attempts < 6 else 1e9
        simulation.run_until(lambda: simulation.job.result is not None or simulation.clock.now_s > until_s)  # noqa: B023
        if simulation.job.result is not None:
            break
        ended_here(simulation)
        resumed = max(simulation.saved.values(), key=lambda one: one.name, default=resumed)
    assert simulation.job.result.outcome is Outcome.SUCCEEDED, simulation.job.reason
    simulation.assert_exactly_once()
    assert simulation.job.attempt == 1 + (json.loads(resumed.training)["attempt"] if resumed else 0)


def first_checkpoint(simulate, **options):
    simulation = simulate(ranks(5, 12), epochs=2, dataset_size=600, checkpoint_every_epochs=1, **options)
    simulation.run_until(lambda: bool(simulation.saved))
    ended_here(simulation)
    return next(iter(simulation.saved.values()))


def test_versions_batches_and_epochs_go_on(simulate):
    saved = first_checkpoint(simulate)
    training = json.loads(saved.training)
    simulation = simulate(ranks(5, 12), epochs=2, dataset_size=600, resumed=saved)
    result = simulation.run()
    assert [report.epoch for report in simulation.epochs] == [1]
    assert simulation.rounds[0].version == training["version"] + 1
    assert simulation.training.global_step == 120, "some of the second epoch may be in the checkpoint"
    assert result.epochs == 2


def test_an_evaluation_that_was_owed_is_made_after_all(simulate):
    saved = first_checkpoint(simulate, has_evaluation=True)
    simulation = simulate(ranks(5, 12), epochs=2, dataset_size=600, has_evaluation=True, resumed=saved)
    simulation.run()
    assert [report.epoch for report in simulation.evaluations] == [0, 1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dataset_size": 599}, "whose dataset_size is 600, and the job's is 599"),
        ({"seed": 7}, "whose seed is 0, and the job's is 7"),
        ({"epochs": 1}, "training that is complete; give more epochs"),
    ],
)
def test_a_checkpoint_of_another_training_is_refused(simulate, changes, message):
    saved = first_checkpoint(simulate)
    settings = {"dataset_size": 600, "epochs": 2} | changes
    simulation = simulate(ranks(5, 12), resumed=saved, **settings)
    if "epochs" in changes:
        simulation.start()
        simulation.job.run._spec = replace(simulation.job.spec, resume="runs/a/1")
    result = simulation.run()
    assert result.outcome is Outcome.FAILED
    assert message in result.error
    assert result.invalid


def test_ranks_that_have_read_different_checkpoints_do_not_train(simulate):
    saved = first_checkpoint(simulate)
    simulation = simulate(ranks(5, 12), epochs=2, dataset_size=600, resumed=saved)
    tell = simulation.handle

    def tell_of_another(event):
        if isinstance(event, RankReady) and event.rank == 1:
            event = replace(event, resumed=json.dumps(json.loads(event.resumed) | {"version": 1}))
        tell(event)

    simulation.handle = tell_of_another
    result = simulation.run()
    assert (result.outcome, result.invalid) == (Outcome.FAILED, True)
    assert "the ranks have read different checkpoints" in result.error


@pytest.mark.parametrize("text", ["[]", "{}", '{"attempt": 1}', '{"attempt": 1, "dataset_size": 4000}', "nonsense"])
def test_a_checkpoint_whose_training_is_not_whole_is_refused(simulate, text):
    saved = first_checkpoint(simulate)
    object.__setattr__(saved, "training", text)
    simulation = simulate(ranks(5, 12), resumed=saved)
    result = simulation.run()
    assert result.outcome is Outcome.FAILED
    assert result.invalid


# Repeating a recorded cadence


@every_way
def test_a_recorded_cadence_is_repeated_exactly(simulate, policy, averaging):
    options = {"epochs": 2, "dataset_size": 1203, "policy": policy, "averaging": averaging}
    first = simulate(ranks(5, 12, 40, jitter=0.3), **options)
    first.run()
    recorded = [report.recorded for report in first.rounds if report.samples]
    again = simulate(ranks(31, 7, 9, jitter=0.2), **options, replay=tuple(recorded), sync_ms=90.0)
    again.run()
    repeated = [report.recorded for report in again.rounds if report.samples]
    is_overlapped = averaging == "overlapped"
    assert [_what(one, is_overlapped) for one in repeated] == [_what(one, is_overlapped) for one in recorded]


@every_way
@pytest.mark.parametrize("num_rounds", [1, pytest.param(2, marks=pytest.mark.long(reason="1 and 5 are shown")), 5])
def test_a_job_whose_recording_was_cut_short_goes_on_after_it(simulate, policy, averaging, num_rounds):
    """A run that was interrupted has recorded its first rounds, and results that batches of later ones came before."""
    size = 1000 if policy == "sync" else 6000  # it has a round for each batch
    options = {"epochs": 2, "dataset_size": size, "policy": policy, "averaging": averaging, "sync_ms": 60.0}
    first = simulate(ranks(5, 12, jitter=0.3), **options)
    first.run()
    recorded = [report.recorded for report in first.rounds if report.samples]
    assert len(recorded) > num_rounds
    again = simulate(ranks(31, 7, jitter=0.2), **options, replay=tuple(recorded[:num_rounds]))
    result = again.run()
    assert (result.outcome, result.committed_samples) == (Outcome.SUCCEEDED, (size, size))
    repeated = [report.recorded for report in again.rounds if report.samples]
    is_overlapped = averaging != "blocking"
    before_last = num_rounds - 1
    assert [_what(one, is_overlapped) for one in repeated[:before_last]] == [
        _what(one, is_overlapped) for one in recorded[:before_last]
    ]
    assert _what(repeated[before_last], False) == _what(recorded[before_last], False)


def _what(recorded, is_overlapped):
    """What is trained, and when a result is applied; a blocking rank applies it at once."""
    return [(part.slices, part.num_batches, part.newer_batches if is_overlapped else 0) for part in recorded.parts]


@pytest.mark.parametrize("epoch", [0, 1])
def test_a_resumed_job_repeats_the_rest_of_a_recording(simulate, epoch):
    options = {"epochs": 2, "dataset_size": 6000, "averaging": "blocking", "checkpoint_every_minutes": 0.5 / 60}
    first = simulate(ranks(5, 12), **options)
    first.run()
    recorded = tuple(report.recorded for report in first.rounds)
    killed = simulate(ranks(6, 11), **options, replay=recorded)
    killed.run_until(lambda: len(killed.saved) >= 2 and epoch_of(list(killed.saved.values())[-1]) == epoch)
    ended_here(killed)
    again = simulate(ranks(6, 11), **options, replay=recorded, resumed=list(killed.saved.values())[-1])
    again.run()
    rest = [report.recorded.parts for report in again.rounds if report.samples]
    everything = [report.recorded.parts for report in first.rounds if report.samples]
    assert 0 < len(rest) < len(everything)
    assert [[p.slices for p in parts] for parts in rest] == [
        [p.slices for p in parts] for parts in everything[-len(rest) :]
    ]


def test_the_recording_of_a_resumed_job_begins_at_its_checkpoint(simulate):
    """It was refused as another job's: `elche replay` repeated no run that `elche resume` had begun."""
    saved, recorded = resumed_run(simulate, num_saved=2)
    again = simulate(ranks(4, 12), **OF_RESUMED, resumed=saved, replay=recorded)
    again.run()
    rest = [report.recorded for report in again.rounds if report.samples]
    assert [_what(one, False) for one in rest] == [_what(one, False) for one in recorded]


@pytest.mark.parametrize("epoch", [0, 1])
def test_a_replay_of_a_resumed_job_that_resumes_repeats_the_rest(simulate, epoch):
    """The samples before its recording counted as recorded rounds, so that it was refused as another job's."""
    saved, recorded = resumed_run(simulate, num_saved=1)
    replay = simulate(ranks(4, 12), **OF_RESUMED, resumed=saved, replay=recorded)
    replay.run_until(lambda: bool(replay.saved) and epoch_of(list(replay.saved.values())[-1]) == epoch)
    ended_here(replay)
    newest = list(replay.saved.values())[-1]
    again = simulate(ranks(4, 12), **OF_RESUMED, resumed=newest, replay=recorded)
    again.run()
    rest = [_what(report.recorded, False) for report in again.rounds if report.samples]
    num_left = 12000 - json.loads(newest.training)["samples"]
    assert sum(one.size for parts in rest for slices, *_ in parts for one in slices) == num_left
    assert rest == [_what(one, False) for one in recorded][-len(rest) :]


def test_a_recording_of_another_job_is_refused(simulate):
    first = simulate(ranks(5, 12))
    first.run()
    recorded = tuple(report.recorded for report in first.rounds)
    too_few = simulate(ranks(5), replay=recorded).run()
    assert "the recording has 2 ranks, and the job has 1" in too_few.error
    other = simulate(ranks(5, 12), dataset_size=100, replay=recorded).run()
    assert other.outcome is Outcome.FAILED
    assert "does not fit the job" in other.error


# Evaluation by all ranks, and training that ends early


def test_all_ranks_evaluate_as_much_as_they_are_fast(simulate):
    simulation = simulate(ranks(5, 15), epochs=3, has_evaluation=True, eval_size=400)
    simulation.run()
    parts = [command for command in simulation.sent(SendOutcome) if command.evaluate is not None]
    assert len(parts) == 6
    for first, second in zip(parts[::2], parts[1::2], strict=True):
        assert (first.evaluate.offset, second.evaluate.offset) == (0, first.evaluate.size)
        assert first.evaluate.size + second.evaluate.size == 400
        assert first.evaluate.size == pytest.approx(300, abs=20)
    assert [report.epoch for report in simulation.evaluations] == [0, 1, 2]


def test_training_ends_when_it_does_not_get_better(simulate):
    losses = [0.9, 0.5, 0.6, 0.55, 0.7, 0.4, 0.3]
    simulation = simulate(
        ranks(5, 12),
        epochs=7,
        dataset_size=600,
        has_evaluation=True,
        monitor="loss",
        patience=2,
        evaluate=lambda epoch: {"loss": losses[epoch]},
    )
    simulation.run_until(lambda: simulation.job.result is not None)
    result = simulation.job.result
    assert result.outcome is Outcome.SUCCEEDED
    assert result.ended_early == "loss was not better than 0.5 in 2 evaluations"
    assert result.epochs in (4, 5)
    assert [one.epoch for one in result.checkpoints if one.is_best] == [2]
    simulation.assert_exactly_once()


def test_a_metric_that_is_not_there_fails_the_job(simulate):
    simulation = simulate(
        ranks(5, 12), has_evaluation=True, monitor="acc", evaluate=lambda epoch: {"loss": 1.0, "f1": 0.5}
    )
    result = simulation.run()
    assert result.outcome is Outcome.FAILED
    assert result.error.startswith("the evaluation gives no metric 'acc', which monitor names; it gives f1, loss: ")


@every_way
@pytest.mark.parametrize("max_steps", [1, 37, 60, 61, 100])
def test_training_ends_after_so_many_batches(simulate, policy, averaging, max_steps):
    simulation = simulate(
        ranks(5, 12), epochs=9, dataset_size=600, policy=policy, averaging=averaging, max_steps=max_steps
    )
    simulation.run_until(lambda: simulation.job.result is not None)
    assert sum(simulation.job.result.committed_samples) == 10 * max_steps
    simulation.assert_exactly_once()


def test_rank_0_hears_of_every_epoch_once_in_order_with_its_metrics(simulate):
    simulation = simulate(
        ranks(15, 5),
        epochs=4,
        dataset_size=300,
        has_evaluation=True,
        wants_metrics=True,
        evaluate=lambda epoch: {"loss": float(epoch)},
    )
    simulation.run()
    told = simulation.sent(SendEpochMetrics)
    assert [(one.rank, one.report.epoch, one.metrics) for one in told] == [
        (0, epoch, {"loss": float(epoch)}) for epoch in range(4)
    ]


@pytest.mark.parametrize("has_evaluation", [True, False])
def test_a_training_that_goes_on_tells_of_the_epoch_that_nobody_had_heard_of_at_the_checkpoint(
    simulate, has_evaluation
):
    """What the callback keeps is in the checkpoint as it was before that; its figures are of before, too."""
    options = {"epochs": 3, "dataset_size": 600, "checkpoint_every_epochs": 1, "wants_metrics": True}
    first = simulate(ranks(15, 5), has_evaluation=has_evaluation, **options)
    first.run()
    again = simulate(ranks(15, 5), has_evaluation=has_evaluation, **options)
    again.resumed = next(iter(first.saved.values()))
    again.run()
    before, told = first.sent(SendEpochMetrics)[0], again.sent(SendEpochMetrics)
    assert [(one.rank, one.report.epoch, one.report.attempt) for one in told] == [(0, 0, 2), (0, 1, 2), (0, 2, 2)]
    assert replace(told[0].report, attempt=1) == before.report
    assert bool(told[0].metrics) == has_evaluation


@every_way
def test_checkpoints_of_a_job_that_keeps_a_state_are_of_the_rank_that_hears_of_epochs(simulate, policy, averaging):
    """Whatever it is not: the fastest. So what the callback keeps is in them, also when another has that part."""
    simulation = simulate(
        ranks(15, 5, 9), epochs=4, dataset_size=900, policy=policy, averaging=averaging,
        checkpoint_every_epochs=1, wants_metrics=True, keeps_state=True,
    )  # fmt: skip
    simulation.run_until(lambda: len(written(simulation)) == 2)
    simulation.kill(Rank(0))
    simulation.run()
    orders = [(one.rank, one.checkpoint.name) for one in simulation.sent(SendOutcome) if one.checkpoint is not None]
    hears = {one.rank for one in simulation.sent(SendEpochMetrics)}
    assert len(orders) >= 4
    assert {rank for rank, _ in orders} <= hears
    assert [rank for rank, _ in orders[:2]] == [0, 0]


def test_an_epoch_that_the_callback_has_had_is_not_told_again(simulate):
    options = {"epochs": 3, "dataset_size": 6000, "wants_metrics": True}
    first = simulate(ranks(5, 5), **options)
    first.run_until(lambda: first.events(EpochMetricsTaken) and first.training.ledger.epoch == 1)
    saved = Saved("one", first.processes[Rank(0)].parameters, json.dumps(first.training.snapshot()))
    again = simulate(ranks(5, 5), **options)
    again.resumed = saved
    again.run()
    assert [one.report.epoch for one in again.sent(SendEpochMetrics)] == [1, 2]


# Batches of different sizes, and shards


@every_way
def test_ranks_with_batches_of_their_own_size_arrive_together(simulate, policy, averaging):
    models = [RankModel(batch_ms=20.0, batch_size=64), RankModel(batch_ms=10.0, batch_size=8)]
    size = 10_003 if policy == "sync" else 40_003
    simulation = simulate(models, dataset_size=size, batch_size=32, policy=policy, averaging=averaging, epochs=2)
    result = simulation.run()
    assert result.outcome is Outcome.SUCCEEDED
    simulation.assert_exactly_once()
    if policy == "cadence":
        assert result.bound_fraction > 0.95
        share = result.ranks[0].batches * 64 / (result.ranks[0].batches * 64 + result.ranks[1].batches * 8)
        assert share == pytest.approx(0.8, abs=0.02)


@every_way
def test_ranks_read_shards_to_their_ends(simulate, policy, averaging):
    sizes = tuple(Random(3).randint(1, 400) for _ in range(40))
    simulation = simulate(
        ranks(5, 12, 7), dataset_size=sum(sizes), shard_sizes=sizes, epochs=2, policy=policy, averaging=averaging
    )
    assert simulation.run().outcome is Outcome.SUCCEEDED
    simulation.assert_exactly_once()
    if policy == "sync":
        return
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    readers: dict[tuple[int, int], set[int]] = {}
    for report in simulation.rounds:
        for rank, part in enumerate(report.recorded.parts):
            for piece in part.slices:
                shard = max(index for index, start in enumerate(starts) if start <= piece.offset)
                assert piece.offset + piece.size <= starts[shard] + sizes[shard], "a slice lies in one shard"
                readers.setdefault((piece.epoch, shard), set()).add(rank)
    shared = sum(len(read_by) > 1 for read_by in readers.values())
    assert shared < len(readers) * 0.25, "most shards are read by one rank alone"


def test_shards_come_in_another_order_in_every_epoch(simulate):
    sizes = (100,) * 20
    simulation = simulate(ranks(5), dataset_size=2000, shard_sizes=sizes, epochs=2)
    simulation.run()
    pieces = [piece for report in simulation.rounds for piece in report.recorded.parts[0].slices]
    orders = [[p.offset // 100 for p in pieces if p.epoch == epoch and p.offset % 100 == 0] for epoch in (0, 1)]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(20))
    assert orders[0] != orders[1] != list(range(20))


# Fences


def test_old_news_of_checkpoints_and_evaluations_changes_nothing(simulate):
    simulation = simulate(ranks(5, 12), epochs=2, has_evaluation=True, checkpoint_every_epochs=1)
    simulation.run_until(lambda: len(simulation.rounds) == 3)
    record = simulation.job.ranks[Rank(1)]
    before = state_of(simulation.job)
    address = record.address
    simulation.handle(CheckpointFailed(**address, version=3, reason="?"))
    simulation.handle(EvaluationDone(**address, epoch=0, sums={"a": (1.0, 1)}, duration_ms=1.0))
    assert state_of(simulation.job) == before
    assert isinstance(simulation.rounds[0], RoundReport)
    assert simulation.sent(SendSyncNow)


def test_a_metric_that_is_never_a_number_ends_training_with_a_reason(simulate):
    simulation = simulate(
        ranks(5, 12),
        epochs=9,
        dataset_size=300,
        has_evaluation=True,
        monitor="loss",
        patience=2,
        evaluate=lambda epoch: {"loss": float("nan")},
    )
    simulation.run_until(lambda: simulation.job.result is not None)
    assert simulation.job.result.ended_early == "loss was not a finite number in 2 evaluations"


def test_the_best_epoch_has_a_checkpoint_however_slow_the_disk_is(simulate):
    losses = [0.9, 0.8, 0.1, 0.7, 0.6]
    simulation = simulate(
        ranks(5),
        epochs=5,
        dataset_size=300,
        has_evaluation=True,
        monitor="loss",
        keep_checkpoints=1,
        checkpoint_ms=1e4,
        evaluate=lambda epoch: {"loss": losses[epoch]},
    )
    assert [one.epoch for one in simulation.run().checkpoints if one.is_best] == [3]


def test_what_max_steps_left_of_an_epoch_is_trained_when_the_job_goes_on(simulate):
    options = {"dataset_size": 600, "epochs": 2, "checkpoint_every_epochs": 1}
    first = simulate(ranks(5, 12), **options, max_steps=40)
    first.run_until(lambda: first.job.result is not None)
    assert first.job.result.committed_samples == (400,)
    again = simulate(ranks(5, 12), **options, resumed=next(iter(first.saved.values())))
    again.run_until(lambda: again.job.result is not None)
    assert again.job.result.committed_samples == (600, 600)
    again.assert_exactly_once()


def test_an_epoch_that_max_steps_had_cut_short_is_not_evaluated_before_its_end(simulate):
    """It was, with the first result of the training that went on, as if it were complete."""
    options = {"dataset_size": 600, "epochs": 2, "checkpoint_every_epochs": 1, "has_evaluation": True}
    first = simulate(ranks(5, 12), **options, max_steps=40)
    first.run_until(lambda: bool(first.saved))
    (saved,) = first.saved.values()
    again = simulate(ranks(5, 12), **options, resumed=saved)
    again.run()
    assert [report.epoch for report in again.evaluations] == [0, 1]


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_reported_of_a_training_that_ended_early_is_what_is_saved(simulate, policy):
    """Ranks trained on into the next epoch, and the accuracy that was told was that of an older model."""
    simulation = simulate(
        ranks(5, 12),
        policy=policy,
        epochs=20,
        dataset_size=500,
        has_evaluation=True,
        monitor="version",
        patience=2,
    )
    simulation.run_until(lambda: simulation.job.result is not None)
    result = simulation.job.result
    assert result.ended_early
    assert result.metrics == {"version": float(result.rounds)}
    told = [report for report in simulation.reports if isinstance(report, EvaluationReport)]
    assert [report.is_final for report in told] == [False] * (len(told) - 1) + [True]


@pytest.mark.parametrize("max_steps", [7, 50, 73])
def test_a_training_that_max_steps_ends_within_an_epoch_is_evaluated_at_its_end(simulate, max_steps):
    simulation = simulate(ranks(5, 12), epochs=20, dataset_size=500, has_evaluation=True, max_steps=max_steps)
    simulation.run_until(lambda: simulation.job.result is not None)
    result = simulation.job.result
    assert result.outcome is Outcome.SUCCEEDED
    assert result.metrics == {"version": float(result.rounds)}

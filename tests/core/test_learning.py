"""What committed rounds teach: the pace of each rank, what an averaging costs, and what is told of it."""

import json
from dataclasses import replace

import pytest

from elche.settings import AgreedSettings
from elche_coordinator.core.messages.commands import SendOutcome, SendSyncNow
from elche_coordinator.core.messages.events import (
    BatchesTrained,
    EpochMetricsTaken,
    Event,
    GroupFormed,
    ResultReceived,
    RoundEntered,
)
from elche_coordinator.core.messages.ids import AgentId, Incarnation, JobId, Rank
from elche_coordinator.core.messages.reports import EpochReport, Outcome, UserEvent
from elche_coordinator.core.messages.spec import EpochWork, HeaderRow
from elche_coordinator.core.pacing.asynchronous import Async
from elche_coordinator.core.pacing.cadence import Cadence
from elche_coordinator.core.records.machine import JobPhase, RankPhase
from elche_coordinator.core.records.ranks import RankRecord
from elche_coordinator.core.results.tally import EpochTally, Mark, bound_samples_per_s
from elche_coordinator.core.results.training import MAX_DISCARDED
from elche_coordinator.simulator.simulation import RankModel
from elche_coordinator.simulator.synthetic import Saved
from support.rounds import numbered
from support.watched import LONG_ROUNDS, WatchedSimulation, ranks


class Told(WatchedSimulation):
    """Ranks whose words the test changes on their way: `changed` gives the event that arrives, or None."""

    @staticmethod
    def changed(event: Event) -> Event | None:
        """As it is."""
        return event

    def handle(self, event: Event) -> None:
        """Gives the core what arrives."""
        arrived = self.changed(event)
        if arrived is not None:
            super().handle(arrived)


def told(*batch_ms: float, sync_ms: float = 5.0, **changes: object) -> Told:
    options = {"dataset_size": 4_000, "batch_size": 10, "epochs": 1, "policy": "cadence"} | LONG_ROUNDS | changes
    return Told(settings=AgreedSettings(**options), ranks=ranks(*batch_ms), sync_ms=sync_ms)


# The pace


def test_a_device_that_waits_for_its_data_is_as_slow_as_it_is():
    """Both compute a batch in 5 ms, and rank 1 waits 10 ms for each: El Che's speeds are of both."""

    def waits(event):
        if isinstance(event, BatchesTrained) and event.rank == 1:
            return replace(event, data_wait_ms=10.0 * event.local_step)
        return event

    simulation = told(5, 5)
    simulation.changed = waits
    simulation.run_until(lambda: len(simulation.rounds) == 6)
    assert simulation.training.policy._el_che.ms_per_batch == pytest.approx([5.0, 15.0], rel=0.01)


def test_a_wait_of_one_round_is_no_slowness_in_the_next():
    def waits(event):
        if isinstance(event, BatchesTrained) and event.rank == 1:
            return replace(event, data_wait_ms=200.0)  # once, before the first batch
        return event

    simulation = told(5, 5)
    simulation.changed = waits
    simulation.run()
    assert simulation.training.policy._el_che.ms_per_batch == pytest.approx([5.0, 5.0], rel=0.01)


# What an averaging costs


@pytest.mark.parametrize("kind", [Cadence, Async])
@pytest.mark.parametrize(("target", "anchor"), [(0.10, 20), (0.25, 10), (0.05, 40)])
def test_rounds_are_as_long_as_the_jobs_overhead_target_asks(kind, target, anchor):
    """An averaging takes 20 % of a round of 10 batches."""
    settings = AgreedSettings(
        dataset_size=9, batch_size=1, epochs=1, policy="cadence", anchor=10, overhead_target=target
    )
    policy = kind(settings, [Rank(0), Rank(1)])
    policy.learn(numbered(100.0, 100.0), numbered(10, 10), 20.0)
    assert policy.anchor == anchor


def test_the_jobs_anchors_are_el_ches():
    settings = AgreedSettings(
        dataset_size=9, batch_size=1, epochs=1, policy="cadence", anchor=7, max_anchor=12, overhead_target=0.1
    )
    policy = Cadence(settings, [Rank(0), Rank(1)])
    assert policy.anchor == 7
    policy.learn(numbered(70.0, 70.0), numbered(7, 7), 1000.0)
    assert policy.anchor == 12
    for _ in range(20):
        policy.learn(numbered(70.0, 70.0), numbered(7, 7), 0.001)
    assert policy.anchor == 7


def stalls(*stalled_ms: float):
    """Ranks that say how long each round has kept them from training."""

    def changed(event):
        if isinstance(event, ResultReceived):
            return replace(event, stalled_ms=stalled_ms[event.rank], collective_ms=400.0)
        return event

    return changed


def test_an_averaging_beside_which_ranks_train_costs_what_it_kept_them_from():
    """It lasts 400 ms, and nobody waits for it: rounds stay short."""
    simulation = told(5, 5, anchor=4)
    simulation.changed = stalls(0.0, 0.0)
    simulation.run()
    assert {report.anchor for report in simulation.rounds} == {4}
    assert {report.sync_ms for report in simulation.rounds[1:]} == {400.0}


def test_who_waits_for_the_slowest_does_not_make_averaging_dear():
    """Rank 0 came early and waited 300 ms; rank 1 waited for nobody."""
    simulation = told(5, 5, anchor=4)
    simulation.changed = stalls(300.0, 0.1)
    simulation.run()
    assert {report.anchor for report in simulation.rounds} == {4}
    assert {report.rank_waited_ms for report in simulation.rounds[1:]} == {(300.0, 0.1)}


# What is told of it


def test_what_was_left_out_of_an_average_is_told():
    """Rank 1's part of the third round was not finite."""

    def loses(event):
        if isinstance(event, ResultReceived) and event.round == 3:
            header = list(event.header)
            header[1] = replace(header[1], finite=False)
            return replace(event, header=tuple(header))
        return event

    simulation = told(5, 5, nonfinite="skip")
    simulation.changed = loses
    result = simulation.run()
    assert result.outcome is Outcome.SUCCEEDED
    lost = simulation.rounds[2].recorded.parts[1]
    assert result.discarded_samples == sum(piece.size for piece in lost.slices) > 0


@pytest.mark.parametrize(("outliers", "num_told"), [("skip", 2), ("keep", 0)])
def test_whose_step_is_far_too_long_is_named(outliers, num_told):
    """Rank 1's parts of the third, fourth and sixth round: it is told of once for each time that it begins."""

    def is_long(event):
        if isinstance(event, ResultReceived) and event.round in (3, 4, 6):
            first, second = event.header
            return replace(event, header=(first, replace(second, unusual=True)))
        return event

    simulation = told(5, 5, outliers=outliers)
    simulation.changed = is_long
    result = simulation.run()
    assert result.outcome is Outcome.SUCCEEDED
    lost = [piece.size for at in (2, 3, 5) for piece in simulation.rounds[at].recorded.parts[1].slices]
    assert result.discarded_samples == (sum(lost) if outliers == "skip" else 0)
    events = [report for report in simulation.reports if isinstance(report, UserEvent)]
    assert [event.rank for event in events] == [1] * num_told
    assert all("its step is far longer than its steps before" in event.text for event in events)


def skipping(is_skipped, **settings):
    """A job in which ranks skip those batches whose number in the job, from 0, is so."""
    seen = []

    def skips(event):
        if not isinstance(event, ResultReceived):
            return event
        told = []
        for work in event.work:
            numbers = range(len(seen), len(seen) + work.num_batches)
            seen.extend(numbers)
            num = sum(map(is_skipped, numbers))
            told.append(replace(work, num_batches=work.num_batches - num, num_skipped=num))
        return replace(event, work=tuple(told))

    simulation = told(5, 5, **settings)
    simulation.changed = skips
    return simulation, simulation.run()


def test_batches_that_were_skipped_are_told_once_with_their_epoch_and_their_samples_count():
    simulation, result = skipping(lambda number: number in (7, 8, 9), epochs=2)
    assert result.outcome is Outcome.SUCCEEDED
    assert result.committed_samples == (4_000, 4_000)
    (event,) = [report for report in simulation.reports if isinstance(report, UserEvent)]
    assert event.text == "skipped 3 batches in epoch 1: collate_fn or the data set gave None for them"


def test_an_epoch_of_which_nothing_was_trained_fails_the_job():
    """A filter that keeps nothing is a mistake: the model would be the initial one, and the job a success."""
    _, result = skipping(lambda number: True, epochs=2)
    assert result.outcome is Outcome.FAILED
    assert result.error == "nothing was trained in epoch 1: collate_fn or the data set gave None for every batch"


def test_a_later_epoch_of_which_nothing_was_trained_is_told_and_fails_nothing():
    """It may be the stump of a shard, after days of training."""
    simulation, result = skipping(lambda number: False, epochs=2)
    num_batches = sum(simulation.job.work_done().values())
    simulation, result = skipping(lambda number: number >= num_batches // 4, epochs=2)
    assert result.outcome is Outcome.SUCCEEDED
    *_, event = [report for report in simulation.reports if isinstance(report, UserEvent)]
    assert event.text.endswith(" in epoch 2: collate_fn or the data set gave None for them")
    assert [report.loss for report in simulation.reports if isinstance(report, EpochReport)][1] is None


def test_what_was_skipped_of_an_epoch_is_known_after_a_checkpoint():
    tally = EpochTally()
    tally.add(Rank(1), EpochWork(epoch=0, num_batches=0, num_samples=8, loss_sum=0.0, num_skipped=2))
    again = EpochTally.from_json(json.loads(json.dumps(tally.to_json())))
    assert again.notice_of_skipped(0) == tally.notice_of_skipped(0)
    assert again.is_all_skipped


def left_out_of(*rounds, **settings):
    """A job of which rank 1's parts of these rounds are left out: they are far too long, or not finite."""

    def is_out(event):
        if not isinstance(event, ResultReceived):
            return event
        first, second = event.header
        if event.round in rounds:
            is_finite = settings.get("nonfinite") != "skip"
            second = replace(second, finite=is_finite, unusual=is_finite)
        return replace(event, header=(first, second))

    simulation = told(5, 5, **settings)
    simulation.changed = is_out
    return simulation, simulation.run()


@pytest.mark.parametrize(
    ("settings", "why"),
    [({}, "its step is far longer than its steps before"), ({"nonfinite": "skip"}, "its parameters are not finite")],
)
def test_a_rank_that_is_left_out_again_and_again_fails_the_job_by_name(settings, why):
    """It would train in vain. The round that leaves it out once too often is not committed."""
    rounds = range(4, 4 + MAX_DISCARDED)
    simulation, result = left_out_of(*rounds, **settings)
    assert result.outcome is Outcome.FAILED
    assert f"rank 1 was left out of {MAX_DISCARDED} averages in a row" in result.error
    assert why in result.error
    assert [report.round for report in simulation.rounds] == [1, 2, 3, 4, 5]


def test_a_rank_that_is_left_out_now_and_then_goes_on():
    _, result = left_out_of(3, 4, 6, 7, 9, 10)
    assert result.outcome is Outcome.SUCCEEDED


def test_ranks_are_told_how_many_batches_all_have_made():
    simulation = told(5, 12)
    simulation.run()
    expected = 0
    outcomes = simulation.sent(SendOutcome, rank=0)
    for report, outcome in zip(simulation.rounds, outcomes, strict=True):
        expected += sum(report.rank_batches)
        assert outcome.global_step == expected
    assert expected == 400


def test_one_rank_writes_the_final_model():
    simulation = told(5, 12)
    simulation.run()
    assert [command.rank for command in simulation.sent(SendOutcome) if command.save_final] == [0]


def test_one_rank_writes_each_checkpoint():
    simulation = told(5, 12, epochs=3, checkpoint_every_epochs=1)
    simulation.run()
    orders = [command for command in simulation.sent(SendOutcome) if command.checkpoint is not None]
    assert len(orders) == 3
    assert len({order.version for order in orders}) == 3


def test_a_recording_says_how_many_newer_batches_ranks_had_made():
    simulation = told(5, 12, averaging="overlapped", sync_ms=40.0)
    simulation.run()
    acks = {(event.round, event.rank): event.newer_batches for event in simulation.events(ResultReceived)}
    recorded = {
        (report.round, rank): part.newer_batches
        for report in simulation.rounds
        for rank, part in enumerate(report.recorded.parts)
    }
    assert recorded == acks
    assert max(recorded.values()) > 3


def test_a_job_does_not_end_before_its_callback_has_had_the_last_epoch():
    simulation = told(5, 12, wants_metrics=True)
    taken: list[Event] = []

    def keeps(event):
        if isinstance(event, EpochMetricsTaken) and not taken:
            taken.append(event)
            return None
        return event

    simulation.changed = keeps
    simulation.run_until(lambda: bool(taken))
    simulation.clock.at(1e3, lambda: None)
    simulation.run_until(lambda: simulation.clock.now_s >= 1e3)
    assert simulation.job.result is None
    simulation.handle(taken[0])
    assert simulation.run().outcome is Outcome.SUCCEEDED


# Losses and scalars of an epoch


def test_a_job_that_goes_on_within_an_epoch_has_its_losses_from_before():
    options = {"epochs": 1, "anchor": 4, "max_anchor": 4}
    first = told(5, 5, **options)
    first.run_until(lambda: len(first.rounds) == 6)
    saved = Saved("one", first.processes[Rank(0)].parameters, json.dumps(first.training.snapshot()))
    again = told(5, 5, **options)
    again.resumed = saved
    again.run()
    assert sum(again.epochs[0].rank_batches) == 400
    assert again.sent(SendOutcome, rank=0)[-1].global_step == 400
    assert again.events(ResultReceived)[-1].header[0].version > 6


def test_a_job_that_goes_on_does_not_write_over_the_first_runs_checkpoints():
    """They may go to the same folder, and versions go on; but what was made after the checkpoint is made anew."""
    options = {"epochs": 3, "dataset_size": 600, "checkpoint_every_epochs": 1}
    first = told(5, 5, **options)
    first.run()
    again = told(5, 5, **options)
    again.resumed = next(iter(first.saved.values()))
    again.run()
    assert not any("attempt" in one.name for one in first.saved.values())
    assert all(one.name.endswith("-attempt-2") for one in again.saved.values())


def test_what_was_learnt_of_ranks_is_not_learnt_again():
    first = told(5, 20)
    first.run_until(lambda: len(first.rounds) == 5)
    saved = Saved("one", first.processes[Rank(0)].parameters, json.dumps(first.training.snapshot()))
    again = told(5, 20)
    again.resumed = saved
    again.run_until(lambda: len(again.rounds) == 1)
    planned = {command.rank: command.after_step for command in again.sent(SendSyncNow) if command.round == 2}
    assert planned[0] == 4 * planned[1], "the fast rank gets four times as many before any is measured"


def test_the_loss_of_an_epoch_counts_batches_and_its_scalars_what_they_are_of():
    tally = EpochTally()
    tally.add(Rank(0), EpochWork(epoch=0, num_batches=9, num_samples=90, loss_sum=9.0, scalars={"a": (9.0, 9)}))
    tally.add(Rank(1), EpochWork(epoch=0, num_batches=1, num_samples=10, loss_sum=11.0, scalars={"a": (3.0, 1)}))
    again = EpochTally.from_json(json.loads(json.dumps(tally.to_json())))
    report = again.report(epoch=0, ranks=[Rank(0), Rank(1)], committed=100, dropped=0)
    assert (report.loss, report.scalars) == (2.0, {"a": 1.2})
    assert report.rank_batches == (9, 1)


def test_the_bound_counts_each_rank_in_batches_of_its_own_size():
    nothing = Mark(at_s=0.0, samples=0, rank_batches={}, rank_compute_ms={})
    end = Mark(
        at_s=1.0,
        samples=0,
        rank_batches={Rank(0): 10, Rank(1): 20},
        rank_compute_ms={Rank(0): 1000.0, Rank(1): 1000.0},
    )
    assert bound_samples_per_s(nothing, end, {Rank(0): 8, Rank(1): 32}) == 80.0 + 640.0


# Fences


def open_rounds(simulation):
    return simulation.job.run.generation.rounds if simulation.job.run.generation else []


def test_what_ranks_say_of_another_generation_is_old_news(simulate):
    """One rank has entered the first round, and the other is said to have, in a group that is no more."""
    simulation = simulate(ranks(5, 12))
    simulation.run_until(lambda: any(len(opened.entered) == 1 for opened in open_rounds(simulation)))
    (opened,) = open_rounds(simulation)
    other = next(rank for rank in simulation.job.ranks if rank not in opened.entered)
    address = simulation.job.ranks[other].address
    old = simulation.job.generation_id - 1
    rows = (HeaderRow(weight=0, cut=0, local_step=0, compute_us=0),) * 2
    simulation.says_nothing(RoundEntered(**address, generation=old, round=opened.id))
    simulation.says_nothing(
        ResultReceived(
            **address, generation=old, round=opened.id, header=rows, collective_ms=1.0, stalled_ms=0.0, digest=1
        )
    )
    assert (len(opened.entered), opened.results) == (1, {})


@pytest.mark.parametrize("later", [-1, 1])
def test_what_another_process_of_a_rank_has_said_is_old_news(simulate, later):
    simulation = simulate(ranks(5, 12))
    simulation.run_until(lambda: len(simulation.rounds) == 3)
    record = simulation.job.ranks[Rank(1)]
    address = record.address | {"incarnation": Incarnation(record.incarnation + later)}
    before = record.local_step
    simulation.says_nothing(BatchesTrained(**address, local_step=before + 5, num_processed=9**9, batch_ms=(9.0,)))
    assert record.local_step == before
    assert simulation.run().outcome is Outcome.SUCCEEDED


def test_a_rank_that_met_in_another_generation_is_not_ready_in_this(simulate):
    simulation = simulate(ranks(5, 12))
    simulation.run_until(lambda: bool(simulation.core.jobs) and simulation.job.phase is JobPhase.GROUPING)
    record = simulation.job.ranks[Rank(1)]
    old = simulation.job.generation_id - 1
    simulation.says_nothing(GroupFormed(**record.address, generation=old))
    assert record.phase is RankPhase.READY


# When a round is due, and speeds


def test_async_averages_when_every_rank_has_made_its_count(simulate):
    """Also in the round in which one becomes slower; the others overshoot meanwhile."""
    models = [RankModel(batch_ms=5), RankModel(batch_ms=20, changes=((1.0, 60),))]
    simulation = simulate(models, policy="async", anchor=10, max_anchor=10, dataset_size=10_000)
    simulation.run()
    whole = simulation.rounds[1:-1]
    assert len(whole) > 6
    assert min(report.rank_batches[1] for report in whole) >= 10
    assert min(report.rank_batches[0] for report in whole) >= 40


def test_no_rank_runs_dry_while_an_averaging_lasts():
    """It lasts 200 ms, as long as 40 batches: from the second round on, work is leased for that."""
    simulation = told(5, 5, sync_ms=200.0, averaging="overlapped", dataset_size=20_000)
    simulation.run()
    waited = [max(report.rank_waited_ms) for report in simulation.rounds[1:-2]]  # then work ends
    assert len(waited) > 10
    assert max(waited) < 5


@pytest.mark.parametrize("averaging", ["blocking", "overlapped"])
def test_nobody_waits_for_a_rank_that_evaluates(averaging):
    """An evaluation takes as long as 60 batches. How long is known from the first one on."""
    simulation = told(5, 5, has_evaluation=True, epochs=4, anchor=40, averaging=averaging)
    simulation.evaluation_ms = 300.0
    simulation.run()
    waited = [max(report.rank_waited_ms) for report in simulation.rounds[1:]]
    assert sum(one > 20 for one in waited) <= 1
    assert len(simulation.evaluations) == 4


def test_work_is_counted_in_batches_of_the_job_and_dealt_in_those_of_each_rank(simulate):
    simulation = simulate([RankModel(batch_ms=20, batch_size=64), RankModel(batch_ms=10, batch_size=8)], batch_size=32)
    simulation.run_until(lambda: len(simulation.rounds) == 2)
    paces = simulation.generation.scheduler._paces(simulation.clock.now_s)
    assert [(pace.batch_size, pace.ratio) for pace in paces] == [(64, 2.0), (8, 0.25)]


def test_a_report_that_comes_twice_counts_once():
    record = told_once()
    record.on_batches(5, (10.0,), 1.0)
    for step in (5, 4):
        record.on_batches(step, (90.0,), 2.0)
    assert (record.local_step, record.reported_at_s, record.ms_per_batch, list(record.recent_ms)) == (
        5,
        1.0,
        10.0,
        [10],
    )


def test_one_pause_is_no_slower_device():
    record = told_once()
    for step in range(1, 34):
        record.on_batches(step, (1000.0 if step == 20 else 10.0,), float(step))
    assert record.ms_per_batch == pytest.approx(10.0 + 10.0 / 32)


def test_a_first_batch_that_compiles_is_no_speed():
    record = told_once()
    record.on_batches(1, (9_000.0,), 9.0)
    assert record.ms_per_batch == 9_000.0, "nothing else is known"
    record.on_batches(2, (10.0,), 9.01)
    assert record.ms_per_batch == 10.0


def test_what_was_before_a_time_without_work_is_no_speed_when_the_first_batch_after_it_differs():
    record = told_once()
    record.on_batches(20, (300.0,) * 20, 6.0)
    record.on_committed(HeaderRow(weight=200, cut=200, local_step=20, compute_us=6_000_000), 0.0, 6.0)
    record.on_batches(21, (10.0,), 6.1)
    assert record.ms_per_batch > 200, "one quick batch, which may be a short one, is not a faster device"
    record.on_committed(HeaderRow(weight=10, cut=210, local_step=21, compute_us=10_000), 0.0, 6.2)
    record.on_committed(HeaderRow(weight=0, cut=210, local_step=21, compute_us=0), 0.0, 7.0)
    record.on_batches(22, (10.0,), 7.1)
    assert record.ms_per_batch == 10.0


def test_a_device_that_has_changed_is_measured_by_its_newest_batches():
    record = told_once()
    for step in range(1, 33):
        record.on_batches(step, (10.0,), float(step))
    for step in range(33, 38):
        record.on_batches(step, (30.0,), float(step))
    assert record.ms_per_batch > 20


def told_once() -> RankRecord:
    """A rank of which nothing is known."""
    return RankRecord(
        job_id=JobId("job"),
        rank=Rank(0),
        incarnation=Incarnation(1),
        agent_id=AgentId("host"),
        slot=0,
        host="host",
        device="cpu",
    )

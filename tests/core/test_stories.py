"""The pace of jobs, told with the simulator: rounds, epochs, sizes of data. Time is virtual."""

from itertools import pairwise
from statistics import median

import pytest

from elche.policies import POLICIES
from elche.settings import BLOCKING_ANCHOR, OVERLAPPED_ANCHOR, AgreedSettings
from elche_coordinator.core.messages.commands import SendLease, SendSyncNow
from elche_coordinator.core.messages.events import BatchesTrained, RoundEntered
from elche_coordinator.core.messages.reports import Outcome, RoundReport
from elche_coordinator.core.pacing.cadence import PROBE_BATCHES
from elche_coordinator.core.pacing.counts import SPARE_MS
from elche_coordinator.core.pacing.sync import SYNC_WINDOW
from elche_coordinator.simulator.simulation import RankModel
from support.stories import UNEQUAL
from support.watched import WatchedSimulation, ranks

# Pace


def test_two_unequal_ranks_finish_near_the_bound(simulate):
    simulation = simulate(ranks(*UNEQUAL), dataset_size=30_000, has_evaluation=True)
    result = simulation.run()
    assert result.outcome is Outcome.SUCCEEDED
    assert result.bound_fraction >= 0.97
    assert simulation.rounds[6].rank_batches == (23, 10)


@pytest.mark.parametrize(("averaging", "anchor"), [("overlapped", OVERLAPPED_ANCHOR), ("blocking", BLOCKING_ANCHOR)])
def test_rounds_are_as_long_as_by_default(simulate, averaging, anchor):
    """A batch of the slowest where ranks train on meanwhile, and the one at the end of which it takes the result; else
    ten.
    """
    target = AgreedSettings.__dataclass_fields__["overhead_target"].default
    simulation = simulate(
        ranks(*UNEQUAL), dataset_size=30_000, averaging=averaging, anchor=anchor, overhead_target=target
    )
    assert simulation.run().bound_fraction >= 0.97
    slowest = [report.rank_batches[1] for report in simulation.rounds[3:-3]]
    assert median(slowest) == anchor + (averaging == "overlapped")


def test_ranks_that_swap_speeds_are_near_the_bound_again_after_three_rounds(simulate):
    swap_s = 20.0
    models = [
        RankModel(batch_ms=25, changes=((swap_s, 57.5),)),
        RankModel(batch_ms=57.5, changes=((swap_s, 25),)),
    ]
    simulation = simulate(models, dataset_size=60_000)
    assert simulation.run().outcome is Outcome.SUCCEEDED
    told = zip(simulation.reports, simulation.report_times_s, strict=True)
    times_s = [at_s for report, at_s in told if isinstance(report, RoundReport)]
    swapped = next(index for index, at_s in enumerate(times_s) if at_s > swap_s)
    first, last = swapped + 3, swapped + 13
    rate = sum(report.samples for report in simulation.rounds[first + 1 : last + 1]) / (times_s[last] - times_s[first])
    bound = 10 / 0.025 + 10 / 0.0575
    assert rate >= 0.95 * bound


def test_a_hint_is_followed_before_any_rank_is_measured(simulate):
    simulation = simulate(ranks(*UNEQUAL), dataset_size=30_000, speed_hint=(1, 2.3))
    simulation.run()
    first = [next(c for c in simulation.sent(SendSyncNow, rank=rank) if c.round == 2) for rank in (0, 1)]
    assert [command.after_step for command in first] == [23, 10]


def test_a_hint_that_names_no_rank_of_the_job_is_left_aside(simulate):
    simulation = simulate(ranks(25, 25), speed_hint=(7, 2.3))
    assert simulation.run().outcome is Outcome.SUCCEEDED


@pytest.mark.parametrize("num_batches", [20, 60, 200, 2000])
def test_the_first_round_is_a_short_probe(simulate, num_batches):
    simulation = simulate(ranks(*UNEQUAL), dataset_size=num_batches * 10, anchor=50)
    simulation.run()
    share = num_batches / 2
    probe = max(PROBE_BATCHES, int(0.10 * share))
    announced = [next(c for c in simulation.sent(SendSyncNow, rank=rank) if c.round == 2) for rank in (0, 1)]
    assert all(command.after_step <= probe for command in announced)


@pytest.mark.parametrize("num_batches", [40, 100])
def test_the_probe_stays_short_when_ranks_are_measured(simulate, num_batches):
    simulation = simulate(ranks(*UNEQUAL), dataset_size=num_batches * 10)
    simulation.run()
    probe = simulation.rounds[1]
    assert probe.rank_batches[1] <= max(PROBE_BATCHES, int(0.10 * num_batches / 2))
    assert max(probe.rank_waited_ms) - min(probe.rank_waited_ms) < 2 * UNEQUAL[1]


def test_ranks_end_each_epoch_together(simulate):
    simulation = simulate(ranks(*UNEQUAL), dataset_size=5_000, epochs=6)
    simulation.run()
    waits_ms = waits_at_epoch_ends(simulation)
    assert len(waits_ms) == 6
    assert max(waits_ms) < UNEQUAL[1]


def test_a_round_that_ends_an_epoch_stays_one_while_speeds_stay(simulate):
    simulation = simulate(ranks(*UNEQUAL), dataset_size=5_000, epochs=6)
    ends: dict[int, int] = {}

    def ended() -> bool:
        training = simulation.job.run.training
        generation = simulation.job.run.generation
        if generation and generation.rounds and "ends the epoch" in generation.scheduler.reason:
            ends[generation.rounds[0].id] = training.ledger.epoch
        return simulation.job.result is not None

    simulation.run_until(ended)
    assert list(ends.values()) == [0, 1, 2, 3, 4, 5]


def test_a_round_that_ends_an_epoch_keeps_its_targets_when_speeds_change(simulate):
    """Others would have nothing left to make, or too little."""
    simulation = simulate(ranks(*UNEQUAL, jitter=0.5), dataset_size=2_000, epochs=3)
    targets: dict[int, dict[int, int]] = {}

    def ended() -> bool:
        generation = simulation.job.run.generation
        for opened in generation.rounds if generation else ():
            if opened.is_fixed:
                assert opened.targets == targets.setdefault(opened.id, dict(opened.targets))
        return simulation.job.result is not None

    simulation.run_until(ended)
    assert len(targets) >= 3


def waits_at_epoch_ends(simulation: WatchedSimulation) -> list[float]:
    """The longest wait in each round that ended an epoch: beyond the averaging itself."""
    waits_ms, last = [], None
    for report in simulation.reports:
        if report in simulation.rounds:
            last = report
        elif report in simulation.epochs:
            waits_ms.append(max(last.rank_waited_ms) - min(last.rank_waited_ms))
    return waits_ms


@pytest.mark.parametrize("dataset_size", [1_000, 3_500, 10_000])
def test_fast_ranks_go_on_with_the_next_epoch_until_the_others_have_ended_this_one(simulate, dataset_size):
    simulation = simulate(ranks(5, 25, 57.5), dataset_size=dataset_size, epochs=3)
    most = 0

    def ended() -> bool:
        nonlocal most
        if simulation.job.run.training:
            ledger = simulation.training.ledger
            for leases in ledger.rank_leases.values():
                ahead = sum(part.size for part in leases.remainders() if part.epoch > ledger.epoch)
                most = max(most, ahead)
        return simulation.job.result is not None

    simulation.run_until(ended)
    assert 0 < most * 5 / 10 <= 57.5 + SPARE_MS + 5 + 3 * 2 * 3, "a batch of the slowest, and the spare"
    assert max(max(report.rank_waited_ms) for report in simulation.rounds[2:-1]) < 57.5


def test_sixty_four_ranks_with_jitter_finish(simulate):
    models = [RankModel(batch_ms=20 + rank, jitter_fraction=0.1) for rank in range(64)]
    simulation = simulate(models, dataset_size=64 * 10 * 20, check_every=100, epochs=2)
    result = simulation.run()
    assert result.outcome is Outcome.SUCCEEDED
    assert result.bound_fraction >= 0.75


# Sizes


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("dataset_size", [1, 9, 15, 31, 640, 643])
def test_any_size_is_trained_whole(simulate, dataset_size, drop_last, policy):
    settings = {"dataset_size": dataset_size, "drop_last": drop_last, "policy": policy}
    simulation = simulate(ranks(5, 11.5, 7), epochs=3, **settings)
    result = simulation.run()
    if drop_last and dataset_size < 10:
        assert (result.outcome, result.invalid) == (Outcome.FAILED, True)
        assert "shorter than one batch" in result.error
        return
    assert result.outcome is Outcome.SUCCEEDED
    dropped = dataset_size % 10 if drop_last else 0
    assert result.dropped_samples == (dropped,) * 3
    assert result.committed_samples == (dataset_size - dropped,) * 3
    assert [report.committed + report.dropped for report in simulation.epochs] == [dataset_size] * 3


def test_many_epochs_of_little_data(simulate):
    simulation = simulate(ranks(5, 11.5), dataset_size=37, epochs=60, has_evaluation=True)
    assert simulation.run().epochs == 60


def test_epochs_that_end_in_one_round_have_their_parts_of_its_time(simulate):
    """Each once had the time since the last one's end: none, and billions of samples a second."""
    simulation = simulate(ranks(5, 50), dataset_size=40, epochs=30, averaging="overlapped", sync_ms=50)
    result = simulation.run()
    ends = [simulation.reports.index(epoch) for epoch in simulation.epochs]
    assert any(second == first + 1 for first, second in pairwise(ends)), "no two epochs end in one round"
    durations_s = [epoch.duration_s for epoch in simulation.epochs]
    assert min(durations_s) > 0
    assert sum(durations_s) == pytest.approx(result.duration_s)


def test_one_rank_alone(simulate):
    simulation = simulate(ranks(25), dataset_size=3_000, epochs=2, has_evaluation=True)
    result = simulation.run()
    assert result.outcome is Outcome.SUCCEEDED
    assert result.bound_fraction >= 0.97


@pytest.mark.parametrize("averaging", ["blocking", "overlapped"])
def test_ranks_train_on_during_an_overlapped_averaging(simulate, averaging):
    simulation = simulate(ranks(*UNEQUAL), dataset_size=20_000, averaging=averaging, sync_ms=100, max_anchor=10)
    result = simulation.run()
    assert result.outcome is Outcome.SUCCEEDED
    least, most = {"blocking": (0.80, 0.90), "overlapped": (0.95, 1.01)}[averaging]
    assert least <= result.bound_fraction <= most


# sync


def test_sync_averages_after_every_batch_of_every_rank(simulate):
    simulation = simulate(ranks(5, 11.5, 7), dataset_size=1_234, epochs=2, policy="sync")
    most_open = 0

    def ended() -> bool:
        nonlocal most_open
        most_open = max(most_open, len(simulation.generation.rounds) if simulation.job.run.generation else 0)
        return simulation.job.result is not None

    simulation.run_until(ended)
    assert all(num <= 1 for report in simulation.rounds for num in report.rank_batches)
    assert most_open == SYNC_WINDOW
    assert all(max(report.rank_batches) - min(report.rank_batches) <= 1 for report in simulation.epochs)
    for rank in range(3):
        leased = {0: 0, 1: 0}
        for command in simulation.sent(SendLease, rank=rank):
            leased[command.lease.epoch] += command.lease.size
        assert set(leased.values()) <= {411, 412}


def test_no_target_is_revised_once_a_rank_has_entered(simulate):
    simulation = simulate(ranks(25, 57.5, 40, jitter=0.4), dataset_size=10_000, sync_ms=200)
    simulation.run()
    entered, num_revisions = set(), 0
    for step in simulation.core.steps:
        if isinstance(step.event, RoundEntered):
            entered.add(step.event.round)
        announced = [command.round for command in step.commands if isinstance(command, SendSyncNow)]
        assert not entered & set(announced)
        num_revisions += isinstance(step.event, BatchesTrained) and bool(announced)
    assert num_revisions > 10


def test_rounds_of_a_rank_never_go_back(simulate):
    models = [RankModel(batch_ms=25, jitter_fraction=0.3), RankModel(batch_ms=57.5, jitter_fraction=0.3)]
    simulation = simulate(models, dataset_size=10_000)
    simulation.run()
    for rank in (0, 1):
        rounds = [command.round for command in simulation.sent(SendSyncNow, rank=rank)]
        assert all(before <= after for before, after in pairwise(rounds))


def test_an_averaging_that_overlaps_is_no_cost_from_the_first_round_on(simulate):
    """Ranks ran dry while the first averaging lasted, and El Che took that for its cost: six times longer rounds."""
    simulation = simulate(ranks(*UNEQUAL), dataset_size=60_000, averaging="overlapped", sync_ms=550.0, latency_ms=20.0)
    simulation.run()
    *rounds, _ = simulation.rounds  # the last one has nothing left to overlap with
    assert {report.anchor for report in rounds} == {10}
    assert max(max(report.rank_waited_ms) for report in rounds[1:]) < UNEQUAL[1]


def test_averagings_as_long_as_rounds_leave_nobody_idle_at_the_end_of_an_epoch(simulate):
    simulation = simulate(
        ranks(*UNEQUAL, jitter=0.05),
        dataset_size=3_000,
        epochs=8,
        averaging="overlapped",
        sync_ms=1000.0,
        latency_ms=20.0,
    )
    assert simulation.run().bound_fraction > 0.94  # 0.89 when the last free batches went to the first rank


def test_the_bound_of_a_job_with_too_large_batches_counts_the_samples_that_there_are(simulate):
    """With 20 samples and batches of 10,000 it was 500 times what the rank can train."""
    result = simulate(ranks(25), dataset_size=20, batch_size=10_000, epochs=10).run()
    assert result.bound_samples_per_s == pytest.approx(20 / 0.025, rel=0.01)

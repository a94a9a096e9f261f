"""What happens to jobs, told with the simulator: rounds, epochs, failures, ends. Time is virtual."""

from dataclasses import replace
from itertools import pairwise

import pytest
from watched import WatchedSimulation, ranks

from elche_coordinator.core.describe import describe
from elche_coordinator.core.jobs.job import STOP_GRACE_S
from elche_coordinator.core.messages.commands import (
    SendLease,
    SendOutcome,
    SendShutdown,
    SendSyncNow,
    StartRank,
    StopRank,
)
from elche_coordinator.core.messages.events import (
    AgentJoined,
    AgentLost,
    BatchesTrained,
    DeadlinePassed,
    EvaluationDone,
    FinalStateSaved,
    GroupFormed,
    JobCancelled,
    JobSubmitted,
    RankExited,
    RankFailed,
    RankReady,
    RoundEntered,
    RoundHeld,
    SessionLost,
)
from elche_coordinator.core.messages.ids import AgentId, JobId
from elche_coordinator.core.messages.reports import Outcome, RoundReport
from elche_coordinator.core.messages.spec import JobSpec, Slot
from elche_coordinator.core.pacing.policies import PROBE_BATCHES, SYNC_WINDOW
from elche_coordinator.core.records.machine import JobPhase
from elche_coordinator.simulator import RankModel

UNEQUAL = (25.0, 57.5)


def at_phase(simulation: WatchedSimulation, phase: JobPhase) -> None:
    """Lets time pass until the job is there."""
    simulation.run_until(lambda: simulation.job.phase is phase)


def in_mid_training(simulation: WatchedSimulation, num_rounds: int = 4) -> None:
    """Lets time pass until some rounds are committed and every rank trains towards the next."""
    simulation.run_until(lambda: len(simulation.rounds) >= num_rounds)
    until_s = simulation.clock.now_s + 0.3
    simulation.run_until(lambda: simulation.clock.now_s >= until_s)
    assert simulation.job.phase is JobPhase.TRAINING


def submitted(name: str, num_ranks: int) -> JobSubmitted:
    spec = JobSpec(name=name, source="", file_name="", num_ranks=num_ranks)
    return JobSubmitted(job_id=JobId(name), spec=spec, submitted_at=0.0)


# Pace


def test_two_unequal_ranks_finish_near_the_bound(simulate):
    simulation = simulate(ranks(*UNEQUAL), dataset_size=30_000, has_evaluation=True)
    result = simulation.run()
    assert result.outcome is Outcome.SUCCEEDED
    assert result.bound_fraction >= 0.97
    assert simulation.rounds[6].rank_batches == (23, 10)


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
    simulation = simulate(ranks(*UNEQUAL), dataset_size=5_000, num_epochs=6)
    simulation.run()
    waits_ms = waits_at_epoch_ends(simulation)
    assert len(waits_ms) == 6
    assert max(waits_ms) < UNEQUAL[1]


def test_a_round_that_ends_an_epoch_stays_one_while_speeds_stay(simulate):
    simulation = simulate(ranks(*UNEQUAL), dataset_size=5_000, num_epochs=6)
    ends: dict[int, int] = {}

    def ended() -> bool:
        training = simulation.job.training
        if training and training.rounds and "ends the epoch" in training.pacing:
            ends[training.rounds[0].id] = training.ledger.epoch
        return simulation.job.result is not None

    simulation.run_until(ended)
    assert list(ends.values()) == [0, 1, 2, 3, 4, 5]


def waits_at_epoch_ends(simulation: WatchedSimulation) -> list[float]:
    """The longest wait in each round that ended an epoch: beyond the averaging itself."""
    waits_ms, last = [], None
    for report in simulation.reports:
        if report in simulation.rounds:
            last = report
        elif report in simulation.epochs:
            waits_ms.append(max(last.rank_waited_ms) - min(last.rank_waited_ms))
    return waits_ms


@pytest.mark.parametrize(("dataset_size", "limit"), [(1_000, 2), (3_500, 3), (10_000, 5)])
def test_fast_ranks_stream_into_the_next_epoch_by_few_batches(simulate, dataset_size, limit):
    simulation = simulate(ranks(5, 25, 57.5), dataset_size=dataset_size, num_epochs=3)
    most = 0

    def ended() -> bool:
        nonlocal most
        if simulation.job.training:
            ledger = simulation.job.training.ledger
            for holding in ledger.holdings.values():
                ahead = sum(part.size for part in holding.remainders() if part.epoch > ledger.epoch)
                most = max(most, ahead)
        return simulation.job.result is not None

    simulation.run_until(ended)
    assert 0 < most <= limit * 10


def test_sixty_four_ranks_with_jitter_finish(simulate):
    models = [RankModel(batch_ms=20 + rank, jitter_fraction=0.1) for rank in range(64)]
    simulation = simulate(models, dataset_size=64 * 10 * 40, check_every=100, num_epochs=2)
    result = simulation.run()
    assert result.outcome is Outcome.SUCCEEDED
    assert result.bound_fraction >= 0.75


# Sizes


@pytest.mark.parametrize("policy", ["cadence", "async", "sync"])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("dataset_size", [1, 9, 15, 31, 640, 643])
def test_any_size_is_trained_whole(simulate, dataset_size, drop_last, policy):
    settings = {"dataset_size": dataset_size, "drop_last": drop_last, "policy": policy}
    simulation = simulate(ranks(5, 11.5, 7), num_epochs=3, **settings)
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
    simulation = simulate(ranks(5, 11.5), dataset_size=37, num_epochs=60, has_evaluation=True)
    assert simulation.run().epochs == 60


def test_epochs_that_end_in_one_round_have_their_parts_of_its_time(simulate):
    """Each once had the time since the last one's end: none, and billions of samples a second."""
    simulation = simulate(ranks(5, 50), dataset_size=40, num_epochs=30, averaging="overlapped", sync_ms=50)
    result = simulation.run()
    ends = [simulation.reports.index(epoch) for epoch in simulation.epochs]
    assert any(second == first + 1 for first, second in pairwise(ends)), "no two epochs end in one round"
    durations_s = [epoch.duration_s for epoch in simulation.epochs]
    assert min(durations_s) > 0
    assert sum(durations_s) == pytest.approx(result.duration_s)


def test_one_rank_alone(simulate):
    simulation = simulate(ranks(25), dataset_size=3_000, num_epochs=2, has_evaluation=True)
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
    simulation = simulate(ranks(5, 11.5, 7), dataset_size=1_234, num_epochs=2, policy="sync")
    most_open = 0

    def ended() -> bool:
        nonlocal most_open
        most_open = max(most_open, len(simulation.job.training.rounds) if simulation.job.training else 0)
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


# Reports


@pytest.mark.parametrize("policy", ["cadence", "async", "sync"])
def test_every_epoch_is_reported_and_evaluated_once_and_in_order(simulate, policy):
    simulation = simulate(ranks(5, 11.5), dataset_size=1_003, num_epochs=5, has_evaluation=True, policy=policy)
    simulation.run()
    assert [report.epoch for report in simulation.epochs] == [0, 1, 2, 3, 4]
    assert [report.epoch for report in simulation.evaluations] == [0, 1, 2, 3, 4]
    assert sum(c.evaluate is not None for c in simulation.sent(SendOutcome)) == 5
    assert sum(c.save_final for c in simulation.sent(SendOutcome)) == 1
    kinds = [type(report).__name__ for report in simulation.reports]
    assert kinds[-1] == "JobResult"
    assert kinds.count("JobResult") == 1


def test_every_epoch_of_tiny_data_is_evaluated(simulate):
    simulation = simulate(ranks(5), dataset_size=1, num_epochs=3, has_evaluation=True, latency_ms=80, persist_ms=30)
    simulation.run()
    assert [report.epoch for report in simulation.evaluations] == [0, 1, 2]


def test_the_loss_of_an_epoch_is_the_mean_over_batches(simulate):
    simulation = simulate(ranks(5, 11.5), dataset_size=1_003, num_epochs=3)
    simulation.run()
    loss, batches = [0.0] * 3, [0] * 3
    for event in simulation.events(RoundHeld):
        for work in event.work:
            loss[work.epoch] += work.loss_sum
            batches[work.epoch] += work.num_batches
    assert [report.loss for report in simulation.epochs] == pytest.approx(
        [a / b for a, b in zip(loss, batches, strict=True)]
    )
    assert [sum(report.rank_batches) for report in simulation.epochs] == batches


def test_the_global_step_counts_committed_batches(simulate):
    simulation = simulate(ranks(5, 11.5), dataset_size=1_003, num_epochs=2)
    simulation.run()
    total, steps = 0, {}
    for report in simulation.rounds:
        total += sum(report.rank_batches)
        steps[report.round] = total
    assert all(command.global_step == steps[command.round] for command in simulation.sent(SendOutcome))
    assert total == sum(process.local_step for process in simulation.processes.values())


# Old news


def test_a_revision_that_comes_after_the_rank_has_entered_changes_nothing(simulate):
    simulation = simulate(ranks(*UNEQUAL), dataset_size=3_000)
    process = None

    def has_entered_early() -> bool:
        nonlocal process
        opened = simulation.job.training.rounds if simulation.job.training else []
        if len(simulation.rounds) < 4 or not opened or len(opened[0].entered) != 1:
            return False
        process = simulation.processes[next(iter(opened[0].entered))]
        return True

    simulation.run_until(has_entered_early)
    opened = simulation.job.training.rounds[0]
    late = SendSyncNow(**process.address, round=opened.id, generation=opened.generation, after_step=10_000)
    process.receive(late)
    simulation.run()
    assert simulation.job.result.outcome is Outcome.SUCCEEDED


def old_news(simulation: WatchedSimulation) -> dict[str, object]:
    """Messages of earlier generations, rounds and processes, of ranks and jobs that are not."""
    job = simulation.job
    training, rank = job.training, simulation.processes[0]
    address = rank.address
    batches = BatchesTrained(
        **address, local_step=10**6, num_processed=10**7, batch_ms=(1.0,) * 9, loss_sum=9.0, loss_count=1
    )
    held = simulation.events(RoundHeld)[-1]
    entered = RoundEntered(**address, generation=job.generation, round=training.rounds[0].id)
    return {
        "batches of an old process": replace(batches, incarnation=99),
        "batches of a rank that is not": replace(batches, rank=7),
        "batches of a job that is not": replace(batches, job_id="other"),
        "a round entered by an old process": replace(entered, incarnation=99),
        "a round entered in an old generation": replace(entered, generation=0),
        "a committed round entered": replace(entered, round=1),
        "a round entered that is not announced": replace(entered, round=10**6),
        "a committed round held again": held,
        "a round held in an old generation": replace(held, generation=0, round=training.rounds[0].id),
        "a round held by an old process": replace(held, incarnation=99, round=training.rounds[0].id),
        "a group formed again": GroupFormed(**address, generation=job.generation),
        "an old group formed": GroupFormed(**address, generation=0),
        "a rank ready again": RankReady(**address, settings=simulation.settings, device="cpu"),
        "an evaluation nobody asked for": EvaluationDone(**address, epoch=0, sums={"a": (1.0, 1)}, duration_ms=1.0),
        "a final state too early": FinalStateSaved(**address, path="early"),
        "the same job again": submitted("job", 2),
        "the end of an old process": RankExited(
            **(address | {"incarnation": 99}), agent_id=AgentId("host"), exit_code=-9
        ),
        "the end of a process, of which another host speaks": RankExited(
            **address, agent_id=AgentId("other"), exit_code=-9
        ),
        "the error of an old process": RankFailed(**(address | {"incarnation": 99}), error="old"),
        "the lost session of an old process": SessionLost(**(address | {"incarnation": 99})),
        "a cancelled job that is not": JobCancelled(job_id=JobId("other")),
        "a lost host that is not": AgentLost(agent_id=AgentId("other")),
    }


NEWS = 22


@pytest.mark.parametrize("index", range(NEWS))
def test_old_news_changes_nothing(simulate, index):
    simulation = simulate(ranks(*UNEQUAL), dataset_size=3_000)
    in_mid_training(simulation)
    news = old_news(simulation)
    assert len(news) == NEWS
    before = describe(simulation.job, 0.0)
    simulation.says_nothing(list(news.values())[index])
    assert describe(simulation.job, 0.0) == before
    assert simulation.run().outcome is Outcome.SUCCEEDED


def test_progress_told_before_changes_nothing(simulate):
    simulation = simulate(ranks(*UNEQUAL), dataset_size=3_000)
    in_mid_training(simulation)
    address = simulation.processes[0].address
    before = describe(simulation.job, 0.0)
    simulation.says_nothing(BatchesTrained(**address, local_step=1, num_processed=10, loss_sum=9.0, loss_count=1))
    assert describe(simulation.job, 0.0) == before


@pytest.mark.parametrize("policy", ["cadence", "async", "sync"])
@pytest.mark.parametrize("averaging", ["blocking", "overlapped"])
def test_every_event_twice_is_the_same_as_once(simulate, policy, averaging):
    options = {"dataset_size": 2_003, "num_epochs": 3, "has_evaluation": True, "policy": policy, "averaging": averaging}
    simulation = simulate(ranks(5, 11.5), send_twice=True, **options)
    assert simulation.run().outcome is Outcome.SUCCEEDED
    assert [report.epoch for report in simulation.evaluations] == [0, 1, 2]


# Failures


def fails(simulation: WatchedSimulation, *words: str) -> None:
    result = simulation.run()
    assert result.outcome is Outcome.FAILED
    missing = [word for word in words if word not in result.error]
    assert not missing, result.error


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dataset_size": 4_001}, ("dataset_size", "4000", "4001")),
        ({"seed": 3}, ("seed", "0", "3")),
        ({"speed_hint": (0, 2.0)}, ("speed_hint",)),
        ({"layout_hash": 7}, ("the model's parameters",)),
    ],
)
def test_ranks_that_disagree_on_the_file_fail_the_job_as_invalid(simulate, changes, words):
    simulation = simulate(ranks(5, 5, 5))
    tell = simulation.handle

    def tell_another(event):
        if isinstance(event, RankReady) and event.rank == 2:
            event = replace(event, settings=replace(event.settings, **changes))
        tell(event)

    simulation.handle = tell_another
    fails(simulation, "ranks 0 and 2", *words)
    assert simulation.job.result.invalid


def test_an_unknown_policy_fails_the_job_as_invalid(simulate):
    simulation = simulate(ranks(5, 5), policy="wish")
    fails(simulation, "unknown policy 'wish'", "cadence", "sync")
    assert simulation.job.result.invalid


def with_held_changed(simulation: WatchedSimulation, change) -> None:
    """From the fourth round on, rank 1 says something else about what it holds."""
    tell = simulation.handle

    def tell_another(event):
        tell(change(event) if isinstance(event, RoundHeld) and event.rank == 1 and event.round >= 4 else event)

    simulation.handle = tell_another


def test_members_whose_results_differ_fail_the_job(simulate):
    simulation = simulate(ranks(5, 5))
    with_held_changed(simulation, lambda event: replace(event, digest=12345))
    fails(simulation, "parameters", "ranks", "0", "1", "round 4")


def test_members_whose_headers_differ_fail_the_job(simulate):
    simulation = simulate(ranks(5, 11.5))
    with_held_changed(simulation, lambda event: replace(event, header=event.header[::-1]))
    fails(simulation, "different headers", "round 4")


def test_parameters_that_are_not_finite_fail_the_job_and_name_the_rank(simulate):
    simulation = simulate(ranks(5, 5))
    tell = simulation.handle

    def tell_another(event):
        if isinstance(event, RoundHeld) and event.round == 4:
            first, second = event.header
            event = replace(event, header=(first, replace(second, finite=False)))
        tell(event)

    simulation.handle = tell_another
    fails(simulation, "rank 1", "not finite")


def nonsense(kind: str, event: RoundHeld) -> RoundHeld:
    first, *others = event.header
    match kind:
        case "too short":
            return replace(event, header=(first,))
        case "empty":
            return replace(event, header=())
        case "a cut beyond its leases":
            return replace(event, header=(replace(first, cut=10**9), *others))
        case "a cut that goes back":
            return replace(event, header=(replace(first, cut=0), *others))
        case _:
            return replace(event, header=(replace(first, local_step=0), *others))


@pytest.mark.parametrize(
    "kind", ["too short", "empty", "a cut beyond its leases", "a cut that goes back", "a step that goes back"]
)
def test_a_header_that_makes_no_sense_fails_the_job(simulate, kind):
    simulation = simulate(ranks(5, 5))
    tell = simulation.handle
    simulation.handle = lambda event: tell(
        nonsense(kind, event) if isinstance(event, RoundHeld) and event.round >= 4 else event
    )
    fails(simulation)


NAN = float("nan")


@pytest.mark.parametrize(
    ("is_first", "times"),
    [
        pytest.param(True, (), id="first, none"),
        pytest.param(True, (0.0,), id="first, zero"),
        pytest.param(True, (0.0, 0.0, 5.0), id="first, mostly zero"),
        pytest.param(True, (NAN,), id="first, not a number"),
        pytest.param(True, (-5.0,), id="first, negative"),
        pytest.param(True, (float("inf"), 5.0), id="first, endless"),
        pytest.param(False, (), id="later, none"),
        pytest.param(False, (0.0, 0.0, 5.0), id="later, mostly zero"),
        pytest.param(False, (NAN,), id="later, not a number"),
        pytest.param(False, (-5.0,), id="later, negative"),
        pytest.param(False, (float("inf"), 5.0), id="later, endless"),
    ],
)
def test_batch_times_that_make_no_sense_stop_nothing(simulate, is_first, times):
    simulation = simulate(ranks(5, 11.5))
    tell, is_told = simulation.handle, False

    def tell_another(event):
        nonlocal is_told
        if isinstance(event, BatchesTrained) and event.local_step > (0 if is_first else 40) and not is_told:
            event, is_told = replace(event, batch_ms=times), True
        tell(event)

    simulation.handle = tell_another
    assert simulation.run().outcome is Outcome.SUCCEEDED


@pytest.mark.parametrize("stalled_ms", [NAN, float("inf"), -1.0])
def test_a_stall_that_makes_no_sense_stops_nothing(simulate, stalled_ms):
    simulation = simulate(ranks(5, 11.5))
    with_held_changed(simulation, lambda event: replace(event, stalled_ms=stalled_ms, collective_ms=stalled_ms))
    assert simulation.run(limit_s=100).outcome is Outcome.SUCCEEDED


@pytest.mark.parametrize(
    ("num_ranks", "wrong"),
    [
        pytest.param(2, {"num_epochs": 0}, id="no epoch"),
        pytest.param(2, {"dataset_size": 0}, id="no sample"),
        pytest.param(2, {"anchor": 0}, id="no anchor"),
        pytest.param(2, {"batch_size": 0}, id="no batch"),
        pytest.param(2, {"num_epochs": -1}, id="fewer than no epoch"),
        pytest.param(2, {"dataset_size": -5}, id="fewer than no sample"),
        pytest.param(1, {"anchor": 0}, id="no anchor for one rank"),
    ],
)
def test_settings_that_make_no_sense_fail_the_job_as_invalid(simulate, num_ranks, wrong):
    simulation = simulate(ranks(*[5.0] * num_ranks), **wrong)
    result = simulation.run(limit_s=5)
    assert (result.outcome, result.invalid, result.failed_rank) == (Outcome.FAILED, True, None)


def test_a_killed_rank_fails_the_job_with_a_notice(simulate):
    simulation = simulate(ranks(*UNEQUAL, 30), dataset_size=3_000)
    in_mid_training(simulation)
    simulation.kill(1)
    fails(simulation, "rank 1 on host (cpu)", "was killed by signal 9", "out of memory", "at batch")
    assert simulation.job.result.failed_rank == 1
    told = {command.rank: command.reason for command in simulation.sent(SendShutdown)}
    assert set(told) == {0, 2}
    assert all("rank 1" in reason for reason in told.values())


def test_user_code_that_raises_fails_the_job_with_its_traceback(simulate):
    simulation = simulate(ranks(5, 5))
    in_mid_training(simulation, 2)
    address = simulation.processes[1].address
    simulation.handle(
        RankFailed(**address, error="ZeroDivisionError: division by zero", traceback="Traceback ...", batch=7)
    )
    fails(simulation, "ZeroDivisionError")
    assert simulation.job.result.traceback == "Traceback ..."
    assert simulation.job.result.failed_rank == 1
    assert not simulation.job.result.invalid


def test_the_first_failure_is_the_one_that_counts(simulate):
    simulation = simulate(ranks(5, 5))
    in_mid_training(simulation, 2)
    for rank, error in ((1, "the cause"), (0, "a consequence")):
        simulation.handle(RankFailed(**simulation.processes[rank].address, error=error))
    simulation.kill(0)
    fails(simulation, "the cause")


def test_a_lost_session_ends_the_process_and_then_the_job(simulate):
    simulation = simulate(ranks(5, 5))
    in_mid_training(simulation, 2)
    simulation.handle(SessionLost(**simulation.processes[1].address))
    assert simulation.job.phase is JobPhase.TRAINING
    assert [command.rank for command in simulation.sent(StopRank)] == [1]
    fails(simulation, "rank 1")


def test_a_lost_host_fails_the_job_and_takes_its_slots_with_it(simulate):
    simulation = simulate(ranks(5, 5))
    in_mid_training(simulation, 2)
    simulation.handle(AgentLost(agent_id=AgentId("host")))
    assert simulation.core.fleet.taken == {}
    assert simulation.core.fleet.free_places() == []
    assert simulation.job.phase is JobPhase.ENDED
    assert "its host host is gone" in simulation.job.result.error
    for process in simulation.processes.values():
        process.is_alive = False


def test_ranks_on_other_hosts_leave_when_one_host_is_lost(simulate):
    simulation = simulate(ranks(5, 5, 5))
    slots = (Slot(device="cpu"),)
    for name in "abc":
        simulation.handle(AgentJoined(agent_id=AgentId(name), host=f"host {name}", slots=slots))
    simulation.handle(submitted("job", 3))
    in_mid_training(simulation, 2)
    simulation.processes[1].is_alive = False
    simulation.handle(AgentLost(agent_id=AgentId("b")))
    assert {command.rank for command in simulation.sent(SendShutdown)} == {0, 2}
    fails(simulation, "rank 1 is lost: its host host b is gone")
    assert len(simulation.core.fleet.free_places()) == 2


def test_a_rank_that_dies_while_it_writes_the_final_state_fails_the_job(simulate):
    simulation = simulate(ranks(5, 11.5), has_evaluation=True)
    at_phase(simulation, JobPhase.FINISHING)
    simulation.kill(0)
    fails(simulation, "rank 0", "signal 9")


def test_a_job_ends_only_when_it_is_evaluated_and_written(simulate):
    simulation = simulate(ranks(5, 11.5), has_evaluation=True, evaluation_ms=500)
    at_phase(simulation, JobPhase.FINISHING)
    address = simulation.processes[0].address
    simulation.handle(FinalStateSaved(**address, path="model.safetensors"))
    assert simulation.job.phase is JobPhase.FINISHING
    assert simulation.run().metrics != {}


def test_a_time_that_nothing_waits_for_changes_nothing(simulate):
    simulation = simulate(ranks(5, 11.5))
    in_mid_training(simulation, 1)
    assert simulation.core.next_deadline_s() > simulation.clock.now_s
    simulation.says_nothing(DeadlinePassed())
    simulation.run()
    simulation.clock.now_s += STOP_GRACE_S + 1
    simulation.says_nothing(DeadlinePassed())


# Ends


@pytest.mark.parametrize(
    "phase", [JobPhase.QUEUED, JobPhase.STARTING, JobPhase.GROUPING, JobPhase.TRAINING, JobPhase.FINISHING]
)
def test_a_job_can_be_cancelled_in_every_phase(simulate, phase):
    simulation = simulate(ranks(5, 5), dataset_size=300)
    if phase is JobPhase.QUEUED:
        simulation.handle(submitted("job", 2))
    at_phase(simulation, phase)
    simulation.handle(JobCancelled(job_id=JobId("job")))
    result = simulation.run()
    assert (result.outcome, result.error) == (Outcome.CANCELLED, "cancelled by request")
    if phase is not JobPhase.STARTING:
        assert simulation.sent(StopRank) == []
    assert simulation.clock.now_s < STOP_GRACE_S


def test_a_second_cancel_changes_nothing(simulate):
    simulation = simulate(ranks(5, 5))
    at_phase(simulation, JobPhase.TRAINING)
    simulation.handle(JobCancelled(job_id=JobId("job")))
    simulation.says_nothing(JobCancelled(job_id=JobId("job")))
    simulation.run()
    simulation.says_nothing(JobCancelled(job_id=JobId("job")))


def test_a_rank_that_does_not_leave_is_stopped_after_the_grace(simulate):
    simulation = simulate(ranks(5, 5))
    in_mid_training(simulation, 2)
    deaf = simulation.processes[1]
    deaf.receive = lambda command: None
    cancelled_s = simulation.clock.now_s
    simulation.handle(JobCancelled(job_id=JobId("job")))
    assert simulation.run().outcome is Outcome.CANCELLED
    (stopped,) = simulation.sent_at(StopRank)
    assert stopped[0] == pytest.approx(cancelled_s + STOP_GRACE_S)
    assert stopped[1].rank == 1


def test_a_queued_job_starts_when_the_one_before_it_ends(simulate):
    simulation = simulate(ranks(5, 5), dataset_size=300)
    simulation.start()
    simulation.handle(submitted("next", 1))
    assert simulation.core.jobs["next"].phase is JobPhase.QUEUED
    assert simulation.run().outcome is Outcome.SUCCEEDED
    assert simulation.core.jobs["next"].phase is JobPhase.STARTING
    assert [command.job_id for command in simulation.sent(StartRank)] == ["job", "job", "next"]
    simulation.handle(JobCancelled(job_id=JobId("next")))
    (stop,) = (command for command in simulation.sent(StopRank))
    simulation.core.handle(
        RankExited(
            job_id=stop.job_id, rank=stop.rank, incarnation=stop.incarnation, agent_id=stop.agent_id, exit_code=0
        ),
        now_s=99,
    )
    simulation.reports = [report for report in simulation.reports if report is not simulation.core.jobs["next"].result]
    for process in simulation.processes.values():
        process.is_alive = False


def test_a_job_that_wants_more_slots_than_there_are_waits(simulate):
    simulation = simulate([], dataset_size=300)
    slots = (Slot(device="cpu"),) * 2
    simulation.handle(AgentJoined(agent_id=AgentId("a"), host="a", slots=slots))
    simulation.handle(submitted("big", 3))
    assert simulation.core.jobs["big"].phase is JobPhase.QUEUED
    assert simulation.sent(StartRank) == []
    simulation.core.handle(AgentJoined(agent_id=AgentId("b"), host="b", slots=slots), now_s=1)
    assert [(command.agent_id, command.slot) for command in simulation.sent(StartRank)] == [
        ("a", 0),
        ("a", 1),
        ("b", 0),
    ]


def test_a_job_that_asks_for_no_number_gets_every_free_slot(simulate):
    simulation = simulate([])
    simulation.core.handle(submitted("all", 0), now_s=0)
    assert simulation.core.jobs["all"].phase is JobPhase.QUEUED
    simulation.core.handle(AgentJoined(agent_id=AgentId("a"), host="a", slots=(Slot(device="cpu"),) * 3), now_s=0)
    assert len(simulation.sent(StartRank)) == 3


def test_a_negative_number_of_ranks_takes_no_slot(simulate):
    simulation = simulate([])
    simulation.core.handle(AgentJoined(agent_id=AgentId("a"), host="a", slots=(Slot(device="cpu"),) * 3), now_s=0)
    simulation.core.handle(submitted("odd", -1), now_s=0)
    assert simulation.sent(StartRank) == []


def test_a_group_of_another_generation_is_not_the_one_that_is_waited_for(simulate):
    simulation = simulate(ranks(5, 11.5))
    at_phase(simulation, JobPhase.GROUPING)
    for generation in (0, 2):
        simulation.says_nothing(GroupFormed(**simulation.processes[0].address, generation=generation))
    assert simulation.run().outcome is Outcome.SUCCEEDED


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
        num_epochs=8,
        averaging="overlapped",
        sync_ms=1000.0,
        latency_ms=20.0,
    )
    assert simulation.run().bound_fraction > 0.94  # 0.89 when the last free batches went to the first rank

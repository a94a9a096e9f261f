"""Nobody starves, nobody waits: slow starts, bursts, tiny epochs, long evaluations. Time is virtual."""

from dataclasses import replace
from typing import Any

import pytest

from elche_coordinator.core.messages.events import ResultReceived
from elche_coordinator.core.messages.ids import Rank
from elche_coordinator.core.messages.reports import Outcome, UserEvent
from elche_coordinator.simulator.oracle import run_to_fraction
from elche_coordinator.simulator.simulation import RankModel

BAR = 0.97
DEFAULT: dict[str, Any] = {"averaging": "overlapped", "anchor": 1, "check_every": 50}


def pair(fast_ms: float = 20.0, times: float = 2.3, **slow: Any) -> list[RankModel]:
    """Two ranks, the second so many times slower, of which more is said."""
    return [RankModel(batch_ms=fast_ms), RankModel(batch_ms=fast_ms * times, **slow)]


def with_tail(*models: RankModel) -> list[RankModel]:
    """Each twentieth batch takes ten times as long."""
    return [replace(one, tail=(0.05, 10.0), jitter_fraction=0.1) for one in models]


def fraction(simulation: Any) -> float:
    result, reached = run_to_fraction(simulation)
    assert result.outcome is Outcome.SUCCEEDED
    return reached


def share(simulation: Any, rank: int, first: int, last: int) -> float:
    """A rank's part of the batches of some epochs."""
    batches = [report.rank_batches for report in simulation.epochs[first:last]]
    return sum(one[rank] for one in batches) / sum(map(sum, batches))


# Epochs


@pytest.mark.parametrize("num_batches", [1, 2, 3, 5, 23, 60])
def test_short_epochs_keep_all_ranks_busy(simulate, num_batches):
    """Of epochs of 1 to 3 batches the slower rank once had nothing."""
    simulation = simulate(pair(), dataset_size=10 * num_batches, epochs=max(8, 360 // num_batches), **DEFAULT)
    assert fraction(simulation) >= BAR
    assert share(simulation, 1, 0, 10**6) == pytest.approx(1 / 3.3, abs=0.03)


@pytest.mark.parametrize(("num_batches", "bar"), [(5, 0.96), (23, BAR), (60, BAR)])
def test_batches_of_milliseconds_with_a_heavy_tail_keep_all_ranks_busy(simulate, num_batches, bar):
    models = with_tail(*pair(2.0))
    simulation = simulate(models, dataset_size=10 * num_batches, epochs=3000 // num_batches, **DEFAULT)
    assert fraction(simulation) >= bar


def test_rare_long_batches_of_one_rank_leave_the_other_with_work(simulate):
    """Of 20 batches one took ten times as long: the other rank was idle for an eighth of the time."""
    simulation = simulate(with_tail(*pair()), dataset_size=20_000, epochs=1, **DEFAULT)
    simulation.run()
    waited_ms = sum(sum(report.rank_waited_ms) for report in simulation.rounds)
    idle = 1 - sum(one.trained_s for one in simulation.processes.values()) / (2 * simulation.clock.now_s)
    assert idle < 0.03
    assert waited_ms < 1000


def test_where_others_wait_for_an_averaging_a_short_epoch_is_no_reason_to_be_idle(simulate):
    options = {**DEFAULT, "averaging": "blocking", "sync_ms": 0.5, "latency_ms": 0.1, "persist_ms": 0.1}
    simulation = simulate(pair(), dataset_size=50, epochs=60, **options)
    assert fraction(simulation) >= 0.92  # 0.76 when the round ended with the epoch's last batch


# Slow starts and bursts


@pytest.mark.parametrize("shared", [False, True], ids=["no evaluation", "shared evaluation"])
def test_a_rank_whose_first_batches_are_slow_has_its_share_soon(simulate, shared):
    """A rank that got no batch was never measured again."""
    models = pair(first_ms=(346.0,) * 3)
    evaluation = {"has_evaluation": True, "eval_size": 360, "evaluation_ms": 40.0} if shared else {}
    simulation = simulate(models, dataset_size=230, epochs=24, **DEFAULT, **evaluation)
    fraction(simulation)
    assert share(simulation, 1, 10, 24) == pytest.approx(1 / 3.3, abs=0.03)


@pytest.mark.parametrize(
    ("averaging", "from_s", "bar"), [("overlapped", 3.0, 0.92), ("overlapped", 5.0, 0.92), ("blocking", 5.0, 0.8)]
)
def test_a_rank_that_was_slow_for_a_while_has_its_share_again(simulate, averaging, from_s, bar):
    """Another program took its device: 1,000 ms a batch where an epoch takes 300. The fraction was 0.71 when it got
    nothing afterwards, and 0.81 when the other one trained on until it was done at that speed, and held what was left.
    """
    models = pair(changes=((from_s, 1000.0), (from_s + 3, 46.0)))
    simulation = simulate(models, dataset_size=230, epochs=60, **{**DEFAULT, "averaging": averaging})
    assert fraction(simulation) >= bar
    assert share(simulation, 1, 45, 60) >= 0.25


def test_for_a_rank_that_becomes_slow_the_others_train_on_until_the_epoch_is_over(simulate):
    """Four seconds of work are given out at once, and it takes longer than that. 0.82 when there was no more."""
    simulation = simulate(pair(changes=((5.0, 1000.0), (25.0, 46.0))), dataset_size=230, epochs=100, **DEFAULT)
    assert fraction(simulation) >= 0.96


def test_stalls_of_a_second_keep_nobody_waiting(simulate):
    """The others trained on for five of the late rank's batches only, and were then idle: 0.87."""
    stalls = tuple(change for at_s in range(4, 40, 4) for change in ((at_s, 1000.0), (at_s + 0.9, 46.0)))
    simulation = simulate(pair(changes=stalls), dataset_size=25_000, epochs=1, **DEFAULT)
    assert fraction(simulation) >= 0.92


def test_one_stalled_batch_stops_nobody_else(simulate):
    """An average comes late; work does not."""
    models = pair(changes=((2.0, 300.0), (2.04, 46.0)))
    simulation = simulate(models, dataset_size=5_000, epochs=1, **DEFAULT)
    fraction(simulation)
    late = [event for event in simulation.events(ResultReceived) if event.rank == 0 and event.collective_ms > 150]
    assert late, "nothing was stalled"
    assert max(event.stalled_ms for event in late) < 100


# Many ranks, far coordinators


def test_slow_ones_of_many_ranks_have_no_more_work_than_the_others_leave_time_for(simulate):
    """Each got a hundredth of the epoch before its speed was known: of 64, the slowest were busy for a third longer."""
    models = [RankModel(batch_ms=100 * 4 ** (number / 63), jitter_fraction=0.1) for number in range(64)]
    assert fraction(simulate(models, dataset_size=20_000, epochs=1, **{**DEFAULT, "check_every": 1000})) >= 0.85


@pytest.mark.parametrize(("fast_ms", "num_batches", "bar"), [(2.0, 6_000, 0.985), (25.0, 100, 0.96)])
def test_a_coordinator_15_ms_away_keeps_nobody_waiting(simulate, fast_ms, num_batches, bar):
    options = {**DEFAULT, "latency_ms": 15.0}
    assert fraction(simulate(pair(fast_ms), dataset_size=10 * num_batches, epochs=1, **options)) >= bar


def test_messages_that_are_sent_together_arrive_together(simulate):
    """Each had to wait until the one before had arrived, so that a far coordinator seemed much further away."""
    simulation = simulate(pair(), dataset_size=1_000, epochs=1, **{**DEFAULT, "latency_ms": 100.0})
    arrived: list[float] = []
    for _ in range(20):
        simulation._let_arrive("from 0", lambda: arrived.append(simulation.clock.now_s), simulation.clock.now_s)
    simulation.clock.run(until=lambda: len(arrived) == 20, limit_s=1.0)
    assert arrived == sorted(arrived)
    assert 0.05 <= arrived[0] <= arrived[-1] <= 0.15


# Evaluations


@pytest.mark.parametrize("evaluation_ms", [10.0, 300.0, 1_500.0, 3_000.0])
def test_an_evaluation_costs_only_the_rank_that_makes_it(simulate, evaluation_ms):
    """An epoch takes 1.4 s. While one evaluated for 3 s, the others waited for most of that time."""
    options = {"has_evaluation": True, "evaluation_ms": evaluation_ms}
    simulation = simulate(pair(), dataset_size=1_000, epochs=12, **DEFAULT, **options)
    assert fraction(simulation) >= BAR


def test_an_evaluation_of_ten_epochs_costs_only_the_rank_that_makes_it(simulate):
    options = {"has_evaluation": True, "evaluation_ms": 3_200.0}
    simulation = simulate([*pair(), RankModel(batch_ms=30.0)], dataset_size=230, epochs=200, **DEFAULT, **options)
    assert fraction(simulation) >= 0.9, "all but the end, when nothing is left to train"
    assert [one.epoch for one in simulation.evaluations] == list(range(200))


def test_who_waits_for_an_evaluation_that_takes_longer_than_before_gets_more_work(simulate):
    models = [RankModel(batch_ms=20.0, evaluation_ms=100.0), RankModel(batch_ms=46.0)]
    simulation = simulate(models, dataset_size=1_000, epochs=6, has_evaluation=True, **DEFAULT)
    simulation.run_until(lambda: len(simulation.evaluations) == 2)
    simulation.processes[Rank(0)]._evaluation_s = 2.0
    before_ms = simulation.job.ranks[Rank(1)].waited_ms
    simulation.run_until(lambda: len(simulation.evaluations) == 3)
    simulation.run()
    assert simulation.job.ranks[Rank(1)].waited_ms - before_ms < 300


def test_a_first_evaluation_of_short_epochs_is_not_waited_for_with_many_of_them(simulate):
    """Of epochs of 18 ms one evaluates for 1 ms. That nobody knows how long it takes made a round of eight epochs."""
    options = {"has_evaluation": True, "evaluation_ms": 1.0}
    simulation = simulate(pair(2.0), dataset_size=130, epochs=40, **DEFAULT, **options)
    held: list[int] = []

    def is_over() -> bool:
        training = simulation.job.run.training
        held.extend(training.ledger.uncommitted_batches(rank)[1] for rank in simulation.job.ranks if training)
        return simulation.job.result is not None

    simulation.run_until(is_over)
    assert max(sum(report.rank_batches) for report in simulation.rounds) <= 3 * 13
    assert max(held) <= 3 * 13, "who waits holds no work of many epochs"


def test_who_waits_for_a_late_evaluation_of_short_batches_makes_few_more(simulate):
    """An evaluation took 1 ms, and now 60. Others go on by some batches at a time, not by a hundred."""
    options = {"has_evaluation": True, "evaluation_ms": 1.0}
    simulation = simulate([*pair(2.0), RankModel(batch_ms=3.0)], dataset_size=1_300, epochs=40, **DEFAULT, **options)
    simulation.run_until(lambda: len(simulation.evaluations) == 3)
    for process in simulation.processes.values():
        process._evaluation_s = 0.06
    before = len(simulation.rounds)
    simulation.run_until(lambda: len(simulation.evaluations) == 4)
    for process in simulation.processes.values():
        process._evaluation_s = 0.001
    simulation.run()
    assert 20 < max(sum(report.rank_batches) for report in simulation.rounds[before : before + 300]) < 110


def test_a_shared_evaluation_makes_rounds_no_longer(simulate):
    options = {"has_evaluation": True, "eval_size": 100, "evaluation_ms": 3_000.0}
    simulation = simulate(pair(), dataset_size=230, epochs=8, **DEFAULT, **options)
    assert fraction(simulation) >= BAR
    assert max(report.rank_batches[1] for report in simulation.rounds) <= 4


# What is said of a rank that has too little


def told(simulation: Any) -> list[UserEvent]:
    return [report for report in simulation.reports if isinstance(report, UserEvent)]


def test_a_rank_that_has_less_than_half_its_share_is_named_once_with_the_reason(simulate):
    options = {"has_evaluation": True, "evaluation_ms": 3_000.0}
    simulation = simulate(pair(), dataset_size=1_000, epochs=12, **DEFAULT, **options)
    simulation.run()
    (event,) = told(simulation)
    assert event.rank == 0
    assert "less than half of its share" in event.text
    assert "it evaluated for" in event.text


def test_ranks_that_have_their_share_are_not_named(simulate):
    simulation = simulate(pair(), dataset_size=230, epochs=12, **DEFAULT)
    simulation.run()
    assert told(simulation) == []


def test_of_epochs_of_milliseconds_nothing_is_said(simulate):
    """One pause of a process is longer than three of them."""
    simulation = simulate(pair(2.0, changes=((0.1, 90.0), (0.4, 4.6))), dataset_size=130, epochs=60, **DEFAULT)
    simulation.run()
    assert told(simulation) == []

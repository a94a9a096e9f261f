"""The divergence guard (row C8): what it asks for, what El Che does about it, and where its threshold comes from."""

import json
from math import inf, nan

import pytest

from elche.settings import AgreedSettings
from elche_coordinator.core.messages.events import Event, ResultReceived
from elche_coordinator.core.messages.ids import Rank
from elche_coordinator.core.messages.reports import Outcome
from elche_coordinator.core.pacing.asynchronous import Async
from elche_coordinator.core.pacing.cadence import Cadence
from elche_coordinator.core.pacing.divergence import DivergenceGuard, Drift
from elche_coordinator.core.pacing.sync import Sync
from elche_coordinator.simulator.synthetic import Saved
from support.rounds import numbered
from support.watched import LONG_ROUNDS, WatchedSimulation, from_another_time, ranks

CALM, RISING, LASTING = Drift.CALM, Drift.RISING, Drift.LASTING


def judged(*divergences: float | list[float], threshold: float = 0.05) -> list[Drift]:
    """What a new guard says of these rounds, of one rank or of several."""
    guard = DivergenceGuard(threshold)
    return [guard.judge(one if isinstance(one, list) else [one]) for one in divergences]


# What it asks for


def test_ranks_that_stay_together_are_left_alone():
    assert judged(0.01, 0.02, 0.03, 0.04, 0.05, 0.04) == [CALM] * 6


def test_three_rising_rounds_of_which_the_last_is_above_the_threshold_hold_the_anchor():
    assert judged(0.01, 0.02, 0.06) == [CALM, CALM, RISING]
    assert judged(0.01, 0.02, 0.03, 0.06, 0.07) == [CALM, CALM, CALM, RISING, RISING]


@pytest.mark.parametrize(
    "divergences",
    [(0.06, 0.07), (0.02, 0.02, 0.06), (0.02, 0.06, 0.06), (0.06, 0.02, 0.07), (0.09, 0.07, 0.08), (0.03, 0.04, 0.05)],
    ids=[
        "only two",
        "level, then up",
        "up, then level",
        "down and up",
        "not above the first",
        "not above the threshold",
    ],
)
def test_what_does_not_rise_three_times_to_above_the_threshold_is_calm(divergences):
    assert judged(*divergences)[-1] is CALM


def test_five_rounds_above_the_threshold_halve_the_anchor_and_then_five_more():
    above = [0.09, 0.08, 0.07, 0.06, 0.09]
    assert judged(*above) == [CALM] * 4 + [LASTING]
    assert judged(*above, *above) == [*[CALM] * 4, LASTING] * 2, "each five count once"
    assert judged(*above[:4], 0.05, *above[:4]) == [CALM] * 9, "one that is not above begins anew"


def test_five_that_rise_are_more_than_three_that_do():
    assert judged(0.06, 0.07, 0.08, 0.09, 0.10, 0.11) == [CALM, CALM, RISING, RISING, LASTING, CALM]


def test_the_rank_that_is_farthest_off_counts():
    assert judged([0.01, 0.02], [0.03, 0.01], [0.01, 0.06]) == [CALM, CALM, RISING]
    assert judged(*[[0.09, 0.0]] * 5)[-1] is LASTING


def test_a_threshold_of_zero_switches_it_off():
    assert judged(*[1e9, inf, nan] * 4, threshold=0.0) == [CALM] * 12


def test_a_round_in_which_nobody_measured_changes_nothing():
    assert judged(0.01, 0.02, [], 0.06) == [CALM, CALM, CALM, RISING]


@pytest.mark.parametrize("lost", [nan, inf])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_whose_parameters_are_lost_does_not_silence_the_guard(lost, rank):
    """`max` of a NaN and a number depends on which comes first, and a NaN is above no threshold."""
    of_ranks = [[lost, 0.01], [0.01, lost]][rank]
    assert judged(*[of_ranks] * 5)[-1] is LASTING
    assert judged(0.01, 0.02, of_ranks)[-1] is RISING


def test_it_goes_on_with_the_rounds_that_it_has_seen():
    first, again = DivergenceGuard(), DivergenceGuard()
    for divergence in (0.09, nan, 0.08, 0.07):
        first.judge([divergence])
    kept = json.loads(json.dumps(first.to_json(), allow_nan=False))
    again.restore(kept)
    assert again.to_json() == [0.09, None, 0.08, 0.07]
    assert again.judge([0.06]) is LASTING
    again.restore([0.01] * 9)
    assert again.to_json() == [0.01] * 5, "no more than it would have kept"


# What El Che does about it


def calibrated(kind: type[Cadence] = Cadence, **changes: object) -> Cadence:
    """Of two equal ranks at an anchor of 20, with averagings so dear that it wants to grow."""
    options = (
        {"dataset_size": 9, "batch_size": 1, "epochs": 1, "policy": "cadence"} | LONG_ROUNDS | {"anchor": 20} | changes
    )
    policy = kind(AgreedSettings(**options), [Rank(0), Rank(1)])
    policy.learn(numbered(200.0, 200.0), numbered(20, 20), 15.0)
    assert policy.anchor == 20
    return policy


@pytest.mark.parametrize("kind", [Cadence, Async])
def test_an_anchor_that_would_grow_is_held_while_ranks_drift_apart(kind):
    calm, rising = calibrated(kind), calibrated(kind)
    calm.learn(numbered(200.0, 200.0), numbered(20, 20), 100.0, CALM)
    rising.learn(numbered(200.0, 200.0), numbered(20, 20), 100.0, RISING)
    assert (calm.anchor, rising.anchor) == (100, 20)


@pytest.mark.parametrize("kind", [Cadence, Async])
def test_an_anchor_is_halved_when_ranks_keep_drifting_apart(kind):
    policy = calibrated(kind)
    anchors = []
    for _ in range(6):
        policy.learn(numbered(200.0, 200.0), numbered(20, 20), 100.0, LASTING)
        anchors.append(policy.anchor)
    assert anchors == [10, 5, 3, 2, 1, 1], "also below what it began with"


def test_speeds_are_learnt_all_the_same():
    policy = calibrated()
    for _ in range(20):
        policy.learn(numbered(100.0, 300.0), numbered(20, 20), 100.0, RISING)
    assert policy._el_che.ms_per_batch == pytest.approx([5.0, 15.0], rel=0.05)


def test_sync_has_no_anchor_to_hold_or_halve():
    policy = Sync()
    policy.learn(numbered(1.0, 1.0), numbered(1, 1), 1.0, LASTING)
    assert policy.anchor == 1


# In a job


class Drifting(WatchedSimulation):
    """Ranks that say how far they have drifted apart: in each round as `divergences` has it, rank by rank."""

    divergences: tuple[float | None, ...] = (0.01, 0.2)

    def handle(self, event: Event) -> None:
        """Synthetic ranks have no weights that could diverge."""
        if isinstance(event, ResultReceived):
            event = from_another_time(event, divergence=self.divergences[event.rank])
        super().handle(event)


def drifting(*divergences: float | None, resumed: Saved | None = None, **changes: object) -> Drifting:
    """Two ranks whose averagings are so dear that the anchor grows from 4 to 200 unless it is held."""
    options = {
        "dataset_size": 4_000,
        "batch_size": 10,
        "epochs": 1,
        "policy": "cadence",
        "anchor": 4,
        "max_anchor": 16,
        "overhead_target": 0.1,
    } | changes
    simulation = Drifting(settings=AgreedSettings(**options), ranks=ranks(5, 5), sync_ms=40.0, resumed=resumed)
    simulation.divergences = divergences
    return simulation


def anchors(simulation: WatchedSimulation) -> list[int]:
    """After each committed round."""
    return [report.anchor for report in simulation.rounds]


def test_ranks_that_keep_drifting_apart_average_more_often():
    """Averagings are so dear here that the anchor goes to its maximum, and back to it after each time it is halved."""
    together, apart = drifting(0.01, 0.01), drifting(0.01, 0.2)
    for simulation in (together, apart):
        assert simulation.run().outcome is Outcome.SUCCEEDED
    assert anchors(together) == [4, *[16] * 13]
    assert anchors(apart) == [4, 16, 16, 16, 8, 16, 16, 16, 16, 8, 16, 16, 16, 16, 8]


@pytest.mark.parametrize(("threshold", "is_halved"), [(0.05, True), (0.19, True), (0.2, False), (0.0, False)])
def test_the_threshold_is_the_jobs(threshold, is_halved):
    simulation = drifting(0.01, 0.2, divergence_threshold=threshold)
    simulation.run()
    assert (8 in anchors(simulation)) == is_halved


def test_a_job_under_sync_is_left_alone():
    simulation = drifting(0.9, 0.9, policy="sync", dataset_size=400)
    assert simulation.run().outcome is Outcome.SUCCEEDED
    assert set(anchors(simulation)) == {1}


def test_ranks_that_measure_nothing_are_left_alone():
    simulation = drifting(None, None)
    simulation.run()
    assert 8 not in anchors(simulation)


def test_a_job_that_goes_on_remembers_how_its_ranks_drifted():
    """Four rounds above the threshold before the checkpoint and one after it are five."""
    first = drifting(0.01, 0.2)
    first.run_until(lambda: len(first.rounds) == 4)
    assert anchors(first) == [4, 16, 16, 16]
    training = json.dumps(first.training.snapshot(), allow_nan=False)
    saved = Saved("checkpoint", first.processes[Rank(0)].parameters, training)
    again = drifting(0.01, 0.2, resumed=saved)
    again.run()
    assert anchors(again)[0] == 8
    again.assert_exactly_once()


def test_a_checkpoint_from_before_the_guard_was_kept_is_gone_on_from():
    first = drifting(0.01, 0.2)
    first.run_until(lambda: len(first.rounds) == 4)
    training = first.training.snapshot()
    del training["divergences"]
    saved = Saved("checkpoint", first.processes[Rank(0)].parameters, json.dumps(training))
    again = drifting(0.01, 0.2, resumed=saved)
    assert again.run().outcome is Outcome.SUCCEEDED
    assert anchors(again)[0] == 16


@pytest.mark.parametrize("divergences", [5, ["much"], [[]], [10**400]])
def test_a_checkpoint_whose_divergences_are_none_is_refused(divergences):
    first = drifting(0.01, 0.2)
    first.run_until(lambda: len(first.rounds) == 4)
    training = first.training.snapshot() | {"divergences": divergences}
    saved = Saved("checkpoint", first.processes[Rank(0)].parameters, json.dumps(training))
    result = drifting(0.01, 0.2, resumed=saved).run()
    assert (result.outcome, result.invalid) == (Outcome.FAILED, True)

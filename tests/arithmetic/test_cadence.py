"""El Che's stories: how counts and anchor follow what the ranks report."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elche.cadence import ElChe, clamped_counts
from elche.partition import round_half_away

VECTORS = json.loads((Path(__file__).parent / "vectors" / "el_che.json").read_text())
OPTIONS = {
    "overhead_target": "overhead_target",
    "max_anchor": "max_anchor",
    "max_batch_diff": "max_count_change",
    "speed_ratio": "speed_ratio",
}
"""Each option's name in the recorded runs, and here."""


def calibrated(ms: list[float], anchor: int = 10, **options: Any) -> ElChe:
    """A cadence that has seen one round, at `ms` per batch and rank, averaged for free."""
    che = ElChe(len(ms), anchor, **options)
    report(che, ms)
    return che


def report(che: ElChe, ms: list[float], sync_ms: float = 0.0) -> None:
    che.report_timing([10 * each for each in ms], [10] * len(ms), sync_ms)


# E9: recorded runs


def assert_recorded(che: ElChe, recorded: dict[str, Any]) -> None:
    assert che.anchor == recorded["anchor"]
    assert che.batch_counts == recorded["batch_counts"]
    assert che.is_calibrated == recorded["calibrated"]
    assert che.anchor_wall_ms == pytest.approx(recorded["anchor_wall_ms"], rel=1e-9, abs=0)
    if "total_batches" in recorded:
        assert sum(che.batch_counts) == recorded["total_batches"]
        assert che.ms_per_batch == pytest.approx(recorded["ms_per_batch"], rel=1e-9, abs=0)


def perform(che: ElChe, step: dict[str, Any]) -> None:
    match step["op"]:
        case "report_timing":
            che.report_timing(step["wall_ms"], step["actual_batches"], step["sync_ms"])
        case "nudge_anchor_down":
            che.nudge_anchor_down(step["factor"])
        case "clamp_total":
            assert clamped_counts(che.batch_counts, step["max_total"]) == step["result"]
        case unknown:
            pytest.fail(f"unknown step {unknown}")


@pytest.mark.parametrize("persisted", [False, True], ids=["in memory", "through JSON at every step"])
@pytest.mark.parametrize("run", VECTORS, ids=lambda run: f"seed {run['seed']}")
def test_recorded_run_replays_exactly(run: dict[str, Any], persisted: bool) -> None:
    che = ElChe(
        run["world_size"], run["anchor"], **{here: run[there] for there, here in OPTIONS.items() if there in run}
    )
    assert_recorded(che, run["initial"])
    for step in run["steps"]:
        if persisted:
            che = ElChe.from_json(json.loads(json.dumps(che.to_json())))
        perform(che, step)
        assert_recorded(che, step)


# E1, E2: construction


def test_before_any_report_all_ranks_do_the_anchor() -> None:
    che = ElChe(3, 7)
    assert che.batch_counts == [7, 7, 7]
    assert not che.is_calibrated
    assert che.anchor_wall_ms == 0
    assert che.ms_per_batch == [0, 0, 0]


@pytest.mark.parametrize(
    ("arguments", "options", "named"),
    [
        ((1, 10), {}, "world_size is 1"),
        ((2, 0), {}, "anchor is 0"),
        ((2, -3), {}, "anchor is -3"),
        ((2, 2.5), {}, "anchor is 2.5"),
        ((2, 10), {"overhead_target": math.nan}, "overhead_target is nan"),
        ((2, 10), {"max_anchor": math.nan}, "max_anchor is nan"),
        ((2, 10), {"max_count_change": -1}, "max_count_change is -1"),
        ((2, 10), {"speed_ratio": (2, 2.0)}, "slow_rank is 2"),
        ((2, 10), {"speed_ratio": (-1, 2.0)}, "slow_rank is -1"),
        ((2, 10), {"speed_ratio": (0, math.nan)}, "ratio is nan"),
        ((2, 10), {"speed_ratio": (0, math.inf)}, "ratio is inf"),
    ],
)
def test_bad_construction_is_refused_by_name(arguments: tuple[Any, Any], options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        ElChe(*arguments, **options)


def test_max_anchor_below_the_anchor_lowers_the_anchor_but_not_yet_the_counts() -> None:
    che = ElChe(2, 10, max_anchor=4)
    assert (che.anchor, che.batch_counts) == (4, [10, 10])
    report(che, [5.0, 10.0])
    assert che.batch_counts == [8, 4]


def test_max_anchor_applies_before_the_speed_hint() -> None:
    assert ElChe(2, 10, max_anchor=4, speed_ratio=(1, 2.5)).batch_counts == [10, 4]


def test_max_anchor_of_zero_counts_as_one() -> None:
    assert ElChe(2, 10, max_anchor=0).anchor == 1


def test_hint_gives_the_others_the_ratio_rounding_halves_up() -> None:
    che = ElChe(3, 5, speed_ratio=(1, 2.5))
    assert che.batch_counts == [13, 5, 13]
    assert not che.is_calibrated


def test_hint_below_one_counts_as_one() -> None:
    assert ElChe(2, 10, speed_ratio=(0, 0.2)).batch_counts == [10, 10]


def test_wrong_hint_is_corrected_by_the_first_report() -> None:
    assert calibrated([10.0, 20.0], speed_ratio=(0, 4.0)).batch_counts == [20, 10]


# E3: learning speeds


def test_first_measurement_is_taken_raw() -> None:
    che = calibrated([20.0, 10.0, 5.0])
    assert che.ms_per_batch == [20, 10, 5]
    assert che.batch_counts == [10, 20, 40]
    assert che.anchor_wall_ms == 200


def test_late_rank_takes_its_own_first_measurement_raw() -> None:
    che = ElChe(2, 10)
    che.report_timing([200.0, 0.0], [10, 0], 0.0)
    assert che.batch_counts == [10, 10]
    che.report_timing([200.0, 50.0], [10, 10], 0.0)
    assert che.ms_per_batch == [20, 5]


@pytest.mark.parametrize(
    ("measured_ms", "weight"),
    [(10.1, 0.1), (15.0, 0.5), (40.0, 0.8)],
    ids=["noise hardly counts", "weight is the relative error", "a jump counts most"],
)
def test_weight_follows_the_prediction_error(measured_ms: float, weight: float) -> None:
    che = calibrated([10.0, 20.0])
    report(che, [measured_ms, 20.0])
    assert che.ms_per_batch[0] == pytest.approx(weight * measured_ms + (1 - weight) * 10.0)


@pytest.mark.parametrize(("wall_ms", "num_batches"), [(0.0, 10), (90.0, 0), (-5.0, 10)])
def test_rank_without_time_or_batches_keeps_its_speed(wall_ms: float, num_batches: int) -> None:
    che = calibrated([10.0, 20.0])
    che.report_timing([wall_ms, 200.0], [num_batches, 10], 0.0)
    assert che.ms_per_batch == [10, 20]


def test_missing_actual_batches_count_as_none() -> None:
    che = calibrated([10.0, 20.0])
    che.report_timing([50.0, 900.0], [10], 0.0)
    assert che.ms_per_batch[1] == 20


def test_report_without_any_timing_ever_changes_nothing() -> None:
    che = ElChe(2, 10)
    before = che.to_json()
    che.report_timing([500.0, 500.0], [0, 0], 400.0)
    assert che.to_json() == before


@pytest.mark.parametrize(
    ("wall_ms", "actual_batches", "sync_ms", "named"),
    [
        ([100.0], [10, 10], 0.0, "wall_ms has 1"),
        ([100.0, 100.0, 100.0], [10, 10], 0.0, "wall_ms has 3"),
        ([100.0, math.nan], [10, 10], 0.0, "wall_ms of rank 1 is nan"),
        ([math.inf, 100.0], [10, 10], 0.0, "wall_ms of rank 0 is inf"),
        ([100.0, 100.0], [10, 10], math.nan, "sync_ms is nan"),
        ([100.0, 100.0], [10, -1], 0.0, "actual_batches of rank 1 is -1"),
    ],
)
def test_bad_report_is_refused_and_leaves_no_trace(
    wall_ms: list[float], actual_batches: list[int], sync_ms: float, named: str
) -> None:
    che = calibrated([10.0, 20.0])
    before = che.to_json()
    with pytest.raises(ValueError, match=named):
        che.report_timing(wall_ms, actual_batches, sync_ms)
    assert che.to_json() == before


# E4: tuning the anchor


def test_costly_averaging_raises_the_anchor_at_once() -> None:
    che = ElChe(2, 10)
    report(che, [10.0, 10.0], sync_ms=31.0)
    assert che.anchor == 31
    assert che.batch_counts == [31, 31]


def test_anchor_stops_at_its_maximum() -> None:
    che = ElChe(2, 10, max_anchor=25)
    report(che, [10.0, 10.0], sync_ms=1e6)
    assert che.anchor == 25


def test_cheap_averaging_lowers_the_anchor_by_one_down_to_the_floor() -> None:
    che = ElChe(2, 10)
    report(che, [10.0, 10.0], sync_ms=12.0)
    anchors = []
    for _ in range(4):
        report(che, [10.0, 10.0], sync_ms=1.0)
        anchors.append(che.anchor)
    assert anchors == [11, 10, 10, 10]


def test_overhead_between_half_the_target_and_the_target_is_left_alone() -> None:
    che = ElChe(2, 10)
    report(che, [10.0, 10.0], sync_ms=20.0)
    report(che, [10.0, 10.0], sync_ms=7.0)
    assert che.anchor == 20


def test_averaging_that_costs_nothing_never_lowers_the_anchor() -> None:
    che = ElChe(2, 10)
    report(che, [10.0, 10.0], sync_ms=20.0)
    for _ in range(5):
        report(che, [10.0, 10.0], sync_ms=0.0)
    assert che.anchor == 20


@pytest.mark.parametrize(("asked", "anchor"), [(0.9, 12), (0.001, 200)])
def test_overhead_target_is_kept_within_its_bounds(asked: float, anchor: int) -> None:
    che = ElChe(2, 10, overhead_target=asked)
    report(che, [10.0, 10.0], sync_ms=60.0)
    assert che.anchor == anchor


# E5: counts


def test_unmeasured_rank_does_the_anchor() -> None:
    che = ElChe(3, 10)
    che.report_timing([200.0, 100.0, 0.0], [10, 10, 0], 0.0)
    assert che.batch_counts == [10, 20, 10]


def test_halves_round_away_from_zero() -> None:
    assert calibrated([20.0, 8.0], anchor=1).batch_counts == [1, 3]
    assert calibrated([30.0, 12.0], anchor=5).batch_counts == [5, 13]


def test_change_of_ten_percent_or_less_is_ignored() -> None:
    che = calibrated([20.0, 10.0])
    for _ in range(50):
        report(che, [20.0, 9.1])
    assert round(10 * 20.0 / che.ms_per_batch[1]) == 22
    assert che.batch_counts == [10, 20]
    for _ in range(50):
        report(che, [20.0, 8.7])
    assert che.batch_counts == [10, 23]


def test_dead_zone_holds_for_the_slow_rank_too() -> None:
    che = ElChe(2, 10)
    report(che, [10.0, 10.0], sync_ms=20.0)
    report(che, [10.0, 10.0], sync_ms=1.0)
    assert (che.anchor, che.batch_counts) == (19, [20, 20])


def test_max_count_change_limits_each_change_but_not_the_first_calibration() -> None:
    che = calibrated([40.0, 10.0], max_count_change=3)
    assert che.batch_counts == [10, 40]
    counts = []
    for _ in range(3):
        report(che, [40.0, 40.0])
        counts.append(che.batch_counts[1])
    assert counts == [37, 34, 31]


def test_a_largest_change_of_zero_freezes_the_counts_once_calibrated() -> None:
    che = calibrated([40.0, 10.0], max_count_change=0)
    report(che, [10.0, 40.0], sync_ms=1000.0)
    assert che.batch_counts == [10, 40]
    assert che.anchor > 10


def test_absurd_speed_ratios_do_not_overflow() -> None:
    che = ElChe(2, 10)
    che.report_timing([1e300, 5e-324], [1, 1], 1e300)
    assert che.batch_counts == [100, 2**53]
    assert ElChe(2, 10, speed_ratio=(0, 1e308)).batch_counts == [10, 2**53]


# E6: nudging


def test_nudge_goes_under_the_floor_but_never_under_one() -> None:
    che = calibrated([20.0, 10.0])
    che.nudge_anchor_down(0.55)
    assert (che.anchor, che.batch_counts) == (6, [6, 12])
    for _ in range(5):
        che.nudge_anchor_down(0.1)
    assert (che.anchor, che.batch_counts) == (1, [1, 2])


@pytest.mark.parametrize(("factor", "anchor"), [(-3.0, 1), (0.0, 1), (1.0, 10), (7.0, 10)])
def test_nudge_factor_is_kept_within_its_bounds(factor: float, anchor: int) -> None:
    che = ElChe(2, 10)
    che.nudge_anchor_down(factor)
    assert che.anchor == anchor


def test_nudge_before_any_measurement_leaves_the_counts() -> None:
    che = ElChe(2, 10, speed_ratio=(0, 3.0))
    che.nudge_anchor_down(0.5)
    assert (che.anchor, che.batch_counts) == (5, [10, 30])


def test_nudge_that_is_not_a_number_is_refused() -> None:
    che = ElChe(2, 10)
    with pytest.raises(ValueError, match="factor is nan"):
        che.nudge_anchor_down(math.nan)
    assert che.anchor == 10


# E7: the end of an epoch


@pytest.mark.parametrize(
    ("max_total", "counts"),
    [
        (70, [10, 20, 40]),
        (69, [10, 20, 39]),
        (35, [5, 10, 20]),
        (12, [2, 4, 6]),
        (3, [1, 1, 1]),
        (2, [1, 1, 1]),
        (0, [1, 1, 1]),
    ],
)
def test_clamp_keeps_proportions_and_gives_every_rank_one(max_total: int, counts: list[int]) -> None:
    assert clamped_counts([10, 20, 40], max_total) == counts


def test_clamp_to_less_than_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="max_total is -1"):
        clamped_counts([10, 10], -1)


# E8: reading


def test_lists_are_copies() -> None:
    che = calibrated([20.0, 10.0])
    che.batch_counts.clear()
    che.ms_per_batch.clear()
    assert (che.batch_counts, che.ms_per_batch) == ([10, 20], [20, 10])


# Persistence


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"anchor": 0}, "anchor is 0"),
        ({"anchor": 201}, "anchor is 201"),
        ({"ranks": []}, "world_size is 0"),
        ({"ranks": [{"num_batches": 1}] * 2}, "not the state of a cadence"),
        ({"ranks": [{"num_batches": 0, "ms_per_batch": 1.0}] * 2}, "num_batches is 0"),
        ({"ranks": [{"num_batches": 1, "ms_per_batch": math.nan}] * 2}, "ms_per_batch is nan"),
        ({"ranks": [{"num_batches": 1, "ms_per_batch": -1.0}] * 2}, "ms_per_batch is -1"),
    ],
)
def test_impossible_state_is_refused(change: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        ElChe.from_json({**ElChe(2, 10).to_json(), **change})


def test_state_with_a_missing_field_is_refused() -> None:
    with pytest.raises(ValueError, match="floor_anchor"):
        ElChe.from_json({"ranks": []})


# Whatever is reported


@st.composite
def rounds(draw: st.DrawFn) -> tuple[ElChe, list[tuple[list[float], list[int], float]]]:
    world_size = draw(st.integers(2, 6))
    che = ElChe(
        world_size,
        draw(st.integers(1, 300)),
        overhead_target=draw(st.floats(-1, 2)),
        max_anchor=draw(st.integers(0, 400)),
        max_count_change=draw(st.none() | st.integers(0, 50)),
        speed_ratio=draw(st.none() | st.tuples(st.integers(0, world_size - 1), st.floats(0, 1e300))),
    )
    times = st.floats(allow_nan=False, allow_infinity=False)
    report_of_world = st.tuples(
        st.lists(times, min_size=world_size, max_size=world_size),
        st.lists(st.integers(0, 10_000), max_size=world_size),
        times,
    )
    return che, draw(st.lists(report_of_world, max_size=8))


@given(rounds())
def test_counts_and_anchor_stay_sane(case: tuple[ElChe, list[tuple[list[float], list[int], float]]]) -> None:
    che, reports = case
    for wall_ms, actual_batches, sync_ms in reports:
        che.report_timing(wall_ms, actual_batches, sync_ms)
        state = che.to_json()
        assert all(1 <= count <= 2**53 for count in che.batch_counts)
        assert 1 <= che.anchor <= state["max_anchor"]  # type: ignore[operator]
        assert all(math.isfinite(ms) and ms >= 0 for ms in che.ms_per_batch)
        assert ElChe.from_json(json.loads(json.dumps(state))).to_json() == state


@given(st.lists(st.integers(1, 10_000), min_size=2, max_size=8), st.integers(0, 20_000))
def test_clamped_counts_use_up_the_total_and_exceed_it_only_by_obligatory_ones(
    counts: list[int], max_total: int
) -> None:
    clamped = clamped_counts(counts, max_total)
    num_obligatory = sum(count * max_total < sum(counts) for count in counts)
    assert all(1 <= new <= old + 1 for new, old in zip(clamped, counts, strict=True))
    assert 0 <= sum(clamped) - min(max_total, sum(counts)) <= num_obligatory


def test_clamping_may_give_an_early_rank_one_more_than_its_count() -> None:
    """The remainder is handed out by rank alone (row E7)."""
    assert clamped_counts([1, 2, 2], 4) == [2, 1, 1]


def test_ranks_that_stay_keep_what_they_learned_and_newcomers_begin_in_the_middle() -> None:
    che = calibrated([40.0, 10.0, 20.0])
    fewer = che.with_ranks([[2], [0]])
    assert fewer.ms_per_batch == [20.0, 40.0]
    assert fewer.batch_counts == [che.batch_counts[2], che.batch_counts[0]]
    more = che.with_ranks([[0], [1], [2], [1, 2], []])
    assert more.ms_per_batch == [40.0, 10.0, 20.0, 15.0, 20.0], "of their kind, or of all"
    assert more.batch_counts[3] == round_half_away(che.anchor * 40 / 15)
    more.report_timing([400.0] * 5, [10, 40, 20, 20, 20], 0.0)
    assert che.ms_per_batch == [40.0, 10.0, 20.0], "it is another cadence"
    with pytest.raises(ValueError, match="world_size is 1"):
        che.with_ranks([[0]])
    with pytest.raises(ValueError, match="like is 3"):
        che.with_ranks([[0], [3]])

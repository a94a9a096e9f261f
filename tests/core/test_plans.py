"""Plans of the policies by example: what each rank makes until the next round, and what it is leased for that."""

from dataclasses import replace
from random import Random

import pytest

from elche.settings import AgreedSettings
from elche_coordinator.core.messages.ids import Rank
from elche_coordinator.core.pacing.cadence import SOLO_ROUND_MS
from elche_coordinator.core.pacing.counts import (
    counts_near,
    counts_to_finish,
    dealt_free,
    elapsed_ms,
    finish_ms,
    in_samples,
    with_ms_per_batch,
)
from elche_coordinator.core.pacing.policies import new_policy
from elche_coordinator.core.pacing.policy import Pace, Policy, RoundPlan, Work
from elche_coordinator.core.pacing.sync import SYNC_LEASE, SYNC_WINDOW
from support.effort import lines_run
from support.rounds import numbered
from support.watched import LONG_ROUNDS


def pace(rank: int, ms: float | None, **more: float) -> Pace:
    options: dict[str, float] = {"batch_size": 10, **more}
    return Pace(rank=Rank(rank), ms_per_batch=ms, **options)  # type: ignore[arg-type]


def holding(rank: int, ms: float, num_batches: int, **more: float) -> Pace:
    """A rank that has so many batches leased, all of this epoch."""
    return pace(rank, ms, leased=num_batches, leased_total=num_batches, **more)


def measured(name: str = "cadence", *ms: float, **changes: object) -> Policy:
    """A policy that knows the ranks' speeds; its anchor is 10."""
    options = {"dataset_size": 10_000, "batch_size": 10, "epochs": 3, "policy": name} | LONG_ROUNDS | changes
    policy = new_policy(AgreedSettings(**options), [Rank(rank) for rank in range(len(ms))])  # type: ignore[arg-type]
    policy.learn(numbered(*(10 * one for one in ms)), {Rank(rank): 10 for rank in range(len(ms))}, 0.0)
    return policy


def work(free: int, **more: float) -> Work:
    options: dict[str, float] = {"epoch_batches": 1_000, "free_batches": free, "free_samples": free * 10}
    return Work(**{"free_later": 0, **options, **more})  # type: ignore[arg-type]


def planned(policy: Policy, some: list[Pace], left: Work) -> RoundPlan:
    plan = policy.plan(some, left)
    assert plan is not None
    return plan


# Counts


def test_of_lengths_that_are_nearly_as_good_the_nearest_is_taken() -> None:
    """Not one a quarter longer, for half a thousandth less of waiting."""
    assert counts_near([pace(0, 10), pace(1, 10.2)], 204) == {0: 20, 1: 20}


def test_a_round_has_a_batch_of_the_slowest_at_least() -> None:
    assert counts_near([pace(0, 10), pace(1, 20)], 0) == {0: 2, 1: 1}


def test_the_slowest_begins_when_it_can() -> None:
    assert counts_near([pace(0, 25), pace(1, 50, delay_ms=100)], 600) == {0: 24, 1: 10}


def test_who_gets_nothing_more_of_an_epoch_ends_it_with_what_it_has_of_it() -> None:
    """And not with what it has of the next one."""
    slow, fast = pace(0, 100, leased=3, leased_total=5), holding(1, 10, 3)
    assert counts_to_finish([slow, fast], 4) == {0: 3, 1: 7}


def test_batches_of_another_size_take_so_much_of_what_is_free() -> None:
    double, normal = pace(0, 20, ratio=2.0, batch_size=20), pace(1, 10)
    assert counts_to_finish([double], 6) == {0: 3}
    assert dealt_free([double], {Rank(0): 9}, 6) == {0: 3}
    assert counts_to_finish([double, normal], 12) == {0: 3, 1: 6}
    halves = [pace(rank, 10, ratio=0.5, batch_size=5) for rank in range(3)]
    assert sorted(counts_to_finish(halves, 1).values()) == [0, 1, 1]
    assert in_samples([double, normal], {Rank(0): 3, Rank(1): 6}) == {0: 60, 1: 60}


def test_free_work_goes_first_to_who_would_run_out_first() -> None:
    some = [holding(0, 10, 9), holding(1, 10, 2), holding(2, 30, 1)]
    assert dealt_free(some, {Rank(rank): 12 for rank in range(3)}, 3) == {0: 0, 1: 2, 2: 1}


def dealt_one_by_one(paces: list[Pace], wanted: dict[Rank, int], free: float) -> dict[Rank, int]:
    lease = dict.fromkeys(wanted, 0)
    while free > 1e-9 and (short := [one for one in paces if one.leased_total + lease[one.rank] < wanted[one.rank]]):
        first = min(short, key=lambda one: (finish_ms(one, one.leased_total + lease[one.rank]), one.rank))
        lease[first.rank] += 1
        free -= first.ratio
    return lease


@pytest.mark.parametrize("seed", range(20))
def test_free_work_is_dealt_as_if_one_by_one(seed: int) -> None:
    random = Random(seed)
    some = [
        holding(rank, random.choice([1.5, 7, 10, 31]), random.randrange(9), delay_ms=random.choice([0, -3, 250.0]))
        for rank in range(random.randrange(1, 6))
    ]
    if seed % 2:
        some = [replace(one, ratio=random.choice([0.5, 1, 2])) for one in some]
    wanted = {one.rank: random.randrange(80) for one in some}
    for free in (0, 1, 7, 40, 150, 1000):
        assert dealt_free(some, wanted, free) == dealt_one_by_one(some, wanted, free)


def test_dealing_a_long_epoch_is_little_work() -> None:
    """One by one it held the coordinator up for seconds, as each batch of it cost a step."""
    some = [holding(rank, 10 + rank, 2) for rank in range(8)]
    for free in (10**5, 10**12):
        wanted = dict.fromkeys((one.rank for one in some), 10**5)
        assert lines_run(lambda free=free, wanted=wanted: dealt_free(some, wanted, free)) < 5000


def test_a_round_lasts_since_its_snapshot() -> None:
    assert elapsed_ms(pace(0, 10, made=2)) == 20
    assert elapsed_ms(pace(0, 10, made=2, delay_ms=-5)) == 25
    assert elapsed_ms(pace(0, 10, made=2, delay_ms=5)) == 20


def test_an_assumed_speed_is_as_if_the_round_began_now() -> None:
    assert with_ms_per_batch(pace(0, 10, made=2, delay_ms=-5), 7.0) == pace(0, 7.0)


# El Che


def test_the_slowest_ranks_anchor_is_the_length_of_a_round() -> None:
    plan = planned(measured("cadence", 25.0, 50.0), [pace(0, 25), pace(1, 50)], work(1000))
    assert plan.counts == {0: 20, 1: 10}
    assert not plan.is_fixed
    assert plan.is_announced
    assert plan.reason == "a round of 0.50 s: 10 to 20 batches by rank, so that all arrive together"


def test_what_is_made_of_a_round_is_taken_off_its_length() -> None:
    """A round that is planned late would otherwise be as long as two."""
    some = [holding(0, 25, 30, made=8), holding(1, 50, 30, made=4)]
    assert planned(measured("cadence", 25.0, 50.0), some, work(1000)).counts == {0: 20, 1: 10}


@pytest.mark.parametrize(("free", "count"), [(1000, 10), (54, 9), (50, 8), (44, 11)])
def test_the_last_rounds_of_an_epoch_are_of_one_length(free: int, count: int) -> None:
    """25 batches of each of two ranks are 8, 8 and 9; not 10, 10 and a short rest, and 22 are 11 and 11."""
    plan = planned(measured("cadence", 10.0, 10.0), [pace(0, 10), pace(1, 10)], work(free))
    assert plan.counts == {0: count, 1: count}


def test_a_rest_that_is_little_longer_than_a_round_is_one_round() -> None:
    plan = planned(measured("cadence", 10.0, 10.0), [pace(0, 10), pace(1, 10)], work(24))
    assert plan.counts == {0: 12, 1: 12}
    assert plan.is_fixed
    assert plan.reason.endswith("; it ends the epoch")


def test_ranks_are_leased_their_counts_and_a_spare_and_no_more() -> None:
    """40 ms of spare are 2 batches of 25 ms, and at least 2: of what others leave."""
    policy, some = measured("cadence", 10.0, 10.0), [pace(0, 10), pace(1, 10)]
    assert planned(policy, some, work(1000)).lease_samples == {0: 130, 1: 130}
    assert planned(policy, some, work(1000, overlap_ms=100.0)).lease_samples == {0: 260, 1: 260}


def test_what_is_leased_for_the_round_is_not_free_for_spares() -> None:
    some = [pace(0, 10), pace(1, 10), pace(2, 10), pace(3, 10)]
    left = work(90, overlap_ms=1000.0)
    plan = planned(measured("cadence", 10.0, 10.0, 10.0, 10.0), some, left)
    assert sum(plan.lease_samples.values()) == 900


def test_a_revised_round_ends_when_it_was_to_end_and_has_a_batch_more_of_each() -> None:
    policy, some = measured("cadence", 25.0, 50.0), [holding(0, 25, 30, made=8), holding(1, 50, 30, made=4)]
    assert policy.revise(some, elapsed_ms=200.0) == {0: 20, 1: 10}
    assert policy.revise(some, elapsed_ms=500.0) == {0: 10, 1: 5}
    assert policy.revise(some, elapsed_ms=900.0) == {0: 10, 1: 5}


def test_ranks_that_have_become_slower_make_fewer_batches_of_it() -> None:
    """The round keeps the length that El Che has found, until El Che knows better."""
    plan = planned(measured("cadence", 50.0, 50.0), [pace(0, 100), pace(1, 100)], work(1000))
    assert plan.counts == {0: 5, 1: 5}


def test_a_rank_alone_has_rounds_of_five_seconds() -> None:
    policy = measured("cadence", 250.0)
    assert planned(policy, [pace(0, 250)], work(1000)).counts == {0: SOLO_ROUND_MS / 250}
    assert planned(policy, [pace(0, 2 * SOLO_ROUND_MS)], work(1000)).counts == {0: 1}


# max_batch_diff


def test_bounded_ranks_are_no_further_apart_and_the_round_keeps_its_targets() -> None:
    policy, some = measured("cadence", 10.0, 50.0, max_batch_diff=5), [pace(0, 10), pace(1, 50)]
    plan = planned(policy, some, work(1000))
    assert plan.counts == {0: 15, 1: 10}
    assert plan.is_fixed
    assert policy.can_revise
    assert not measured("cadence", 10.0, 50.0, max_batch_diff=0).can_revise


def test_bounded_ranks_get_a_shorter_round_where_less_is_left() -> None:
    """Or the slow rank waits for batches that there are not, and the fast one at its bound for the slow one."""
    policy, some = measured("cadence", 10.0, 50.0, max_batch_diff=2), [pace(0, 10), pace(1, 50)]
    plan = planned(policy, some, work(15))
    assert max(plan.counts.values()) - min(plan.counts.values()) <= 2
    assert sum(plan.counts.values()) <= 15
    assert min(plan.counts.values()) >= 1


def test_an_end_of_an_epoch_that_takes_ranks_too_far_apart_is_more_than_one_round() -> None:
    policy, some = measured("cadence", 10.0, 100.0, max_batch_diff=2), [pace(0, 10), pace(1, 100)]
    plan = planned(policy, some, work(10))
    assert "ends the epoch" not in plan.reason
    assert plan.counts[Rank(0)] - plan.counts[Rank(1)] <= 2


def test_in_lockstep_those_behind_make_one_more_batch() -> None:
    policy = measured("cadence", 10.0, 10.0, max_batch_diff=0)
    some = [holding(0, 10, 20, made=10), holding(1, 10, 20, made=9)]
    assert planned(policy, some, work(1000)).counts == {0: 10, 1: 10}
    late = [some[0], holding(1, 10, 20, made=9, delay_ms=100)]
    assert planned(policy, late, work(1000)).counts == {0: 10, 1: 10}, "others have made it already"


# async


def test_under_async_a_round_is_asked_for_when_each_has_made_its_count_or_all_it_has() -> None:
    policy, some = measured("async", 25.0, 50.0), [holding(0, 25, 40), holding(1, 50, 40)]
    plan = planned(policy, some, work(1000))
    assert not plan.is_announced
    assert not policy.can_revise
    assert plan.counts == {0: 20, 1: 10}

    def is_due(*made: int, leased: int = 40) -> bool:
        ranks = [holding(0, 25, 40, made=made[0]), holding(1, 50, leased, made=made[1])]
        return policy.due(ranks, work(1000))

    assert [is_due(20, 10), is_due(30, 9), is_due(19, 20), is_due(20, 9, leased=9)] == [True, False, False, True]


def test_under_async_no_round_is_asked_for_while_none_is_planned() -> None:
    """Such as when another generation is about to take over."""
    assert not measured("async", 25.0, 50.0).due([holding(0, 25, 40), holding(1, 50, 40)], work(100))


def test_under_async_counts_are_within_the_bound() -> None:
    policy, some = measured("async", 10.0, 50.0, max_batch_diff=5), [holding(0, 10, 60), holding(1, 50, 60)]
    planned(policy, some, work(1000))
    assert policy.due([holding(0, 10, 60, made=15), holding(1, 50, 60, made=10)], work(1000))


def test_under_async_a_rank_alone_has_rounds_of_five_seconds() -> None:
    policy = measured("async", 25.0)
    assert planned(policy, [pace(0, 25)], work(1000)).counts == {0: SOLO_ROUND_MS / 25}
    assert planned(policy, [pace(0, 3 * SOLO_ROUND_MS)], work(1000)).counts == {0: 1}


# sync


def test_under_sync_ranks_are_leased_more_in_time_and_up_to_so_much() -> None:
    policy = measured("sync", 10.0, 10.0)

    def shares(*leased: int) -> list[int]:
        plan = planned(policy, [holding(rank, 10, num) for rank, num in enumerate(leased)], work(1000))
        return list(plan.lease_samples.values())

    assert shares(SYNC_WINDOW + 1, 40) == [0, 0]
    assert shares(SYNC_WINDOW, 40) == [10 * (SYNC_LEASE - SYNC_WINDOW), 10 * (SYNC_LEASE - 40)]
    assert shares(0, 0) == [10 * SYNC_LEASE] * 2


def test_under_sync_the_window_is_refilled_when_half_of_it_is_used() -> None:
    policy, some = measured("sync", 10.0, 10.0), [holding(0, 10, 60), holding(1, 10, 60)]
    half = SYNC_WINDOW // 2
    assert policy.plan(some, work(1000, open_rounds=half + 1, granted=20)) is None
    plan = planned(policy, some, work(1000, open_rounds=half, granted=20))
    assert (plan.counts, plan.num_rounds) == ({0: 21, 1: 21}, SYNC_WINDOW - half)


def test_under_sync_a_rank_that_is_ahead_is_waited_for_by_the_others() -> None:
    """Rounds after which somebody has trained cannot be announced."""
    policy, some = measured("sync", 10.0, 10.0), [holding(0, 10, 60, made=5), holding(1, 10, 60, made=2)]
    plan = planned(policy, some, work(1000, granted=1))
    assert (plan.counts, plan.num_rounds) == ({0: 5, 1: 5}, SYNC_WINDOW)

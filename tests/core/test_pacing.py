"""How many batches each rank makes, as pure functions."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elche.policies import POLICIES
from elche.settings import AgreedSettings
from elche_coordinator.core.messages.ids import Rank
from elche_coordinator.core.pacing.cadence import Cadence
from elche_coordinator.core.pacing.counts import arrivals_ms, counts_near, counts_to_finish
from elche_coordinator.core.pacing.likeness import likenesses
from elche_coordinator.core.pacing.policies import KINDS, new_policy
from elche_coordinator.core.pacing.policy import Pace, RoundPlan, Work
from elche_coordinator.core.pacing.sync import SYNC_LEASE, SYNC_WINDOW
from support.rounds import numbered
from support.watched import LONG_ROUNDS


def paces(*ms: float, **more: float) -> list[Pace]:
    return [Pace(rank=Rank(rank), ms_per_batch=one, batch_size=10, **more) for rank, one in enumerate(ms)]


def policy(name: str = "cadence", world_size: int = 2, **changes: object):
    options = {"dataset_size": 10_000, "batch_size": 10, "epochs": 1, "policy": name} | LONG_ROUNDS | changes
    return new_policy(AgreedSettings(**options), [Rank(rank) for rank in range(world_size)])


def work(free: int, epoch_batches: int = 1_000, **more: object) -> Work:
    options = {"epoch_batches": epoch_batches, "free_batches": free, "free_samples": free * 10, "free_later": 0}
    return Work(**(options | more))


# counts_near


def test_25_and_57_5_ms_meet_after_575_ms():
    assert counts_near(paces(25, 57.5), 575) == {0: 23, 1: 10}


def test_a_length_near_by_that_comes_out_whole_is_taken():
    assert counts_near(paces(30, 50), 480) == {0: 15, 1: 9}


def test_ranks_of_one_speed_make_the_same():
    assert counts_near(paces(20, 20, 20), 200) == {0: 10, 1: 10, 2: 10}


def test_a_rank_that_evaluates_first_makes_fewer():
    fast, slow = paces(25, 57.5)
    late = Pace(rank=Rank(0), ms_per_batch=25, batch_size=10, delay_ms=250)
    assert counts_near([late, slow], 575)[0] == counts_near([fast, slow], 575)[0] - 10


def test_batches_already_made_count():
    counts = counts_near(
        [
            Pace(rank=Rank(0), ms_per_batch=25, batch_size=10, made=5),
            Pace(rank=Rank(1), ms_per_batch=50, batch_size=10, made=2),
        ],
        500,
    )
    assert counts == {0: 25, 1: 12}


def test_a_round_lasts_until_the_last_rank_has_evaluated_if_others_can_train_meanwhile():
    evaluating = Pace(rank=Rank(0), ms_per_batch=20, batch_size=10, delay_ms=3_000)
    training = Pace(rank=Rank(1), ms_per_batch=40, batch_size=10)
    assert policy().revise([evaluating, training], 10**6)[1] == pytest.approx(75, abs=5)
    assert policy(max_batch_diff=5).revise([evaluating, training], 10**6)[1] < 10, "it may not"


TIMES = st.floats(0.5, 500)
PACES = st.lists(
    st.tuples(TIMES, st.integers(0, 20), st.integers(0, 10), st.integers(0, 5), st.floats(-50, 300)),
    min_size=1,
    max_size=6,
)


def as_paces(rows: list[tuple[float, int, int, int, float]]) -> list[Pace]:
    """Ranks have made no more than they hold."""
    return [
        Pace(
            rank=Rank(rank),
            ms_per_batch=ms,
            batch_size=10,
            made=min(made, leased),
            leased=leased,
            leased_total=leased + ahead,
            delay_ms=delay,
        )
        for rank, (ms, made, leased, ahead, delay) in enumerate(rows)
    ]


@settings(max_examples=120, deadline=None, derandomize=True)
@given(rows=PACES, horizon_ms=st.floats(0, 5_000), at_least=st.integers(0, 2))
def test_counts_never_go_below_what_is_made_and_are_the_same_each_time(rows, horizon_ms, at_least):
    some = as_paces(rows)
    counts = counts_near(some, horizon_ms, at_least=at_least)
    assert counts == counts_near(list(some), horizon_ms, at_least=at_least)
    assert all(counts[pace.rank] >= pace.made + at_least for pace in some)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(ms=st.lists(st.floats(5, 100), min_size=2, max_size=6), anchor=st.integers(5, 30))
def test_from_a_standing_start_all_arrive_within_a_batch_of_their_own(ms, anchor):
    some = paces(*ms)
    arrivals = arrivals_ms(some, counts_near(some, anchor * max(ms)))
    longest = max(ms)
    assert all(max(arrivals) - arrival <= longest for arrival in arrivals)


# counts_to_finish


@settings(max_examples=150, deadline=None, derandomize=True)
@given(rows=PACES, num_batches=st.integers(0, 200))
def test_all_batches_are_dealt_out_and_nobody_gives_one_back(rows, num_batches):
    some = as_paces(rows)
    counts = counts_to_finish(some, num_batches)
    more = {pace.rank: max(0, counts[pace.rank] - pace.leased_total) for pace in some}
    assert sum(more.values()) == num_batches
    assert all(counts[pace.rank] >= max(pace.leased, pace.made) for pace in some)
    assert counts == counts_to_finish(list(some), num_batches)


def test_the_last_batches_go_to_different_ranks_of_one_speed():
    """Three equal ranks hold 2, 3 and 2 batches; of 4 more, none gets two while another would end earlier."""
    some = [
        Pace(rank=Rank(rank), ms_per_batch=2.0, batch_size=10, leased=n, leased_total=n)
        for rank, n in enumerate((2, 3, 2))
    ]
    assert sorted(counts_to_finish(some, 4).values()) == [3, 4, 4]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    rows=st.lists(st.tuples(st.integers(1, 60), st.integers(0, 4), st.integers(0, 100)), min_size=1, max_size=3),
    num_batches=st.integers(0, 7),
)
def test_no_other_deal_is_done_earlier(rows, num_batches):
    """Without leases of later epochs, against every way to deal."""
    some = [
        Pace(
            rank=Rank(rank),
            ms_per_batch=float(ms),
            batch_size=10,
            leased=leased,
            leased_total=leased,
            delay_ms=float(delay),
        )
        for rank, (ms, leased, delay) in enumerate(rows)
    ]
    deals = (deal for deal in product(range(num_batches + 1), repeat=len(some)) if sum(deal) == num_batches)
    # A rank that gets nothing and holds nothing is not waited for, however late it is: it has nothing to do.
    best = min(
        max(
            (
                pace.delay_ms + (pace.leased_total + more) * pace.ms_per_batch
                for pace, more in zip(some, deal, strict=True)
                if pace.leased_total + more
            ),
            default=0.0,
        )
        for deal in deals
    )
    counts = counts_to_finish(some, num_batches)
    mine = max(
        (pace.delay_ms + counts[pace.rank] * pace.ms_per_batch for pace in some if counts[pace.rank]), default=0.0
    )
    assert mine == pytest.approx(best)


def test_what_is_left_of_an_epoch_is_dealt_by_speed():
    assert counts_to_finish(paces(25, 50), 30) == {0: 20, 1: 10}


# Plans


def check_plan(plan: RoundPlan, some: list[Pace], left: Work) -> None:
    assert all(num >= 0 for num in (*plan.lease_samples.values(), *plan.lease_later.values()))
    assert sum(plan.lease_samples.values()) <= left.free_batches * 10
    assert sum(plan.lease_later.values()) <= 10 * left.free_later
    for pace in some:
        batches = -(-plan.lease_samples.get(pace.rank, 0) // 10) + plan.lease_later.get(pace.rank, 0) // 10
        assert plan.counts[pace.rank] <= pace.leased_total + batches, "no target beyond leased work"
        assert plan.counts[pace.rank] >= pace.made
    assert plan.reason


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    rows=PACES,
    free=st.integers(0, 500),
    free_later=st.integers(0, 50),
    calibrated=st.booleans(),
    measured=st.booleans(),
    anchor=st.integers(1, 30),
    overlap_ms=st.sampled_from([0.0, 100.0]),
)
def test_a_plan_leases_no_more_than_is_free(rows, free, free_later, calibrated, measured, anchor, overlap_ms):
    some = as_paces(rows)
    if not measured:
        some = [
            Pace(rank=pace.rank, ms_per_batch=None, batch_size=10, leased=pace.leased, leased_total=pace.leased_total)
            for pace in some
        ]
    if not free and not any(pace.leased > pace.made for pace in some):
        return
    cadence = policy(world_size=len(some), anchor=anchor)
    if calibrated:
        cadence.learn({pace.rank: pace.ms_per_batch or 1.0 for pace in some}, {pace.rank: 1 for pace in some}, 5.0)
    left = work(free, free_later=free_later, overlap_ms=overlap_ms)
    plan = cadence.plan(some, left)
    check_plan(plan, some, left)
    assert plan == cadence.plan(list(some), left)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(world_size=st.integers(1, 9), free_samples=st.integers(1, 700))
def test_sync_deals_equal_shares_and_grants_a_window(world_size, free_samples):
    some = paces(*[10.0] * world_size)
    left = work(-(-free_samples // 10), free_samples=free_samples)
    plan = policy("sync", world_size).plan(some, left)
    shares = list(plan.lease_samples.values())
    assert sum(shares) == min(free_samples, world_size * 10 * SYNC_LEASE), "the rest is left for who joins"
    assert max(shares) - min(shares) <= 1
    assert plan.num_rounds == min(SYNC_WINDOW, -(-max(shares) // 10))


def test_nothing_is_planned_while_a_round_is_open():
    assert policy().plan(paces(25, 57.5), work(500, open_rounds=1)) is None


def test_until_ranks_are_measured_all_make_the_same():
    plan = policy(anchor=50).plan(
        [Pace(rank=Rank(rank), ms_per_batch=None, batch_size=10) for rank in (0, 1)],
        work(free=1_000, epoch_batches=1_000),
    )
    assert plan.counts == {0: 50, 1: 50}
    assert "measured" in plan.reason


def test_a_hint_stands_for_the_speeds_until_they_are_measured():
    cadence = policy(speed_hint=(1, 2.3))
    plan = cadence.plan([Pace(rank=Rank(rank), ms_per_batch=None, batch_size=10) for rank in (0, 1)], work(free=1_000))
    assert plan.counts == {0: 23, 1: 10}


def test_the_end_of_an_epoch_leases_all_that_is_left():
    cadence = policy()
    cadence.learn(numbered(25.0, 57.5), numbered(1, 1), 5.0)
    plan = cadence.plan(paces(25, 57.5), work(30, free_later=100))
    assert sum(plan.lease_samples.values()) == 300
    assert "ends the epoch" in plan.reason
    assert all(num <= 5 * 10 for num in plan.lease_later.values())


@pytest.mark.parametrize("name", POLICIES)
def test_policies_have_names(name):
    assert policy(name).anchor >= 1
    assert isinstance(policy("cadence"), Cadence)


def test_every_policy_that_a_job_can_name_is_there():
    assert list(KINDS) == list(POLICIES)


@pytest.mark.parametrize(
    ("then", "now", "expected"),
    [
        (["cpu", "cpu"], ["cpu", "cpu"], [[0], [1]]),
        (["cpu", "cpu", "cpu"], ["cpu", "cpu"], [[0], [1]]),
        (["cuda:0 A", "cuda:1 B"], ["cuda:1 B", "cuda:0 A"], [[1], [0]]),
        (["cuda:0 A", "cuda:1 B"], ["cuda:0 B", "cuda:1 A"], [[1], [0]]),
        (["cuda:0 A", "cuda:1 A", "cuda:0 B"], ["cuda:0 A", "cuda:1 A", "cuda:2 A"], [[0], [1], [0, 1]]),
        (["cuda:0 A"], ["cuda:0 A", "cpu"], [[0], []]),
    ],
)
def test_a_rank_goes_on_as_the_one_with_its_device(then, now, expected):
    assert likenesses(then, now) == expected


def test_a_resume_of_another_size_forgets_no_speed():
    """Also by way of a job of one rank, in which nothing is averaged and nothing learned."""
    three = policy(world_size=3)
    three.learn(numbered(400.0, 100.0, 200.0), numbered(10, 10, 10), 5.0)
    alone = policy(world_size=1)
    alone.restore(three.to_json(), [[1]])
    two = policy(world_size=2)
    two.restore(alone.to_json(), [[0], [2]])
    assert two.is_calibrated
    assert two.to_json()["el_che"]["ranks"] == [three.to_json()["el_che"]["ranks"][rank] for rank in (0, 2)]


@pytest.mark.parametrize("diff", [None, 0, 3])
def test_el_che_hears_of_the_bound_also_after_a_resume_with_another(diff):
    before = policy(max_batch_diff=diff)
    assert before.to_json()["el_che"]["max_batch_diff"] == diff
    after = policy(max_batch_diff=7)
    after.restore(before.to_json())
    assert after.to_json()["el_che"]["max_batch_diff"] == 7

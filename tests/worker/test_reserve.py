"""Leases that may be begun, and those in reserve: the same samples in the same order, whoever lets them begin."""

from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from elche_worker.data.lease_loader import LeasedPart
from elche_worker.data.reserve import ReservedLeases


def lease(number: int, offset: int, size: int) -> LeasedPart:
    return LeasedPart(id=number, epoch=0, offset=offset, size=size)


def positions(handed: list[LeasedPart]) -> list[int]:
    return [at for one in handed for at in range(one.offset, one.offset + one.size)]


def test_a_lease_that_is_not_in_reserve_begins_at_once_behind_what_is() -> None:
    handed: list[LeasedPart] = []
    reserve = ReservedLeases(10, handed.append)
    reserve.add(lease(1, 0, 30), is_reserve=False)
    reserve.add(lease(2, 100, 50), is_reserve=True)
    assert positions(handed) == list(range(30))
    reserve.permit(50)
    assert positions(handed) == [*range(30), *range(100, 120)]
    reserve.add(lease(3, 200, 5), is_reserve=False)
    assert positions(handed) == [*range(30), *range(100, 150), *range(200, 205)]
    assert [one.id for one in handed] == [1, 2, 3, 4], "each part has a number of its own"
    assert reserve.is_empty


def test_what_is_given_back_is_what_was_not_begun() -> None:
    handed: list[LeasedPart] = []
    reserve = ReservedLeases(10, handed.append)
    reserve.add(lease(1, 0, 25), is_reserve=True)
    reserve.add(lease(2, 100, 40), is_reserve=True)
    reserve.permit_batches(4)
    assert positions(handed) == [*range(25), *range(100, 110)], "three batches of the first, one of the second"
    assert reserve.give_back() == 35
    reserve.permit(1000)
    assert len(positions(handed)) == 35


def test_a_lease_that_comes_twice_is_taken_once() -> None:
    handed: list[LeasedPart] = []
    reserve = ReservedLeases(10, handed.append)
    for _ in range(2):
        reserve.add(lease(1, 0, 20), is_reserve=False)
    assert len(handed) == 1


@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=6),
    steps=st.lists(st.tuples(st.sampled_from(["permit", "batches"]), st.integers(0, 80)), max_size=12),
)
def test_the_order_is_that_of_the_leases_whatever_lets_them_begin(
    sizes: list[int], steps: list[tuple[str, int]]
) -> None:
    handed: list[LeasedPart] = []
    reserve = ReservedLeases(8, handed.append)
    offsets = [0, *accumulate(sizes)]
    for number, (offset, size) in enumerate(zip(offsets, sizes, strict=False), 1):
        reserve.add(lease(number, offset, size), is_reserve=True)
    for kind, amount in steps:
        (reserve.permit if kind == "permit" else reserve.permit_batches)(amount)
        assert positions(handed) == list(range(reserve.num_handed))
    assert reserve.give_back() == len(positions(handed))

"""The calls of a loop's ranks, compared over a store: what parts them is told, and nothing else is."""

import threading
from collections.abc import Callable

import pytest
from torch.distributed import HashStore

from elche_worker.collectives import calls
from elche_worker.collectives.calls import Calls
from elche_worker.trainer.requests import NUM_MARKS, RequestConsensus, mark, marks_differ

Ranks = Callable[..., list[Calls]]


@pytest.fixture
def ranks() -> Ranks:
    def make(count: int) -> list[Calls]:
        store = HashStore()
        made = [Calls(number) for number in range(count)]
        for one in made:
            one.follow(store, range(count))
        return made

    return make


def test_ranks_with_the_same_calls_have_not_parted(ranks: Ranks) -> None:
    first, second = ranks(2)
    for one in (first, second):
        one.begin("calls step() after 0 steps")
        one.end()
        one.begin("calls step() after 1 steps")
    assert [first.look(), second.look(), first.look()] == ["", "", ""]


def test_a_rank_that_is_behind_has_not_parted(ranks: Ranks) -> None:
    first, second = ranks(2)
    first.begin("calls step() after 0 steps")
    second.begin("calls step() after 0 steps")
    second.begin("calls mean() after 1 steps")
    assert [second.look(), first.look(), second.look()] == ["", "", ""]


def test_a_rank_that_has_told_nothing_has_not_parted(ranks: Ranks) -> None:
    first, _ = ranks(2)
    first.begin("calls step() after 0 steps")
    assert first.look() == ""


def test_ranks_in_several_epochs_of_their_own_loaders_have_not_parted(ranks: Ranks) -> None:
    for number, one in enumerate(both := ranks(2)):
        one.begin(f"calls step() after 7 steps (epoch {number})")
    assert [one.look() for one in (*both, *both)] == [""] * 4


def test_the_first_call_that_differs_is_told_by_rank_with_what_to_do(ranks: Ranks) -> None:
    first, second = ranks(2)
    for one, steps in ((first, (0, 1, 2)), (second, (0, 1))):
        for step in steps:
            one.begin(f"calls step() after {step} steps")
    second.begin("begins epoch(1) after 2 steps")
    for _ in range(3):
        second.begin("calls mean()")
        first.begin("calls step()")
    assert first.look() == ""
    told = second.look()
    assert "rank 0 calls step() after 2 steps, rank 1 begins epoch(1) after 2 steps; every rank" in told
    assert "trainer.mean(" in told
    assert first.look() == told


def test_what_a_rank_does_last_is_told_at_once(ranks: Ranks) -> None:
    first, second = ranks(2)
    first.leave("ends its loop after 3 steps")
    second.begin("calls step() after 3 steps")
    assert "rank 0 ends its loop after 3 steps, rank 1 calls step() after 3 steps" in second.look()


def test_of_many_ranks_those_that_differ_are_named(ranks: Ranks) -> None:
    many = ranks(5)
    for number, one in enumerate(many):
        one.begin("calls mean()" if number == 3 else "calls step()")
        one.look()
    assert "each of ranks 0, 1, 2, 4 calls step(), rank 3 calls mean()" in many[0].look()


def test_however_many_ranks_there_are_one_that_differs_is_found(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "NUM_READ", 2)
    many = ranks(9)
    for number, one in enumerate(many):
        one.begin("calls mean()" if number == 7 else "calls step()")
        one.look()
    num_looks = next(count for count in range(10) if many[4].look())
    assert 0 < num_looks <= 4  # 8 others, 2 at each look
    assert many[7].difference


def test_only_a_call_that_lasts_is_looked_at_and_ended(ranks: Ranks) -> None:
    first, second = ranks(2)
    ended: list[str] = []
    stopped = threading.Event()
    stopped.set()  # nobody is waited for
    first.end_call = lambda: ended.append(first.difference)
    first.begin("calls step()")
    second.leave("ends its loop")
    last = first.watch(-1, stopped)
    assert not ended
    first.end()
    assert first.watch(last, stopped) == -1
    first.begin("calls step()")
    last = first.watch(last, stopped)
    assert not ended
    first.watch(last, stopped)
    assert len(ended) == 1
    assert "rank 1 ends its loop" in ended[0]


@pytest.mark.parametrize("count", [2, 3, 300])
@pytest.mark.parametrize("optimizer", [0, 1])
def test_marks_of_ranks_that_have_not_parted(count: int, optimizer: int) -> None:
    for num_batches in range(2 * NUM_MARKS):
        sums = [count * one for one in mark(num_batches, optimizer)]
        assert not marks_differ([*[1.0] * RequestConsensus.NUM_REQUESTS, *sums])


@pytest.mark.parametrize(("batches", "optimizer"), [(1, 0), (2, 0), (3, 0), (0, 1)])
def test_marks_of_ranks_that_have_parted(batches: int, optimizer: int) -> None:
    for num_batches in range(2 * NUM_MARKS):
        other = mark(num_batches + batches, optimizer)
        sums = [99 * one + more for one, more in zip(mark(num_batches, 0), other, strict=True)]
        assert marks_differ([0.0] * RequestConsensus.NUM_REQUESTS + sums)

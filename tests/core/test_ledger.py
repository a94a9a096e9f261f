"""The books against a model that knows every single position, and sets of intervals against sets of numbers."""

from copy import deepcopy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from elche.extent import Extent
from elche.shards import shuffled_shards
from elche_coordinator.core.invariants import check_ledger
from elche_coordinator.core.messages.ids import Epoch, Rank
from elche_coordinator.core.work.intervals import IntervalSet
from elche_coordinator.core.work.ledger import Ledger
from elche_coordinator.core.work.shards import ShardOrder

RANKS = st.integers(0, 3)
FREE, COMMITTED = "free", "committed"


class Books(RuleBasedStateMachine):
    """Every position of every epoch is free, some rank's, or committed; each rank's are in a row, in lease order."""

    @initialize(
        size=st.integers(0, 40), num_epochs=st.integers(1, 3), batch_size=st.integers(1, 7), drop_last=st.booleans()
    )
    def open(self, size: int, num_epochs: int, batch_size: int, drop_last: bool) -> None:
        self.ledger = Ledger(Extent(dataset_size=size, epochs=num_epochs, batch_size=batch_size, drop_last=drop_last))
        kept = size - size % batch_size if drop_last else size
        self.where: dict[tuple[int, int], object] = {
            (epoch, position): FREE for epoch in range(num_epochs) for position in range(kept)
        }
        self.row: dict[int, list[tuple[int, int]]] = {}
        self.committed = dict.fromkeys(range(4), 0)
        self.processed = dict.fromkeys(range(4), 0)
        self.kept, self.num_epochs, self.batch_size = kept, num_epochs, batch_size
        self.closed: list[int] = []
        self.lease_ids: list[int] = []

    @rule(rank=RANKS, ahead=st.integers(0, 2), num_samples=st.integers(-2, 50))
    def grant(self, rank: int, ahead: int, num_samples: int) -> None:
        epoch = self.ledger.epoch + ahead
        if self.in_reserve(rank) and num_samples > 0 and epoch < self.num_epochs:
            with pytest.raises(ValueError, match="in reserve"):
                self.ledger.grant(Rank(rank), Epoch(epoch), num_samples)
            return
        leases = self.ledger.grant(Rank(rank), Epoch(epoch), num_samples)
        granted = [(lease.epoch, lease.offset + index) for lease in leases for index in range(lease.size)]
        free = sorted(place for place, owner in self.where.items() if owner == FREE and place[0] == epoch)
        assert granted == free[: max(0, num_samples)]
        self.where |= dict.fromkeys(granted, rank)
        self.row.setdefault(rank, []).extend(granted)
        self.lease_ids += [lease.id for lease in leases]

    def in_reserve(self, rank: int) -> int:
        """Samples that the rank has and may not begin."""
        return self.ledger.reserve_of(Rank(rank))

    @rule(rank=RANKS, num_samples=st.integers(0, 50))
    def reserve(self, rank: int, num_samples: int) -> None:
        before = self.in_reserve(rank)
        leases = self.ledger.reserve(Rank(rank), self.ledger.epoch, num_samples)
        more = [(lease.epoch, lease.offset + index) for lease in leases for index in range(lease.size)]
        self.where |= dict.fromkeys(more, rank)
        self.row.setdefault(rank, []).extend(more)
        self.lease_ids += [lease.id for lease in leases]
        assert self.in_reserve(rank) == before + len(more)

    @rule(rank=RANKS, num_samples=st.integers(0, 30))
    def permit(self, rank: int, num_samples: int) -> None:
        before = self.in_reserve(rank)
        permitted = self.ledger.permit(Rank(rank), num_samples)
        assert min(num_samples, before) <= permitted <= before
        assert self.in_reserve(rank) == before - permitted

    @rule(rank=RANKS, part=st.floats(0, 1))
    def take_back(self, rank: int, part: float) -> None:
        """Some of the reserve was begun meanwhile; the rest is free."""
        end = len(self.row.get(rank, []))
        before = end - self.in_reserve(rank)
        assert not self.ledger.take_back(Rank(rank), end), "it was not asked for"
        assert self.ledger.recall(Rank(rank))
        assert not self.ledger.recall(Rank(rank)), "it is asked for already"
        for nonsense in (before - 1, end + 1):
            assert not self.ledger.take_back(Rank(rank), nonsense)
        position = before + round(part * (end - before))
        assert self.ledger.take_back(Rank(rank), position)
        row = self.row.setdefault(rank, [])
        self.where |= dict.fromkeys(row[position:], FREE)
        del row[position:]
        assert self.in_reserve(rank) == 0

    @rule(rank=RANKS, num_samples=st.integers(0, 60))
    def note_processed(self, rank: int, num_samples: int) -> None:
        self.ledger.set_processed(Rank(rank), num_samples)
        if rank in self.ledger.rank_leases:
            end = len(self.row.get(rank, []))
            self.processed[rank] = max(self.processed[rank], min(num_samples, end))
            assert self.ledger.rank_leases[Rank(rank)].processed == self.processed[rank]

    @rule(rank=RANKS, part=st.floats(0, 1))
    def commit(self, rank: int, part: float) -> None:
        first, row = self.committed[rank], self.row.get(rank, [])
        cut = first + round(part * (len(row) - first))
        booked = self.ledger.commit(Rank(rank), cut)
        new = row[first:cut]
        assert [(one.epoch, at) for one in booked for at in range(one.offset, one.offset + one.size)] == new
        self.where |= dict.fromkeys(new, COMMITTED)
        self.committed[rank] = cut
        self.processed[rank] = max(self.processed[rank], cut)

    @rule(rank=RANKS, beyond=st.integers(1, 9), back=st.booleans())
    def commit_nonsense(self, rank: int, beyond: int, back: bool) -> None:
        end = len(self.row.get(rank, []))
        before = deepcopy(self.ledger.to_json())
        cut = self.committed[rank] - beyond if back else end + beyond
        with pytest.raises(ValueError, match=f"rank {rank} cannot commit"):
            self.ledger.commit(Rank(rank), cut)
        after = self.ledger.to_json()
        after["rank_leases"] = {  # an empty holding says the same as none
            key: value for key, value in after["rank_leases"].items() if key in before["rank_leases"] or value["leases"]
        }
        assert after == before

    @rule(rank=RANKS)
    def release(self, rank: int) -> None:
        held = [place for place in self.row.get(rank, []) if self.where[place] == rank]
        assert self.ledger.release(Rank(rank)) == len(held)
        self.where |= dict.fromkeys(held, FREE)
        self.row[rank], self.committed[rank], self.processed[rank] = [], 0, 0

    @precondition(lambda self: not self.ledger.is_complete)
    @rule()
    def close_epochs(self) -> None:
        closed = self.ledger.close_epochs()
        while len(self.closed) < self.num_epochs and all(
            self.where[len(self.closed), position] == COMMITTED for position in range(self.kept)
        ):
            self.closed.append(len(self.closed))
        assert closed == self.closed[len(self.closed) - len(closed) :]
        assert self.ledger.epoch == len(self.closed)

    @invariant()
    def every_position_is_where_the_model_has_it(self) -> None:
        if not hasattr(self, "ledger"):
            return
        check_ledger(self.ledger)
        ledger = self.ledger
        if self.kept == 0:
            assert ledger.is_complete
            return
        for epoch in range(self.num_epochs):
            owners = [self.where[epoch, position] for position in range(self.kept)]
            assert ledger.committed_samples(Epoch(epoch)) == owners.count(COMMITTED)
            if epoch >= ledger.epoch:
                assert ledger.free_samples(Epoch(epoch)) == owners.count(FREE) + ledger.reserved_samples(Epoch(epoch))
        for rank, row in self.row.items():
            held = [place for place in row if self.where[place] == rank]
            parts = ledger.rank_leases[Rank(rank)].remainders() if rank in ledger.rank_leases else ()
            assert [(part.epoch, part.offset + index) for part in parts for index in range(part.size)] == held
        assert self.lease_ids == sorted(set(self.lease_ids))
        done = list(self.where.values()).count(COMMITTED)
        uncommitted = sum(max(0, self.processed[rank] - self.committed[rank]) for rank in self.processed)
        assert ledger.total_processed() == done + uncommitted


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=60, stateful_step_count=30, deadline=None, derandomize=True)

PARTS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 8)), max_size=12)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(parts=PARTS, sizes=st.lists(st.integers(-1, 20), max_size=4))
def test_a_set_of_intervals_is_a_set_of_numbers(parts, sizes):
    intervals, numbers = IntervalSet(), set()
    for start, length in parts:
        new = set(range(start, start + length))
        if numbers & new:
            before = list(intervals)
            with pytest.raises(ValueError, match="overlaps"):
                intervals.add(start, start + length)
            assert list(intervals) == before
        else:
            intervals.add(start, start + length)
            numbers |= new
        check_intervals(intervals, numbers)
    for size in sizes:
        taken = [number for start, end in intervals.take(size) for number in range(start, end)]
        assert taken == sorted(numbers)[: max(0, size)]
        numbers -= set(taken)
        check_intervals(intervals, numbers)


def check_intervals(intervals: IntervalSet, numbers: set[int]) -> None:
    parts = list(intervals)
    assert {number for start, end in parts for number in range(start, end)} == numbers
    assert intervals.size == len(numbers)
    assert bool(intervals) == bool(numbers)
    assert all(start < end for start, end in parts)
    assert all(parts[index][1] < parts[index + 1][0] for index in range(len(parts) - 1)), "as few as can be"
    assert intervals == IntervalSet(parts)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.permutations([(0, 3), (3, 5), (5, 9), (12, 13), (13, 20)]))
def test_the_order_of_adding_does_not_matter(parts):
    assert list(IntervalSet(parts)) == [(0, 9), (12, 20)]


def test_a_released_fragment_is_leased_again_first():
    ledger = Ledger(Extent(dataset_size=100, epochs=1, batch_size=10))
    ledger.grant(Rank(0), Epoch(0), 30)
    ledger.grant(Rank(1), Epoch(0), 30)
    ledger.commit(Rank(0), 13)
    assert ledger.release(Rank(0)) == 17
    assert [(lease.offset, lease.size) for lease in ledger.grant(Rank(1), Epoch(0), 25)] == [(13, 17), (60, 8)]
    assert ledger.free_batches(Epoch(0)) == 4


@pytest.mark.parametrize(("offset", "size"), [(5, 10), (10, 5), (15, 10), (5, 20), (95, 10)])
def test_a_slice_that_is_not_all_free_is_refused(offset, size):
    """As one of a recording of another job may be: its samples would be two ranks'."""
    ledger = Ledger(Extent(dataset_size=100, epochs=1, batch_size=10))
    ledger.grant_slice(Rank(0), Epoch(0), 10, 10)
    before = deepcopy(ledger.to_json())
    with pytest.raises(ValueError, match="is not all in"):
        ledger.grant_slice(Rank(1), Epoch(0), offset, size)
    assert ledger.to_json() == before
    assert ledger.grant_slice(Rank(1), Epoch(0), 20, 80).size == 80


def test_batches_are_counted_up_to_the_last_one_of_the_open_epoch():
    ledger = Ledger(Extent(dataset_size=35, epochs=2, batch_size=10))
    ledger.grant(Rank(0), Epoch(0), 35)
    ledger.grant(Rank(0), Epoch(1), 10)
    assert ledger.uncommitted_batches(Rank(0)) == (4, 5)
    assert ledger.uncommitted_batches(Rank(1)) == (0, 0)


def test_epochs_that_some_batches_end_are_those_of_which_nothing_else_is_left():
    ledger = Ledger(Extent(dataset_size=20, epochs=4, batch_size=10))
    for rank, epoch, size in ((0, 0, 20), (1, 1, 10), (0, 1, 10), (0, 2, 20), (0, 3, 10)):
        ledger.grant(Rank(rank), Epoch(epoch), size)
    counts = [(0, 0), (2, 0), (3, 0), (3, 1), (5, 1), (6, 1)]
    ended = [ledger.ended_by({Rank(0): first, Rank(1): second}) for first, second in counts]
    assert ended == [[], [0], [0], [0, 1], [0, 1, 2], [0, 1, 2]]
    ledger.stop()
    assert ledger.ended_by({Rank(0): 6, Rank(1): 1}) == [0, 1, 2, 3]


def test_nothing_more_is_leased_once_an_early_end_is_decided():
    ledger = Ledger(Extent(dataset_size=40, epochs=2, batch_size=10))
    ledger.grant(Rank(0), Epoch(0), 10)
    ledger.stop()
    assert ledger.grant(Rank(0), Epoch(0), 10) == []
    assert (ledger.free_samples(Epoch(0)), ledger.free_batches(Epoch(0)), ledger.free_later()) == (0, 0, 0)
    assert not ledger.is_complete, "a rank has work that is in no round"
    ledger.commit(Rank(0), 10)
    assert ledger.is_complete


def test_a_ranks_own_batches_are_counted_in_their_size():
    ledger = Ledger(Extent(dataset_size=100, epochs=1, batch_size=10), {Rank(1): 25})
    for rank in (0, 1):
        ledger.grant(Rank(rank), Epoch(0), 50)
    assert [ledger.uncommitted_batches(Rank(rank)) for rank in (0, 1)] == [(5, 5), (2, 2)]
    assert ledger.ended_by({Rank(0): 5, Rank(1): 2}) == [0]


def test_samples_of_a_job_that_max_steps_ends_are_those_that_are_trained():
    ledger = Ledger(Extent(dataset_size=100, epochs=3, batch_size=10, max_steps=15))
    for epoch, size in ((0, 100), (1, 50)):
        ledger.grant(Rank(0), Epoch(epoch), 100)
        ledger.commit(Rank(0), 100 * epoch + size)
        ledger.close_epochs()
    assert ledger.is_complete
    assert ledger.total_committed() == 150


def test_a_rank_goes_on_in_its_shard():
    ledger = Ledger(Extent(dataset_size=80, epochs=1, batch_size=10), shards=ShardOrder((20, 20, 20, 20), seed=1))
    first, other, second = (ledger.grant(Rank(rank), Epoch(0), 10) for rank in (0, 1, 0))
    assert len(first) == len(other) == len(second) == 1
    assert second[0].offset == first[0].offset + 10
    assert other[0].offset // 20 != first[0].offset // 20


@pytest.mark.parametrize("at_once", [16, 48, 64, 80, 100, 160])
def test_how_much_is_leased_at_once_does_not_change_the_batches_of_shards(at_once):
    """A shard was cut where a lease ended that had begun with the odd end of another: batches of 2 samples, by time."""
    sizes, batch = (50, 70, 60, 70), 16
    ledger = Ledger(Extent(dataset_size=250, epochs=1, batch_size=batch), shards=ShardOrder(sizes, seed=3))
    cut = []
    while leases := ledger.grant(Rank(0), Epoch(0), at_once):
        for lease in leases:
            cut += [min(batch, lease.size - at) for at in range(0, lease.size, batch)]
    assert sorted(cut) == sorted(min(batch, size - at) for size in sizes for at in range(0, size, batch))


def test_the_shard_in_which_an_epoch_ends_has_its_place_in_the_order():
    """It was read after all others, unlike by `job.run()`."""
    sizes = (20, 20, 20, 20)
    order = shuffled_shards(sizes, seed=2, epoch=0)
    assert order[-1] != 3, "which lacks its last five samples"
    ledger = Ledger(Extent(dataset_size=80, epochs=1, batch_size=25, drop_last=True), shards=ShardOrder(sizes, seed=2))
    leases = iter(lambda: ledger.grant(Rank(0), Epoch(0), 10), [])
    read = [lease.offset // 20 for granted in leases for lease in granted]
    assert list(dict.fromkeys(read)) == order


def test_a_resumed_job_reads_the_shards_to_their_ends_that_were_begun():
    """They were read last, after all others: not the order in which the job had read them without an end."""
    shards, free = ShardOrder((20, 20, 20, 20), seed=1), IntervalSet([(0, 20), (30, 40), (50, 80)])
    first, cursor = shards.take(free, 0, 10, 10, None, 80)
    assert (first, cursor) == ([(30, 40)], None)
    second, cursor = shards.take(free, 0, 10, 10, cursor, 80)
    assert (second, cursor) == ([(50, 60)], None)
    assert shards.take(free, 0, 100, 10, cursor, 80)[0][0][0] in (0, 60)
    assert not free

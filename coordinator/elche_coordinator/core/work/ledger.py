"""The ledger: which samples are free, leased, processed or committed. Every sample is booked exactly once."""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from elche.extent import Extent
from elche_coordinator.core.messages.ids import Epoch, LeaseId, Rank
from elche_coordinator.core.messages.spec import Lease, whole_number
from elche_coordinator.core.work.intervals import Interval, IntervalSet
from elche_coordinator.core.work.shards import ShardOrder


@dataclass(slots=True)
class EpochBook:
    """One epoch's positions. Those in neither set are leased."""

    free: IntervalSet
    """Positions that no rank has."""
    committed: IntervalSet = field(default_factory=IntervalSet)
    """Positions whose samples are in a committed result."""


@dataclass(slots=True)
class RankLeases:
    """One rank's ordered leases. Positions are counted in samples since the rank's incarnation began.

    `first` <= `committed` <= `processed` <= `permitted` <= `end`.
    """

    leases: deque[Lease] = field(default_factory=deque)
    """In the order in which the rank trains them; those that are all committed are dropped."""
    first: int = 0
    """Position of the first lease's first sample."""
    committed: int = 0
    """Samples before this position are committed."""
    processed: int = 0
    """Samples before this position are trained, as reported."""
    permitted: int = 0
    """Samples before this position may be trained; those after it are reserved for an absence of the coordinator."""
    end: int = 0
    """Position after the last lease."""

    def add(self, lease: Lease) -> None:
        """Appends a lease."""
        self.leases.append(lease)
        self.end += lease.size

    def remainders(self) -> Iterator[Lease]:
        """Uncommitted parts of the leases."""
        return self.parts(self.committed, self.end)

    def reserve(self) -> Iterator[Lease]:
        """Parts of the leases in reserve."""
        return self.parts(self.permitted, self.end)

    def parts(self, start: int, end: int) -> Iterator[Lease]:
        """Parts of the leases between two positions."""
        after = self.first
        for lease in self.leases:
            at, after = after, after + lease.size
            if start <= at and after <= end:
                yield lease
            elif at >= end:
                return
            elif after > start:
                first, last = max(start, at), min(end, after)
                yield Lease(id=lease.id, epoch=lease.epoch, offset=lease.offset + first - at, size=last - first)

    def cut_off(self, position: int) -> list[Lease]:
        """Removes and returns the leases after a position."""
        taken, kept = list(self.parts(position, self.end)), list(self.parts(self.first, position))
        self.leases, self.end = deque(kept), min(position, self.end)
        return taken


class Ledger:
    """The books of one job. Slices move free -> leased -> committed; a lost rank's uncommitted ones go back.

    Every method keeps each position of an epoch in exactly one place; one that cannot raises `ValueError` and changes
    nothing.
    """

    def __init__(
        self, extent: Extent, batch_sizes: Mapping[Rank, int] | None = None, shards: ShardOrder | None = None
    ) -> None:
        self.extent = extent
        self.num_epochs = extent.num_epochs
        self.rank_leases: dict[Rank, RankLeases] = {}
        self.recalled: dict[Rank, None] = {}
        """Ranks whose reserve was recalled and that have not answered: they get no further leases until then."""
        self.is_stopped = False
        """True if nothing more is leased, so that the job is complete once the present leases are trained."""
        self._batch_sizes = dict(batch_sizes or {})
        """Batch sizes of ranks that differ from the job's."""
        self._shards = shards
        """Chooses which free positions a rank gets; None: the lowest."""
        self._cursors: dict[tuple[Rank, Epoch], int | None] = {}
        """Position in its shard at which each rank goes on; None: it begins another shard next."""
        self._books: dict[Epoch, EpochBook] = {}
        """Books of epochs that have begun and are not complete; any other is all free, or all committed."""
        self._cut_short: EpochBook | None = None
        """Committed parts of a last epoch that `max_steps` has cut short: a job that resumes with more trains
        the rest.
        """
        self._next_lease = 1
        self.epoch = Epoch(0)
        """The first incomplete epoch; `num_epochs` if all are complete."""

    @property
    def dropped_size(self) -> int:
        """Samples of an epoch that `drop_last` leaves out."""
        return self.extent.dataset_size - self.extent.kept_size

    @property
    def is_complete(self) -> bool:
        """True if all samples to be trained are committed."""
        if self.is_stopped:
            return not any(leases.committed < leases.end for leases in self.rank_leases.values())
        return self.epoch >= self.num_epochs

    def stop(self) -> None:
        """Leases nothing more."""
        self.is_stopped = True

    def size(self, epoch: Epoch) -> int:
        """Samples of the epoch that are trained."""
        return self.extent.epoch_size(epoch)

    def book(self, epoch: Epoch) -> EpochBook:
        """Returns the books of an epoch, created at the first use."""
        if epoch not in self._books:
            self._books[epoch] = EpochBook(IntervalSet([(0, self.size(epoch))]))
        return self._books[epoch]

    def open_books(self) -> dict[Epoch, EpochBook]:
        """The books in use, by epoch."""
        return dict(self._books)

    def free_samples(self, epoch: Epoch) -> int:
        """Number of free samples of the epoch, including those in reserve."""
        return self.book(epoch).free.size + self.reserved_samples(epoch) if self._has_free(epoch) else 0

    def has_free(self, epoch: Epoch) -> bool:
        """True if any sample of the epoch is free, or in reserve."""
        return self._has_free(epoch) and (bool(self.book(epoch).free) or any(self._reserved(epoch)))

    def free_batches(self, epoch: Epoch) -> int:
        """Number of batches of the epoch's free samples, including those in reserve; a gap ends a batch."""
        parts = self.book(epoch).free if self._has_free(epoch) else ()
        reserved = self._reserved(epoch) if parts or self._has_free(epoch) else ()
        return sum(self.num_batches(end - start) for start, end in parts) + sum(map(self.num_batches, reserved))

    def free_later(self) -> int:
        """Batches of all later epochs that no rank has."""
        later = range(self.epoch + 1, 0 if self.is_stopped else self.num_epochs)
        opened = [epoch for epoch in self._books if epoch in later]
        free = sum(map(self.free_batches, opened)) + (len(later) - len(opened)) * self.num_batches(
            self.extent.kept_size
        )
        if later and later[-1] not in self._books:  # `max_steps` may end it early
            free += self.num_batches(self.size(Epoch(later[-1]))) - self.num_batches(self.extent.kept_size)
        return free

    def reserved_samples(self, epoch: Epoch) -> int:
        """Samples of the epoch that ranks have in reserve."""
        return sum(self._reserved(epoch))

    def _reserved(self, epoch: Epoch) -> Iterator[int]:
        for leases in self.rank_leases.values():
            if leases.permitted < leases.end:
                yield sum(part.size for part in leases.reserve() if part.epoch == epoch)

    def _has_free(self, epoch: Epoch) -> bool:
        return epoch < self.num_epochs and not self.is_stopped

    def committed_samples(self, epoch: Epoch) -> int:
        """Samples of the epoch that are committed."""
        if epoch < self.epoch:
            return self.size(epoch)
        return self._books[epoch].committed.size if epoch in self._books else 0

    def is_committed(self, epoch: Epoch, offset: int, size: int) -> bool:
        """True if all samples of the slice are committed."""
        if epoch < self.epoch:
            return True
        return epoch in self._books and self._books[epoch].committed.has(offset, offset + size)

    @property
    def num_begun(self) -> int:
        """Number of epochs up to the last one with committed samples."""
        begun = (epoch + 1 for epoch, book in self._books.items() if book.committed)
        return min(self.num_epochs, max(self.epoch, *begun, 0))

    def total_committed(self) -> int:
        """Samples of all epochs that are committed."""
        opened = sum(book.committed.size for book in self._books.values())
        return min(self.epoch * self.extent.kept_size, self.extent.total_samples) + opened

    def total_processed(self) -> int:
        """Samples of all epochs that are trained, as reported, or committed."""
        return self.total_committed() + sum(max(0, one.processed - one.committed) for one in self.rank_leases.values())

    def uncommitted_batches(self, rank: Rank) -> tuple[int, int]:
        """Returns two counts of the rank's uncommitted batches without its reserve: up to the last one of the first
        incomplete epoch, and all.
        """
        through_epoch, total = 0, 0
        leases = self.rank_leases.get(rank)
        if leases is None:
            return 0, 0
        size = self._batch_sizes.get(rank, self.extent.batch_size)
        after, start, end = leases.first, leases.committed, leases.permitted
        for lease in leases.leases:  # `RankLeases.parts`, inlined because it is too slow to call for each of many ranks
            at, after = after, after + lease.size
            num_samples = min(after, end) - max(at, start)
            if num_samples > 0:
                total += -(-num_samples // size)
                if lease.epoch == self.epoch or self.is_stopped:
                    through_epoch = total
        return through_epoch, total

    def ended_by(self, counts: Mapping[Rank, int]) -> list[Epoch]:
        """Epochs that are complete once each rank has committed this many more batches."""
        last: dict[Rank, dict[Epoch, int]] = {}  # batches with which a rank has finished its leases of an epoch
        if self.epoch not in self._books or self.has_free(self.epoch):
            return []  # an epoch with free samples does not end, whatever the ranks have leased
        for rank, leases in self.rank_leases.items():
            total, size = 0, self._batch_sizes.get(rank, self.extent.batch_size)
            for part in leases.parts(leases.committed, leases.permitted):
                total += -(-part.size // size)
                last.setdefault(rank, {})[part.epoch] = total
        ended: list[Epoch] = []
        for epoch in map(Epoch, range(self.epoch, self.num_epochs)):
            is_leased = epoch in self._books and not self.has_free(epoch)
            if not is_leased or any(counts.get(rank, 0) < one.get(epoch, 0) for rank, one in last.items()):
                break
            ended.append(epoch)
        return ended

    def has_work(self, rank: Rank) -> bool:
        """True if the rank has leased samples that it may train and has not reported as trained."""
        leases = self.rank_leases.get(rank)
        return leases is not None and leases.processed < leases.permitted

    def set_batch_size(self, rank: Rank, size: int) -> None:
        """Sets the rank's batch size."""
        self._batch_sizes[rank] = size

    def num_batches(self, num_samples: int) -> int:
        """Number of batches of the job's size into which `num_samples` consecutive samples are cut."""
        return -(-num_samples // self.extent.batch_size)

    def in_flight(self, rank: Rank, num_batches: int) -> list[Lease]:
        """Leases of the rank's next `num_batches` batches after those reported as trained."""
        leases = self.rank_leases.get(rank, RankLeases())
        size = num_batches * self._batch_sizes.get(rank, self.extent.batch_size)
        return list(leases.parts(leases.processed, leases.processed + size))

    def grant(self, rank: Rank, epoch: Epoch, num_samples: int) -> list[Lease]:
        """Leases up to `num_samples` free samples of the epoch to the rank, lowest positions first; of shards up to a
        batch more, to cut none in mid-batch. Raises `ValueError` if the rank has a reserve, which it must train first.
        """
        if not self._has_free(epoch) or num_samples <= 0:
            return []
        leases = self.rank_leases.setdefault(rank, RankLeases())
        if leases.permitted < leases.end:
            raise ValueError(f"rank {rank} has samples in reserve, which it must train first")
        handed = [self._hand(rank, epoch, start, end) for start, end in self._take(rank, epoch, num_samples)]
        leases.permitted = leases.end
        return handed

    # The reserve (protocol P16.3)

    def reserve(self, rank: Rank, epoch: Epoch, num_samples: int) -> list[Lease]:
        """Leases up to `num_samples` free samples to the rank as its reserve, to be trained after `permit`, or while
        the coordinator is away.
        """
        if not self._has_free(epoch) or num_samples <= 0:
            return []
        return [self._hand(rank, epoch, start, end) for start, end in self._take(rank, epoch, num_samples)]

    def permit(self, rank: Rank, num_samples: int) -> int:
        """Permits `num_samples` of the rank's reserve, rounded up to whole batches, or all it has; returns how many."""
        leases = self.rank_leases.get(rank)
        if leases is None or num_samples <= 0:
            return 0
        before, size = leases.permitted, self._batch_sizes.get(rank, self.extent.batch_size)
        for part in list(leases.reserve()):
            left = before + num_samples - leases.permitted
            if left > 0:
                leases.permitted += min(part.size, -(-left // size) * size)  # whole batches
        return leases.permitted - before

    def recall(self, rank: Rank) -> bool:
        """Recalls the rank's reserve; returns False if a recall is under way already."""
        was_recalled = rank in self.recalled
        self.rank_leases.setdefault(rank, RankLeases())
        self.recalled[rank] = None
        return not was_recalled

    def take_back(self, rank: Rank, position: int) -> bool:
        """Frees the rank's leases after the position; returns False if they were not recalled, or the position is
        invalid.
        """
        leases = self.rank_leases.get(rank)
        if leases is None or rank not in self.recalled or not leases.permitted <= position <= leases.end:
            return False
        del self.recalled[rank]
        # What it has begun of the reserve while it was alone stays its own.
        leases.permitted = position
        for part in leases.cut_off(position):
            self.book(part.epoch).free.add(part.offset, part.offset + part.size)
        return True

    def is_recalled(self, rank: Rank) -> bool:
        """True if the rank's reserve was recalled, and it has not answered."""
        return rank in self.recalled

    @property
    def has_reserve(self) -> bool:
        """True if any rank has samples in reserve."""
        return any(leases.permitted < leases.end for leases in self.rank_leases.values())

    def reserve_of(self, rank: Rank) -> int:
        """Number of samples that the rank has in reserve."""
        leases = self.rank_leases.get(rank)
        return leases.end - leases.permitted if leases is not None else 0

    def _take(self, rank: Rank, epoch: Epoch, num_samples: int) -> list[Interval]:
        """Removes up to `num_samples` free positions for the rank, of shards up to a batch more, and returns them."""
        free = self.book(epoch).free
        if self._shards is None:
            return free.take(num_samples)
        size, cursor = self._batch_sizes.get(rank, self.extent.batch_size), self._cursors.get((rank, epoch))
        end = self.extent.epoch_size(epoch)
        taken, self._cursors[rank, epoch] = self._shards.take(free, epoch, num_samples, size, cursor, end)
        return taken

    def grant_slice(self, rank: Rank, epoch: Epoch, offset: int, size: int) -> Lease:
        """Leases exactly this slice, for a replay. Raises `ValueError` if it is not free."""
        if not self._has_free(epoch):
            raise ValueError(f"there is no epoch {epoch} to lease of")
        self.book(epoch).free.remove(offset, offset + size)
        lease = self._hand(rank, epoch, offset, offset + size)
        self.rank_leases[rank].permitted = self.rank_leases[rank].end
        return lease

    def _hand(self, rank: Rank, epoch: Epoch, start: int, end: int) -> Lease:
        """Makes a lease of positions that were free, after the rank's others."""
        lease = Lease(id=LeaseId(self._next_lease), epoch=epoch, offset=start, size=end - start)
        self._next_lease += 1
        self.rank_leases.setdefault(rank, RankLeases()).add(lease)
        return lease

    def bounds(self, rank: Rank) -> tuple[int, int]:
        """The positions between which the rank's next cut must lie."""
        leases = self.rank_leases.get(rank, RankLeases())
        return leases.committed, leases.end

    def set_processed(self, rank: Rank, num_samples: int) -> None:
        """Records the number of samples of its leases that the rank has trained. Ignores stale reports."""
        leases = self.rank_leases.get(rank)
        if leases is not None:
            # The rank's claim is bounded by its leases: else progress might be shown beyond the epoch's end.
            leases.processed = min(max(leases.processed, num_samples), leases.end)
            leases.permitted = max(leases.permitted, leases.processed)  # begun while the coordinator was away

    def commit(self, rank: Rank, cut: int) -> list[Lease]:
        """Books the rank's samples before `cut`, counted since its incarnation began; returns the new ones, in order.
        Raises `ValueError` if `cut` is below the committed samples or above the leased ones.
        """
        leases = self.rank_leases.setdefault(rank, RankLeases())
        if not leases.committed <= cut <= leases.end:
            raise ValueError(
                f"rank {rank} cannot commit {cut} samples: {leases.committed} are committed, {leases.end} leased"
            )
        booked = []
        for part in list(leases.remainders()):
            size = min(part.size, cut - leases.committed)
            if size <= 0:
                break
            self.book(part.epoch).committed.add(part.offset, part.offset + size)
            booked.append(Lease(id=part.id, epoch=part.epoch, offset=part.offset, size=size))
            leases.committed += size
        leases.processed = max(leases.processed, cut)
        leases.permitted = max(leases.permitted, cut)
        self._forget_finished(leases)
        return booked

    def release(self, rank: Rank) -> int:
        """Frees the uncommitted leases of a lost rank; returns their number of samples."""
        self.recalled.pop(rank, None)
        leases = self.rank_leases.pop(rank, None)
        if leases is None:
            return 0
        parts = list(leases.remainders())
        for part in parts:
            self.book(part.epoch).free.add(part.offset, part.offset + part.size)
        return sum(part.size for part in parts)

    def close_epochs(self) -> list[Epoch]:
        """Closes and returns newly complete epochs, in order."""
        closed = []
        while self.epoch in self._books and self._books[self.epoch].committed.size == self.size(self.epoch):
            book = self._books.pop(self.epoch)
            if self.size(self.epoch) < self.extent.kept_size:
                self._cut_short = book
            self._cursors = {key: at for key, at in self._cursors.items() if key[1] > self.epoch}
            closed.append(self.epoch)
            self.epoch = Epoch(self.epoch + 1)
        return closed

    def to_json(self) -> dict[str, object]:
        """The books as plain values."""
        is_cut = self._cut_short is not None
        epoch = Epoch(self.epoch - 1) if is_cut else self.epoch
        books = {epoch: self._cut_short, **self._books} if self._cut_short is not None else self._books
        return {
            "epoch": epoch,
            "next_lease": self._next_lease,
            "books": {
                str(epoch): {"free": list(book.free), "committed": list(book.committed)}
                for epoch, book in books.items()
            },
            "rank_leases": {
                str(rank): {
                    "committed": leases.committed,
                    "leases": [[part.id, part.epoch, part.offset, part.size] for part in leases.remainders()],
                }
                for rank, leases in self.rank_leases.items()
            },
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores `to_json`: committed samples stay so, all others are free. Only for a new ledger."""
        self.epoch = Epoch(whole_number(state["epoch"], "epoch"))
        for epoch, book in state["books"].items():
            # The job may be resumed with fewer epochs than had begun.
            if int(epoch) >= self.num_epochs:
                continue
            committed = IntervalSet((start, end) for start, end in book["committed"])
            free = IntervalSet([(0, self.size(Epoch(int(epoch))))])
            for start, end in committed:
                free.remove(start, end)
            self._books[Epoch(int(epoch))] = EpochBook(free, committed)
        self.close_epochs()

    def _forget_finished(self, leases: RankLeases) -> None:
        """Drops leases whose samples are all committed."""
        while leases.leases and leases.first + leases.leases[0].size <= leases.committed:
            leases.first += leases.leases.popleft().size

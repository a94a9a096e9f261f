"""Who has which samples: free, leased, processed, committed. Every sample is booked exactly once."""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from elche.extent import Extent
from elche_coordinator.core.messages.ids import Epoch, LeaseId, Rank
from elche_coordinator.core.messages.spec import Lease, whole_number
from elche_coordinator.core.work.intervals import Interval, IntervalSet
from elche_coordinator.core.work.shards import Shards


@dataclass(slots=True)
class EpochBook:
    """One epoch's positions. Those in neither set are leased."""

    free: IntervalSet
    committed: IntervalSet = field(default_factory=IntervalSet)


@dataclass(slots=True)
class RankLeases:
    """One rank's ordered leases. Positions are counted in samples since the rank's incarnation began."""

    leases: deque[Lease] = field(default_factory=deque)
    first: int = 0
    """Position of the first lease's first sample."""
    committed: int = 0
    """Samples before this position are committed."""
    processed: int = 0
    """Samples before this position are trained, as reported."""
    permitted: int = 0
    """Samples before this position may be trained; those after it are in reserve, for when the coordinator is away."""

    @property
    def end(self) -> int:
        """Position after the last lease."""
        return self.first + sum(lease.size for lease in self.leases)

    def remainders(self) -> Iterator[Lease]:
        """What is not committed, lease by lease."""
        return self.parts(self.committed, self.end)

    def reserve(self) -> Iterator[Lease]:
        """What is in reserve, lease by lease."""
        return self.parts(self.permitted, self.end)

    def parts(self, start: int, end: int) -> Iterator[Lease]:
        """What lies between two positions, lease by lease."""
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
        """Takes away what lies after a position; returns it."""
        taken, kept = list(self.parts(position, self.end)), list(self.parts(self.first, position))
        self.leases = deque(kept)
        return taken


class Ledger:
    """The books of one job. Slices move free -> leased -> committed; a lost rank's uncommitted ones go back.

    Every method leaves each epoch's positions in exactly one place; what would not raises `ValueError` and
    changes nothing.
    """

    def __init__(
        self, extent: Extent, batch_sizes: Mapping[Rank, int] | None = None, shards: Shards | None = None
    ) -> None:
        self.extent = extent
        self.num_epochs = extent.num_epochs
        self.rank_leases: dict[Rank, RankLeases] = {}
        self.recalled: dict[Rank, None] = {}
        """Ranks whose reserve is wanted back, and which have not answered: they get nothing more until then."""
        self.is_stopped = False
        """True if nothing more is leased: what is leased is trained, and then the job is complete."""
        self._batch_sizes = dict(batch_sizes or {})
        """Of ranks whose batches are not the job's."""
        self._shards = shards
        self._cursors: dict[tuple[Rank, Epoch], int | None] = {}
        """Where in its shard each rank goes on."""
        self._books: dict[Epoch, EpochBook] = {}
        self._cut_short: EpochBook | None = None
        """Of the last epoch, when `max_steps` has ended it before its end: a job that goes on has the rest to train."""
        self._next_lease = 1
        self.epoch = Epoch(0)
        """The first epoch that is not complete; `num_epochs` when all are."""

    @property
    def dropped_size(self) -> int:
        """Samples of an epoch that `drop_last` leaves out."""
        return self.extent.dataset_size - self.extent.kept_size

    @property
    def is_complete(self) -> bool:
        """True if all that is to be trained is committed."""
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
        """The books of an epoch, opened when first asked for."""
        if epoch not in self._books:
            self._books[epoch] = EpochBook(IntervalSet([(0, self.size(epoch))]))
        return self._books[epoch]

    def open_books(self) -> dict[Epoch, EpochBook]:
        """The books in use, by epoch."""
        return dict(self._books)

    def free_samples(self, epoch: Epoch) -> int:
        """Samples of the epoch that no rank is to train now: those in reserve count as free."""
        return self.book(epoch).free.size + self.reserved_samples(epoch) if self._has_free(epoch) else 0

    def free_batches(self, epoch: Epoch) -> int:
        """Batches that the epoch's free samples make, those in reserve included; a gap between them ends a batch."""
        parts = self.book(epoch).free if self._has_free(epoch) else ()
        reserved = self._reserved(epoch) if parts or self._has_free(epoch) else ()
        return sum(self.num_batches(end - start) for start, end in parts) + sum(map(self.num_batches, reserved))

    def free_later(self) -> int:
        """Batches of all epochs after this one that nobody has."""
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

    @property
    def num_begun(self) -> int:
        """Epochs up to the last one of which something is committed."""
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
        """The rank's leased batches that are not committed: up to the last one of the open epoch, and all."""
        through_epoch, total = 0, 0
        leases = self.rank_leases.get(rank)
        size = self._batch_sizes.get(rank, self.extent.batch_size)
        for part in leases.parts(leases.committed, leases.permitted) if leases is not None else ():
            total += -(-part.size // size)
            if part.epoch == self.epoch or self.is_stopped:
                through_epoch = total
        return through_epoch, total

    def has_work(self, rank: Rank) -> bool:
        """True if the rank has leased samples that it may train and has not reported as trained."""
        leases = self.rank_leases.get(rank)
        return leases is not None and leases.processed < leases.permitted

    def set_batch_size(self, rank: Rank, size: int) -> None:
        """The rank's batches have so many samples."""
        self._batch_sizes[rank] = size

    def num_batches(self, num_samples: int, rank: Rank | None = None) -> int:
        """Batches that so many samples of one slice make, of the job's batch size or of a rank's."""
        size = self.extent.batch_size if rank is None else self._batch_sizes.get(rank, self.extent.batch_size)
        return -(-num_samples // size)

    def in_flight(self, rank: Rank, num_batches: int) -> list[Lease]:
        """The rank's next batches after what it has reported as trained."""
        leases = self.rank_leases.get(rank, RankLeases())
        size = num_batches * self._batch_sizes.get(rank, self.extent.batch_size)
        return list(leases.parts(leases.processed, leases.processed + size))

    def grant(self, rank: Rank, epoch: Epoch, num_samples: int) -> list[Lease]:
        """Leases up to `num_samples` free samples of the epoch to the rank, lowest positions first, behind what it has.
        Raises `ValueError` for a rank with a reserve: that comes first.
        """
        if not self._has_free(epoch) or num_samples <= 0:
            return []
        leases = self.rank_leases.setdefault(rank, RankLeases())
        if leases.permitted < leases.end:
            raise ValueError(f"rank {rank} has samples in reserve, which it is to train first")
        handed = [self._hand(rank, epoch, start, end) for start, end in self._take(rank, epoch, num_samples)]
        leases.permitted = leases.end
        return handed

    # The reserve (protocol P16.3)

    def reserve(self, rank: Rank, epoch: Epoch, num_samples: int) -> list[Lease]:
        """Leases up to `num_samples` free samples to the rank for its reserve: it trains them when `permit` says so, or
        while the coordinator is away.
        """
        if not self._has_free(epoch) or num_samples <= 0:
            return []
        return [self._hand(rank, epoch, start, end) for start, end in self._take(rank, epoch, num_samples)]

    def permit(self, rank: Rank, num_samples: int) -> int:
        """Lets the rank train up to so many samples of its reserve; returns how many it has got."""
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
        """Wants the rank's reserve back; False when that is under way."""
        was_recalled = rank in self.recalled
        self.rank_leases.setdefault(rank, RankLeases())
        self.recalled[rank] = None
        return not was_recalled

    def take_back(self, rank: Rank, position: int) -> bool:
        """The rank keeps what lies before the position, and the rest is free; False when that was not asked for, or is
        no position that it can name.
        """
        leases = self.rank_leases.get(rank)
        if leases is None or rank not in self.recalled or not leases.permitted <= position <= leases.end:
            return False
        del self.recalled[rank]
        leases.permitted = position
        for part in leases.cut_off(position):
            self.book(part.epoch).free.add(part.offset, part.offset + part.size)
        return True

    def is_recalled(self, rank: Rank) -> bool:
        """True if the rank's reserve is wanted back, and it has not answered."""
        return rank in self.recalled

    @property
    def has_reserve(self) -> bool:
        """True if any rank has samples in reserve."""
        return any(leases.permitted < leases.end for leases in self.rank_leases.values())

    def reserve_of(self, rank: Rank) -> int:
        """Samples that the rank has in reserve."""
        leases = self.rank_leases.get(rank)
        return leases.end - leases.permitted if leases is not None else 0

    def _take(self, rank: Rank, epoch: Epoch, num_samples: int) -> list[Interval]:
        free = self.book(epoch).free
        if self._shards is None:
            return free.take(num_samples)
        cursor = self._cursors.get((rank, epoch))
        taken, self._cursors[rank, epoch] = self._shards.take(free, epoch, num_samples, cursor)
        return taken

    def grant_slice(self, rank: Rank, epoch: Epoch, offset: int, size: int) -> Lease:
        """Leases exactly this slice. Raises `ValueError` when it is not free."""
        if not self._has_free(epoch):
            raise ValueError(f"there is no epoch {epoch} to lease of")
        self.book(epoch).free.remove(offset, offset + size)
        lease = self._hand(rank, epoch, offset, offset + size)
        self.rank_leases[rank].permitted = self.rank_leases[rank].end
        return lease

    def _hand(self, rank: Rank, epoch: Epoch, start: int, end: int) -> Lease:
        lease = Lease(id=LeaseId(self._next_lease), epoch=epoch, offset=start, size=end - start)
        self._next_lease += 1
        self.rank_leases.setdefault(rank, RankLeases()).leases.append(lease)
        return lease

    def bounds(self, rank: Rank) -> tuple[int, int]:
        """Between which positions the rank's next cut must lie."""
        leases = self.rank_leases.get(rank, RankLeases())
        return leases.committed, leases.end

    def set_processed(self, rank: Rank, num_samples: int) -> None:
        """The rank reports how many samples of its leases it has trained. Old news changes nothing."""
        leases = self.rank_leases.get(rank)
        if leases is not None:
            leases.processed = min(max(leases.processed, num_samples), leases.end)
            leases.permitted = max(leases.permitted, leases.processed)  # begun while the coordinator was away

    def commit(self, rank: Rank, cut: int) -> list[Lease]:
        """Books the rank's samples before `cut`, counted since its incarnation began; returns what is new, in order."""
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
        """Frees the uncommitted leases of a lost rank; returns how many samples they have."""
        self.recalled.pop(rank, None)
        leases = self.rank_leases.pop(rank, None)
        if leases is None:
            return 0
        parts = list(leases.remainders())
        for part in parts:
            self.book(part.epoch).free.add(part.offset, part.offset + part.size)
        return sum(part.size for part in parts)

    def close_epochs(self) -> list[Epoch]:
        """The epochs that are complete and were not before, in order."""
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
        """Goes on from `to_json`: what was committed stays so, all else is free. Only for a new ledger."""
        self.epoch = Epoch(whole_number(state["epoch"], "epoch"))
        for epoch, book in state["books"].items():
            if int(epoch) >= self.num_epochs:
                continue
            committed = IntervalSet((start, end) for start, end in book["committed"])
            free = IntervalSet([(0, self.size(Epoch(int(epoch))))])
            for start, end in committed:
                free.remove(start, end)
            self._books[Epoch(int(epoch))] = EpochBook(free, committed)
        self.close_epochs()

    def _forget_finished(self, leases: RankLeases) -> None:
        while leases.leases and leases.first + leases.leases[0].size <= leases.committed:
            leases.first += leases.leases.popleft().size

"""Who has which samples: free, leased, processed, committed. Every sample is booked exactly once."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from elche_coordinator.core.ids import Epoch, LeaseId, Rank
from elche_coordinator.core.intervals import IntervalSet


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A slice of an epoch's permutation, given to one rank."""

    id: LeaseId
    epoch: Epoch
    offset: int
    size: int


@dataclass(slots=True)
class EpochBook:
    """One epoch's positions. Those in neither set are leased."""

    free: IntervalSet
    committed: IntervalSet = field(default_factory=IntervalSet)


@dataclass(slots=True)
class Holding:
    """One rank's ordered leases. Positions are counted in samples since the rank's incarnation began."""

    leases: deque[Lease] = field(default_factory=deque)
    first: int = 0
    """Position of the first lease's first sample."""
    committed: int = 0
    """Samples before this position are committed."""
    processed: int = 0
    """Samples before this position are trained, as far as the rank has said."""

    @property
    def end(self) -> int:
        """Position after the last lease."""
        return self.first + sum(lease.size for lease in self.leases)

    def remainders(self) -> Iterator[Lease]:
        """What is not committed, lease by lease."""
        skip = self.committed - self.first
        for lease in self.leases:
            if skip < lease.size:
                yield Lease(id=lease.id, epoch=lease.epoch, offset=lease.offset + skip, size=lease.size - skip)
            skip = max(0, skip - lease.size)


class Ledger:
    """The books of one job. Slices move free -> leased -> committed; a lost rank's uncommitted ones go back.

    Every method leaves each epoch's positions in exactly one place; what would not raises `ValueError` and
    changes nothing.
    """

    def __init__(self, *, dataset_size: int, num_epochs: int, batch_size: int, drop_last: bool = False) -> None:
        self.dataset_size = dataset_size
        self.num_epochs = num_epochs
        self.batch_size = batch_size
        self.kept_size = dataset_size - dataset_size % batch_size if drop_last else dataset_size
        """Samples of an epoch that are trained."""
        self.holdings: dict[Rank, Holding] = {}
        self._books: dict[Epoch, EpochBook] = {}
        self._next_lease = 1
        self.epoch = Epoch(0)
        """The first epoch that is not complete; `num_epochs` when all are."""
        self._skip_empty_epochs()

    @property
    def dropped_size(self) -> int:
        """Samples of an epoch that `drop_last` leaves out."""
        return self.dataset_size - self.kept_size

    @property
    def is_complete(self) -> bool:
        """Whether every epoch is committed."""
        return self.epoch == self.num_epochs

    def book(self, epoch: Epoch) -> EpochBook:
        """The books of an epoch, opened when first asked for."""
        if epoch not in self._books:
            self._books[epoch] = EpochBook(IntervalSet([(0, self.kept_size)]))
        return self._books[epoch]

    def open_books(self) -> dict[Epoch, EpochBook]:
        """The books in use, by epoch."""
        return dict(self._books)

    def free_samples(self, epoch: Epoch) -> int:
        """Samples of the epoch that no rank has."""
        return self.book(epoch).free.size if epoch < self.num_epochs else 0

    def free_batches(self, epoch: Epoch) -> int:
        """Batches that the epoch's free samples make; a gap between them ends a batch."""
        parts = self.book(epoch).free if epoch < self.num_epochs else ()
        return sum(self.num_batches(end - start) for start, end in parts)

    def committed_samples(self, epoch: Epoch) -> int:
        """Samples of the epoch that are committed."""
        if epoch < self.epoch:
            return self.kept_size
        return self._books[epoch].committed.size if epoch in self._books else 0

    def total_processed(self) -> int:
        """Samples of all epochs that are trained, as far as ranks have said, or committed."""
        closed = self.epoch * self.kept_size
        opened = sum(book.committed.size for book in self._books.values())
        return closed + opened + sum(max(0, h.processed - h.committed) for h in self.holdings.values())

    def uncommitted_batches(self, rank: Rank) -> tuple[int, int]:
        """Batches that the rank holds and has not committed: up to the last one of the open epoch, and all."""
        through_epoch, held = 0, 0
        for part in self.holdings[rank].remainders() if rank in self.holdings else ():
            held += self.num_batches(part.size)
            if part.epoch == self.epoch:
                through_epoch = held
        return through_epoch, held

    def num_batches(self, num_samples: int) -> int:
        """Batches that so many samples of one slice make."""
        return -(-num_samples // self.batch_size)

    def grant(self, rank: Rank, epoch: Epoch, num_samples: int) -> list[Lease]:
        """Leases up to `num_samples` free samples of the epoch to the rank, lowest positions first."""
        if epoch >= self.num_epochs or num_samples <= 0:
            return []
        holding = self.holdings.setdefault(rank, Holding())
        leases = []
        for start, end in self.book(epoch).free.take(num_samples):
            leases.append(Lease(id=LeaseId(self._next_lease), epoch=epoch, offset=start, size=end - start))
            self._next_lease += 1
        holding.leases.extend(leases)
        return leases

    def bounds(self, rank: Rank) -> tuple[int, int]:
        """Between which positions the rank's next cut must lie."""
        holding = self.holdings.get(rank, Holding())
        return holding.committed, holding.end

    def note_processed(self, rank: Rank, num_samples: int) -> None:
        """The rank says how many samples of its leases it has trained. Old news changes nothing."""
        holding = self.holdings.get(rank)
        if holding is not None:
            holding.processed = min(max(holding.processed, num_samples), holding.end)

    def commit(self, rank: Rank, cut: int) -> dict[Epoch, int]:
        """Books the rank's samples before `cut`; returns how many of each epoch were new."""
        holding = self.holdings.setdefault(rank, Holding())
        if not holding.committed <= cut <= holding.end:
            raise ValueError(
                f"rank {rank} cannot commit {cut} samples: {holding.committed} are committed, {holding.end} leased"
            )
        booked: dict[Epoch, int] = {}
        for part in list(holding.remainders()):
            size = min(part.size, cut - holding.committed)
            if size <= 0:
                break
            self.book(part.epoch).committed.add(part.offset, part.offset + size)
            booked[part.epoch] = booked.get(part.epoch, 0) + size
            holding.committed += size
        holding.processed = max(holding.processed, cut)
        self._forget_finished(holding)
        return booked

    def release(self, rank: Rank) -> int:
        """Gives the uncommitted leases of a lost rank back to the pool; returns how many samples."""
        holding = self.holdings.pop(rank, None)
        if holding is None:
            return 0
        parts = list(holding.remainders())
        for part in parts:
            self.book(part.epoch).free.add(part.offset, part.offset + part.size)
        return sum(part.size for part in parts)

    def close_epochs(self) -> list[Epoch]:
        """The epochs that are complete and were not before, in order."""
        closed = []
        while self.epoch in self._books and self._books[self.epoch].committed.size == self.kept_size:
            del self._books[self.epoch]
            closed.append(self.epoch)
            self.epoch = Epoch(self.epoch + 1)
        return closed

    def to_json(self) -> dict[str, object]:
        """The books as plain values."""
        return {
            "epoch": self.epoch,
            "next_lease": self._next_lease,
            "books": {
                str(epoch): {"free": list(book.free), "committed": list(book.committed)}
                for epoch, book in self._books.items()
            },
            "holdings": {
                str(rank): {
                    "committed": holding.committed,
                    "leases": [[part.id, part.epoch, part.offset, part.size] for part in holding.remainders()],
                }
                for rank, holding in self.holdings.items()
            },
        }

    def _forget_finished(self, holding: Holding) -> None:
        while holding.leases and holding.first + holding.leases[0].size <= holding.committed:
            holding.first += holding.leases.popleft().size

    def _skip_empty_epochs(self) -> None:
        if self.kept_size == 0:
            self.epoch = Epoch(self.num_epochs)

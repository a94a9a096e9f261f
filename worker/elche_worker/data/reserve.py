"""A rank's reserve: leases that it must not begin yet. The coordinator permits them bit by bit; while it is away, the
rank begins them by itself, so that it has work until the coordinator is back.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import replace

from elche_worker.data.lease_loader import LeasedPart


class ReservedLeases:
    """Passes leases, or whole batches of them, to `hand` when they may be begun (protocol P16.3).

    A lease may be passed on in several parts. Each part gets a new `id`; `granted` keeps the coordinator's. Positions
    are samples since the incarnation began.
    """

    def __init__(self, batch_size: int, hand: Callable[[LeasedPart], None]) -> None:
        self._batch_size = batch_size
        self._hand = hand
        self._leases: deque[LeasedPart] = deque()
        """Not handed over."""
        self._last_lease = 0
        self._num_parts = 0
        self.num_handed = 0
        """Samples passed to `hand` so far."""

    @property
    def is_empty(self) -> bool:
        """True if no lease is left in the reserve."""
        return not self._leases

    def add(self, lease: LeasedPart, *, is_reserve: bool) -> None:
        """Appends a new lease; unless it `is_reserve`, it and all before it may be begun."""
        if lease.id <= self._last_lease:
            return
        self._last_lease = lease.id
        self._leases.append(lease)
        if not is_reserve:
            self.permit(self.num_handed + sum(one.size for one in self._leases))

    def permit(self, position: int) -> None:
        """Permits the samples before the position."""
        while self._leases and self.num_handed < position:
            self._begin(min(self._leases[0].size, position - self.num_handed))

    def permit_batches(self, num_batches: int) -> None:
        """Permits up to `num_batches` more batches."""
        while self._leases and num_batches > 0:
            size = min(self._leases[0].size, num_batches * self._batch_size)
            num_batches -= -(-size // self._batch_size)
            self._begin(size)

    def give_back(self) -> int:
        """Drops the reserve; returns the position up to which samples were passed on. Those are trained, so that the
        coordinator may lease only samples after that position to others.
        """
        self._leases.clear()
        return self.num_handed

    def _begin(self, size: int) -> None:
        lease = self._leases.popleft()
        if size < lease.size:
            self._leases.appendleft(replace(lease, offset=lease.offset + size, size=lease.size - size))
        self._num_parts += 1
        self.num_handed += size
        self._hand(replace(lease, id=self._num_parts, size=size))

"""Leasing of a sharded data set: a rank reads a shard to its end before it begins another."""

from bisect import bisect_right
from itertools import accumulate

from elche.shards import shuffled_shards
from elche_coordinator.core.work.intervals import Interval, IntervalSet


class ShardOrder:
    """Positions of an epoch, shard after shard. A rank that needs more begins the next untouched shard, in an order
    shuffled by seed and epoch; when all are begun, it takes from the one with the most left.
    """

    def __init__(self, sizes: tuple[int, ...], seed: int) -> None:
        self._starts = [0, *accumulate(sizes)]
        self._sizes = sizes
        self._seed = seed
        self._orders: dict[int, list[int]] = {}
        """Starts of untouched shards of each epoch, the next one last."""

    def take(
        self, free: IntervalSet, epoch: int, size: int, batch_size: int, cursor: int | None, epoch_size: int
    ) -> tuple[list[Interval], int | None]:
        """Removes `size` free positions, beginning at the cursor, or fewer if there are no more; returns them, and the
        new cursor. The shard in which the epoch ends, by `drop_last` or `max_steps`, is read as one that ends there. A
        shard is cut between batches only, for which up to a batch more is taken: else batches would be smaller, by how
        much was leased at once, which depends on time.
        """
        taken: list[Interval] = []
        while size > 0 and free:
            if cursor is None or not free.contains(cursor):
                cursor = self._next_shard(free, epoch, epoch_size)
            start, end = cursor, self._end_of_shard(cursor, epoch_size)
            stop = min(free.end_of(start), end, start - (-size // batch_size) * batch_size)
            free.remove(start, stop)
            taken.append((start, stop))
            size -= stop - start
            cursor = stop if stop < end else None
        return taken, cursor

    def _end_of_shard(self, position: int, epoch_size: int) -> int:
        return min(self._starts[bisect_right(self._starts, position)], epoch_size)

    def _next_shard(self, free: IntervalSet, epoch: int, epoch_size: int) -> int:
        """Where to read on: the next untouched shard, before these what was begun before a resume; once all are begun,
        the largest free interval.
        """
        if epoch not in self._orders:
            untouched = [self._starts[shard] for shard in shuffled_shards(self._sizes, seed=self._seed, epoch=epoch)]
            # Before any, where a job is resumed: those that its ranks were reading.
            begun = sorted({start for start, _ in free}.difference(self._starts))
            self._orders[epoch] = [*begun, *untouched][::-1]
        order = self._orders[epoch]
        while order:
            start = order.pop()
            if free.contains(start) and free.end_of(start) >= self._end_of_shard(start, epoch_size):
                return start
        return max(free, key=lambda part: (part[1] - part[0], -part[0]))[0]

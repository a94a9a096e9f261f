"""Computes how many batches each rank makes until a time, so that all enter the round together."""

import heapq
import math
from collections.abc import Sequence
from dataclasses import replace

from elche.partition import equal_sizes, ratio_sizes
from elche.sums import added
from elche_coordinator.core.messages.ids import Rank, by_rank
from elche_coordinator.core.pacing.policy import Pace, Work

STRETCH = 0.25
"""A round may differ from El Che's length by this fraction, to make counts come out whole or to end the epoch."""
NEARLY_BEST = 0.003
"""Losses that differ by less are equal; then the length nearest to El Che's wins."""
MAX_CANDIDATES = 24
"""Lengths of a round that are compared, about."""
SPARE_MS = 30.0
"""Training time for which work is leased beyond the next round, while the round after is decided."""
ROUND_TRIPS = 3.0
"""In addition, this many times that a message takes to a rank and back: for the announcement, the results, and the next
leases."""
LEAD_BATCHES, LEAST_LEAD_MS = 4, 1000.0
"""While an epoch ends, ranks train batches of later ones for at most so many batches of the slowest rank, and for at
least so many ms.
"""
OVERLAP_MARGIN = 1.25
"""If ranks train on during an averaging, in addition the longest recent one times this: the next may last longer."""


def within(counts: dict[Rank, int], max_batch_diff: int | None) -> dict[Rank, int]:
    """The counts, each at most `max_batch_diff` above the smallest one that is not 0."""
    if max_batch_diff is None:
        return counts
    limit = min((count for count in counts.values() if count), default=0) + max_batch_diff
    return {rank: min(count, limit) for rank, count in counts.items()}


def counts_near(paces: Sequence[Pace], horizon_ms: float, *, at_least: int = 0) -> dict[Rank, int]:
    """Batches of each rank in a round that ends near `horizon_ms` from now, with the least time spent waiting.

    Candidates are whole batches of the slowest rank within `STRETCH` of the horizon; the loss of one is the part of
    the ranks' capacity that its rounding leaves idle. `at_least`: batches that each rank makes in any case.
    """
    slowest = max(paces, key=lambda pace: (pace.ms_per_batch or 1.0, -pace.rank))
    slow_ms = slowest.ms_per_batch or 1.0
    middle = max(0.0, horizon_ms - slowest.delay_ms) / slow_ms
    first = max(at_least, 1, math.ceil(middle * (1 - STRETCH)))
    last = max(first, math.floor(middle * (1 + STRETCH)))
    step = max(1, (last - first + 1) // MAX_CANDIDATES)
    scored = []
    for num_batches in range(first, last + 1, step):
        counts = _counts_at(paces, slowest.delay_ms + num_batches * slow_ms, at_least)
        scored.append((_loss(paces, counts), abs(num_batches - middle), counts))
    best = min(loss for loss, _, _ in scored)
    good = [(far, counts) for loss, far, counts in scored if loss <= best + NEARLY_BEST]
    return min(good, key=lambda entry: entry[0])[1]


def counts_to_finish(paces: Sequence[Pace], num_batches: int) -> dict[Rank, int]:
    """Counts that end the epoch, with `num_batches` more dealt out so that the last rank finishes as early as possible.

    A rank that gets some of these makes them after all that it has leased; the others stop at the last batch of this
    epoch that they have leased.
    """
    low = min(finish_ms(pace, pace.leased_total) for pace in paces)
    high = max(finish_ms(pace, pace.leased_total + math.ceil(num_batches / pace.ratio)) for pace in paces)
    for _ in range(50):  # halvings, after which the interval is as small as floats distinguish
        middle = (low + high) / 2
        dealt = added(pace.ratio * max(0, fitting(pace, middle) - pace.leased_total) for pace in paces)
        low, high = (middle, high) if dealt <= num_batches else (low, middle)
    more = {pace.rank: max(0, fitting(pace, low) - pace.leased_total) for pace in paces}
    pace_of = {pace.rank: pace for pace in paces}
    heap = [(finish_ms(pace, pace.leased_total + more[pace.rank] + 1), pace.rank) for pace in paces]
    heapq.heapify(heap)
    left = num_batches - added(pace.ratio * more[pace.rank] for pace in paces)
    # Ranks' batches may be fractions of the job's, whose sums miss 0 by rounding.
    while left > 1e-9:
        rank = heap[0][1]
        more[rank] += 1
        pace = pace_of[rank]
        left -= pace.ratio
        heapq.heapreplace(heap, (finish_ms(pace, pace.leased_total + more[rank] + 1), rank))
    return {
        pace.rank: pace.leased_total + more[pace.rank] if more[pace.rank] else max(pace.leased, pace.made)
        for pace in paces
    }


def whole_span_ms(paces: Sequence[Pace], counts: dict[Rank, int], span_ms: float) -> float:
    """The length in ms of a round at which ranks idle least, if each trains as many batches beyond its count as fit. It
    is `span_ms` or up to one batch of the slowest rank longer.
    """
    longest_ms = span_ms + max(pace.ms_per_batch or 1.0 for pace in paces)
    best = (_lost_until(paces, counts, span_ms), span_ms)
    for pace in paces:
        ms, at_ms = pace.ms_per_batch or 1.0, finish_ms(pace, counts[pace.rank])
        for step in range(1, 1 + min(MAX_CANDIDATES, int((longest_ms - span_ms) / ms))):
            end_ms = at_ms + (math.floor((span_ms - at_ms) / ms + 1e-9) + step) * ms
            best = min(best, (_lost_until(paces, counts, end_ms), end_ms))
    return best[1]


def _lost_until(paces: Sequence[Pace], counts: dict[Rank, int], end_ms: float) -> float:
    most = {pace.rank: max(counts[pace.rank], fitting(pace, end_ms)) for pace in paces}
    return round(_loss(paces, most), 3)


def spare_batches(ms_per_batch: float, work: Work) -> int:
    """Batches to lease beyond a round to a rank of this speed, at least 2."""
    return max(
        2, math.ceil((SPARE_MS + ROUND_TRIPS * work.round_trip_ms + OVERLAP_MARGIN * work.overlap_ms) / ms_per_batch)
    )


def lead_ms(paces: Sequence[Pace]) -> float:
    """Training time in ms for which ranks get batches of later epochs while this one ends; without limit while a rank
    evaluates, which is not over sooner than expected because a device is faster again.
    """
    if any(pace.delay_ms > 0 for pace in paces):
        return math.inf
    return max(LEAST_LEAD_MS, LEAD_BATCHES * max(pace.ms_per_batch or 1.0 for pace in paces))


def arrivals_ms(paces: Sequence[Pace], counts: dict[Rank, int]) -> list[float]:
    """Ms from now until each rank has made its count."""
    return [max(0.0, finish_ms(pace, counts[pace.rank])) for pace in paces]


def in_samples(paces: Sequence[Pace], num_batches: dict[Rank, int]) -> dict[Rank, int]:
    """Each rank's batches in samples."""
    return {pace.rank: num_batches[pace.rank] * pace.batch_size for pace in paces}


def equal_shares(paces: Sequence[Pace], num_samples: int) -> dict[Rank, int]:
    """Splits samples so that every rank trains equally many batches."""
    ranks = [pace.rank for pace in paces]
    if all(pace.ratio == 1 for pace in paces):
        return by_rank(ranks, equal_sizes(len(paces), num_samples))
    total = added(pace.ratio for pace in paces)
    return by_rank(ranks, ratio_sizes([pace.ratio / total for pace in paces], num_samples))


def dealt_free(paces: Sequence[Pace], wanted: dict[Rank, int], free: float) -> dict[Rank, int]:
    """Deals up to `free` batches to ranks that have leased fewer than `wanted`, each to the rank that would run out of
    work first.
    """
    most = {pace.rank: max(0, wanted[pace.rank] - pace.leased_total) for pace in paces}
    if added(pace.ratio * most[pace.rank] for pace in paces) <= free:
        return most
    lease = _surely_dealt(paces, most, free)
    heap = [
        (finish_ms(pace, pace.leased_total + lease[pace.rank]), pace.rank)
        for pace in paces
        if lease[pace.rank] < most[pace.rank]
    ]
    heapq.heapify(heap)
    pace_of = {pace.rank: pace for pace in paces}
    free -= added(pace.ratio * lease[pace.rank] for pace in paces)
    while heap and free > 1e-9:
        _, rank = heap[0]
        pace = pace_of[rank]
        lease[rank] += 1
        free -= pace.ratio
        if lease[rank] < most[rank]:
            heapq.heapreplace(heap, (finish_ms(pace, pace.leased_total + lease[rank]), rank))
        else:
            heapq.heappop(heap)
    return lease


def _surely_dealt(paces: Sequence[Pace], most: dict[Rank, int], free: float) -> dict[Rank, int]:
    """Deals all but the last one or two batches per rank, by bisecting the time until which all ranks are busy. Dealing
    one by one gives the same counts, but held the coordinator up for many seconds in a large epoch.
    """

    def needed(until_ms: float) -> dict[Rank, int]:
        return {pace.rank: min(most[pace.rank], max(0, fitting(pace, until_ms) - pace.leased_total)) for pace in paces}

    low = min(finish_ms(pace, pace.leased_total) for pace in paces)
    high = max(finish_ms(pace, pace.leased_total + most[pace.rank]) for pace in paces)
    for _ in range(50):  # halvings, after which the interval is as small as floats distinguish
        middle = (low + high) / 2
        lease = needed(middle)
        is_free = added(pace.ratio * (1 + lease[pace.rank]) for pace in paces) <= free
        low, high = (middle, high) if is_free else (low, middle)
    lease = needed(low)
    is_free = added(pace.ratio * (1 + lease[pace.rank]) for pace in paces) <= free
    return lease if is_free else dict.fromkeys(most, 0)


def _counts_at(paces: Sequence[Pace], horizon_ms: float, at_least: int) -> dict[Rank, int]:
    """Batches that each rank will have made at the horizon, rounded; at least `at_least` more than now."""
    counts = {}
    for pace in paces:
        more = int((horizon_ms - pace.delay_ms) / (pace.ms_per_batch or 1.0) + 0.5)
        counts[pace.rank] = pace.made + max(at_least, more, 0)
    return counts


def _loss(paces: Sequence[Pace], counts: dict[Rank, int]) -> float:
    """Part of the ranks' capacity that is idle until the last one has made its count."""
    span_ms = max(finish_ms(pace, counts[pace.rank]) for pace in paces)
    idle = added((span_ms - finish_ms(pace, counts[pace.rank])) / (pace.ms_per_batch or 1.0) for pace in paces)
    return idle / added(span_ms / (pace.ms_per_batch or 1.0) for pace in paces) if span_ms > 0 else 0.0


def finish_ms(pace: Pace, count: int) -> float:
    """Ms from now until the rank has made `count` batches; negative if it has made them already."""
    return pace.delay_ms + (count - pace.made) * (pace.ms_per_batch or 1.0)


def elapsed_ms(pace: Pace) -> float:
    """Ms since the last committed round's snapshot."""
    return pace.made * (pace.ms_per_batch or 1.0) + max(0.0, -pace.delay_ms)


def fitting(pace: Pace, horizon_ms: float) -> int:
    """Batches, those made included, that are done within the horizon. The 1e-9 makes up for rounding: a batch that ends
    exactly at the horizon fits.
    """
    return pace.made + max(0, math.floor((horizon_ms - pace.delay_ms) / (pace.ms_per_batch or 1.0) + 1e-9))


def with_ms_per_batch(pace: Pace, ms_per_batch: float) -> Pace:
    """The pace of a rank at an assumed speed, as if the round began now."""
    return replace(pace, ms_per_batch=ms_per_batch, made=0, delay_ms=0.0)

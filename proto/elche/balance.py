"""The auto-balancer's arithmetic: each rank's share of every batch in a user-owned loop."""

import math
import sys
from collections.abc import Sequence

from elche.partition import check_shares, ranks_by_share, round_half_away
from elche.sums import added

MIN_SHARE_FRACTION = 0.05
"""Smallest share of a batch for any rank, so that a slow rank is still measured (row G2)."""

_AT_MINIMUM = MIN_SHARE_FRACTION + 1e-9
_SUM_TOLERANCE = 1e-6


def rebalanced_ratios(throughput: Sequence[float], ratios: Sequence[float]) -> list[float]:
    """New shares of a batch, in proportion to `throughput` (samples per ms, 0 = not measured), sum 1.

    Shares below MIN_SHARE_FRACTION are raised to it and the others are reduced in proportion. `ratios` are the
    present shares and come back unchanged while nothing is measured. Raises ValueError when the lengths
    differ, and for negative or not finite values. Source: row G2.
    """
    check_shares("throughput", throughput)
    check_shares("ratios", ratios)
    if len(throughput) != len(ratios):
        raise ValueError(f"throughput has {len(throughput)} ranks and ratios has {len(ratios)}; one each")
    total = added(throughput)
    if total == 0:
        return list(ratios)
    return _normalised(_with_minimum([speed / total for speed in throughput]))


def shard_sizes(ratios: Sequence[float], batch_size: int, least: int = 1) -> list[int]:
    """Samples of one batch per rank: rounded shares, at least `least` each; the last rank takes the remainder.

    A batch that is too small for that goes to as many of the largest ratios (equal ones by rank) as it suffices for,
    and the others get 0. Raises ValueError for a negative batch size, and for ratios that are negative, not finite or
    do not add up to 1. Source: row G2.
    """
    check_shares("ratios", ratios)
    if batch_size < 0:
        raise ValueError(f"batch_size is {batch_size!r}; it must be at least 0")
    if not math.isclose(added(ratios), 1.0, rel_tol=0, abs_tol=_SUM_TOLERANCE):
        raise ValueError(f"ratios add up to {added(ratios)!r} ({list(ratios)!r}); they must add up to 1")
    num_served = max(1, batch_size // least)
    if num_served >= len(ratios):
        return _rounded_shares(ratios, batch_size, least)
    served = sorted(ranks_by_share(ratios)[:num_served])
    shares = _normalised([ratios[rank] or sys.float_info.min for rank in served])
    sizes = dict(zip(served, _rounded_shares(shares, batch_size, min(least, batch_size)), strict=True))
    return [sizes.get(rank, 0) for rank in range(len(ratios))]


def hinted_ratios(world_size: int, slow_rank: int, ratio: float) -> list[float]:
    """Initial shares of a batch when every rank is assumed `ratio` times as fast as `slow_rank`, sum 1.

    A ratio below 1 counts as 1. Raises ValueError for a rank outside the world and a ratio that is not
    finite. Source: rows G2, T5.
    """
    if not 0 <= slow_rank < world_size:
        raise ValueError(f"slow_rank is {slow_rank!r}; the world has ranks 0 to {world_size - 1}")
    if not math.isfinite(ratio):
        raise ValueError(f"ratio is {ratio!r}; it must be a finite number")
    weights = [1.0] * world_size
    weights[slow_rank] = 1 / max(ratio, 1.0)
    return _normalised(weights)


def _with_minimum(shares: Sequence[float]) -> list[float]:
    """The shares with small ones raised to the minimum, at the expense of those above it where these suffice."""
    raised = [max(share, MIN_SHARE_FRACTION) for share in shares]
    deficit = added(max(MIN_SHARE_FRACTION - share, 0.0) for share in shares)
    spare = added(share for share in raised if share > _AT_MINIMUM)
    if deficit == 0 or spare <= MIN_SHARE_FRACTION * len(shares):
        return raised
    kept_fraction = 1 - deficit / spare
    return [max(s * kept_fraction, MIN_SHARE_FRACTION) if s > _AT_MINIMUM else s for s in raised]


def _normalised(weights: Sequence[float]) -> list[float]:
    total = added(weights)
    return [weight / total for weight in weights]


def _rounded_shares(ratios: Sequence[float], batch_size: int, least: int) -> list[int]:
    sizes: list[int] = []
    remaining = batch_size
    for num_after, ratio in zip(range(len(ratios) - 1, 0, -1), ratios, strict=False):
        size = min(max(round_half_away(batch_size * ratio), least), remaining - num_after * least)
        sizes.append(size)
        remaining -= size
    return [*sizes, remaining]

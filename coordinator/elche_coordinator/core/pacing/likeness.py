"""Matches ranks to those of an earlier training by device, so that learned speeds are kept (row E10)."""

from collections.abc import Sequence


def likenesses(then: Sequence[str], now: Sequence[str]) -> list[list[int]]:
    """Returns, for each rank, the ranks of an earlier training from which it takes its speed. `then` and `now` have the
    devices by rank.

    First the same rank number on the same device, then any rank on that device, then one of the same kind; each is
    taken once. A rank that is left over takes the speeds of all of its kind; without any the list is empty.
    """
    left = dict(enumerate(then))
    found: list[list[int]] = [[] for _ in now]
    for rank, device in enumerate(now):
        if left.get(rank) == device:
            found[rank] = [rank]
            del left[rank]
    for kind in (lambda device: device, _kind):
        for rank, device in enumerate(now):
            first = next((old for old, other in left.items() if kind(other) == kind(device)), None)
            if not found[rank] and first is not None:
                found[rank] = [first]
                del left[first]
    for rank, device in enumerate(now):
        found[rank] = found[rank] or [old for old, other in enumerate(then) if _kind(other) == _kind(device)]
    return found


def _kind(device: str) -> str:
    """The device without its number on the host."""
    first, _, model = device.partition(" ")
    return f"{first.partition(':')[0]} {model}"

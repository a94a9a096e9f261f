"""What is dropped where users share the room for records."""

from collections import Counter, deque
from collections.abc import Callable, Iterable
from heapq import heapify, heapreplace
from pathlib import Path
from typing import TypeVar

Thing = TypeVar("Thing")
Owner = Callable[[str], str]
"""The user who has submitted a job; empty for an unknown job."""


def remove_crowded_out(files: Iterable[tuple[Path, str, int]], owner: Owner, most: int) -> None:
    """Removes files so that the sizes of the others are at most `most` together (`crowded_out`). `files` are
    (path, job, size), oldest first.
    """
    for path in crowded_out(((path, owner(job_id), size) for path, job_id, size in files), most):
        path.unlink(missing_ok=True)


def crowded_out(things: Iterable[tuple[Thing, str, int]], most: int) -> list[Thing]:
    """The things to drop so that the sizes of the others are at most `most` together: each time the oldest of the user
    who has most, so that nobody's many jobs push out the few of another. `things` are (thing, user, size), oldest
    first.
    """
    held: Counter[str] = Counter()
    of_user: dict[str, deque[tuple[Thing, int]]] = {}
    for thing, user, size in things:
        held[user] += size
        of_user.setdefault(user, deque()).append((thing, size))
    excess, dropped = held.total() - most, []
    by_size = [(-size, place, user) for place, (user, size) in enumerate(held.items())]
    heapify(by_size)
    while excess > 0:
        kept, place, user = by_size[0]
        thing, size = of_user[user].popleft()
        heapreplace(by_size, (kept + size, place, user))
        excess -= size
        dropped.append(thing)
    return dropped

"""A process of a replica group that does what the leader tells it, until one of them ends."""

import threading
from collections.abc import Callable
from typing import NoReturn, assert_never

from elche_worker.rank.acts import Enter, Hold, Join, Look, Settle, TakeLease, Train
from elche_worker.rank.replica import Replica
from elche_worker.rank.replica_group import Meeting


class News:
    """Wakes a follower that waits for a batch."""

    def __init__(self) -> None:
        self._changed = threading.Condition()

    def notify(self) -> None:
        """Something is there."""
        with self._changed:
            self._changed.notify_all()

    def wait_for(self, is_there: Callable[[], bool]) -> None:
        """Returns when it is."""
        with self._changed:
            self._changed.wait_for(is_there)


def follow(meeting: Meeting, replica: Replica, news: News) -> NoReturn:
    """Does what the leader does with its replica. Raises what user code raises, and when a process is gone."""
    replica.model.train()
    while True:
        act = meeting.hear()
        match act:
            case Train():
                news.wait_for(lambda: replica.feed.is_ready)
                replica.train(act)
            case TakeLease():
                replica.take_lease(act)
            case Enter():
                replica.enter(act)
            case Hold():
                replica.hold()
            case Settle():
                replica.settle(act)
            case Look():
                replica.look(act)
            case Join():
                replica.join(act)
            case _:
                assert_never(act)

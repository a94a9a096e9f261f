"""The loop of a replica group's process that is not its leader: carries out the leader's acts until it ends."""

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn, assert_never

from elche_worker.collectives.operations import CollectiveFailed, RoundAborted
from elche_worker.rank.acts import (
    ApplyResult,
    EndRound,
    EnterRound,
    FinishBuild,
    JoinGeneration,
    ResolveCheckpoint,
    TakeLease,
    TrainBatch,
    UseResult,
)
from elche_worker.rank.distributed_group import DistributedGroup
from elche_worker.rank.replica import Replica


class Wakeup:
    """Wakes a follower that waits for a batch."""

    def __init__(self) -> None:
        self._changed = threading.Condition()

    def notify(self) -> None:
        """Has `wait_for` evaluate its condition again. Called on any thread."""
        with self._changed:
            self._changed.notify_all()

    def wait_for(self, is_there: Callable[[], bool]) -> None:
        """Returns when `is_there` is true."""
        with self._changed:
            self._changed.wait_for(is_there)


def follow(group: DistributedGroup, replica: Replica, wakeup: Wakeup) -> NoReturn:
    """Carries out the leader's acts. Raises the errors of user code, and `CollectiveFailed` when a process of the group
    has ended.
    """
    while True:
        act = group.receive()
        match act:
            case TrainBatch():
                wakeup.wait_for(lambda: replica.loader.is_ready)
                replica.train(act)
            case TakeLease():
                replica.take_lease(act.lease)
            case EnterRound():
                replica.enter_round(act)
            case EndRound():
                replica.end_collective()
            case ApplyResult():
                # A lost round needs no action here: its work has been put back, and the leader's next act follows.
                with suppress(CollectiveFailed, RoundAborted):  # the leader gets the error too, and reports it
                    replica.apply_result()
            case ResolveCheckpoint():
                replica.resolve_checkpoint(act)
            case UseResult():
                replica.use_result(act)
            case JoinGeneration():
                replica.join_generation(act)
            case FinishBuild():
                replica.finish_build(act.generation)
            case _:
                assert_never(act)

"""The loop of a replica group's process that is not its leader: carries out the leader's acts until it ends."""

import threading
from contextlib import suppress
from typing import NoReturn, assert_never

from elche_worker.collectives.operations import CollectiveFailed, RoundAborted
from elche_worker.rank import acts
from elche_worker.rank.distributed_group import DistributedGroup
from elche_worker.rank.replica import Replica


def follow(group: DistributedGroup, replica: Replica, wake: threading.Condition) -> NoReturn:
    """Carries out the leader's acts; `wake` is notified when a batch is ready. Raises the errors of user code, and
    `CollectiveFailed` when a process of the group has ended.
    """
    while True:
        act = group.receive()
        match act:
            case acts.TrainBatch():
                with wake:
                    wake.wait_for(lambda: replica.loader.is_ready)
                replica.train(act)
            case acts.TakeLease():
                replica.take_lease(act.lease)
            case acts.EnterRound():
                replica.enter_round(act)
            case acts.EndRound():
                replica.end_collective()
            case acts.ApplyResult():
                # A lost round needs no action here: its work has been put back, and the leader's next act follows.
                with suppress(CollectiveFailed, RoundAborted):  # the leader gets the error too, and reports it
                    replica.apply_result()
            case acts.ResolveCheckpoint():
                replica.resolve_checkpoint(act)
            case acts.UseResult():
                replica.use_result(act)
            case acts.JoinGeneration():
                replica.join_generation(act)
            case acts.FinishBuild():
                replica.finish_build(act.generation)
            case _:
                assert_never(act)

"""The step at which each rank stops: to stay within `max_batch_diff` of the slowest, and while training is paused."""

from elche_coordinator.core.messages.commands import SendThrottle
from elche_coordinator.core.messages.ids import Rank
from elche_coordinator.core.records.outbox import Outbox
from elche_coordinator.core.records.ranks import RankRecord, RankRecords
from elche_coordinator.core.records.round import Round
from elche_coordinator.core.results.training import Training

NO_LIMIT = 2**62
"""The step that lifts a limit on the rank's side. In the coordinator's record of the rank, 0 stands for no limit."""


class Limits:
    """Tells ranks their limits. Without `max_batch_diff`, and while training is not paused, they have none.

    In lockstep (0) averaging must be blocking: in an overlapped one ranks would train on, some further than others.
    """

    def __init__(self, members: RankRecords, training: Training, outbox: Outbox) -> None:
        self._members = members
        self._training = training
        self._outbox = outbox
        self._max_batch_diff = training.settings.max_batch_diff
        self._applies = self._max_batch_diff is not None and not training.policy.stops_ranks
        self._stops: dict[Rank, int] = {}
        """The step at which each rank stops while training is paused."""

    def start(self) -> None:
        """Lets every rank make its first batches. Called when the first round is announced."""
        if self._applies and self._max_batch_diff is not None:
            for record in self._members.values():
                self._raise(record, max(1, self._max_batch_diff))

    def update(self, rounds: list[Round]) -> None:
        """Raises each limit to `max_batch_diff` above the slowest rank that has work and is not waiting in a round."""
        if not self._applies or self._max_batch_diff is None:
            return
        training = self._training
        waits = rounds[0].entered if rounds and training.settings.averaging == "blocking" else {}
        working = [
            record
            for rank, record in self._members.items()
            if rank not in waits and training.ledger.uncommitted_batches(rank)[1] > record.round_batches
        ]
        slowest = min((record.round_batches for record in working), default=0)
        for record in working:
            # in lockstep (0) each rank may make one batch, and the next when all have made it
            limit_step = record.base_step + slowest + max(1, self._max_batch_diff)
            self._raise(record, min(limit_step, self._stops[record.rank]) if training.is_paused else limit_step)

    def stop_at(self, targets: dict[Rank, int]) -> None:
        """Has every rank stop at its target, or where it is. Called when training is paused."""
        self._stops = {rank: targets.get(rank, record.local_step) for rank, record in self._members.items()}
        for rank, record in self._members.items():
            stop = self._stops[rank]
            # Not put into the record, whose limit counts again after the pause.
            self._send(record, min(stop, record.limit_step) if self._applies else stop)

    def lift_stops(self) -> None:
        """Lifts the stops of a pause. With `max_batch_diff`, ranks go on when the caller then calls `update`."""
        for record in self._members.values():
            # `stop_at` told ranks less than the record has. From 0, `_raise` sends their limits again.
            record.limit_step = 0
            if not self._applies:
                self._send(record, NO_LIMIT)

    def _raise(self, record: RankRecord, limit_step: int) -> None:
        if limit_step > record.limit_step:
            record.limit_step = limit_step
            self._send(record, limit_step)

    def _send(self, record: RankRecord, limit_step: int) -> None:
        self._outbox.add(SendThrottle(**record.address, limit_step=limit_step))

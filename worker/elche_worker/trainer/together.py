"""Collective operations of a loop. When a rank dies, the survivors retry the collective without it (protocol P18.9).

Ranks are never more than one operation apart, because the next one needs all of them. Those that are behind receive the
outcome from one that has it.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from weakref import WeakMethod

from elche.errors import PeerLost
from elche.output import notice
from elche_worker.collectives.calls import CallsDiffer, differ, difference
from elche_worker.collectives.world import World, check_default_device
from elche_worker.trainer.attachment import Attachment

Outcome = TypeVar("Outcome")
PAUSE_POLL_S = 0.1
"""Seconds between two looks whether a paused loop may go on."""


def _as_it_is(outcome: Any) -> Any:
    return outcome


class Together:
    """Runs collective operations of one loop, in the same order on every rank. Used by the loop's thread alone."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.attachment: Attachment = Attachment()
        self.where: Callable[[], str] = lambda: ""
        """Returns the loop's position as text, equal on every rank."""
        self.on_regrouped: Callable[[], None] = lambda: None
        """Called on every rank when the world has a new group; may be collective."""
        self.untrained: Callable[[], str] = lambda: ""
        """Returns a sentence on data that is not trained any more without the ranks that have died; "" for none."""
        world.calls.on_stuck = WeakMethod(self._end_stuck)
        self._num_done = 0
        self._give: Callable[[], Any] | None = None
        """Returns the last operation's outcome, for ranks that have not ended it; None if it cannot be sent."""

    def run(
        self,
        operation: Callable[[], Outcome],
        call: str,
        *,
        give: Callable[[Any], Any] | None = _as_it_is,
        take: Callable[[Any], Any] = _as_it_is,
    ) -> Outcome:
        """Runs a collective operation, again after a loss, and returns its outcome. `call` describes it, equally on
        every rank.

        `give` turns the outcome into plain values and tensors, which another rank's `take` turns into the outcome; with
        None it cannot be sent. Raises `PeerLost` where the loop cannot go on without the rank that has died, and
        `CallsDiffer` where others make another call.
        """
        if self._world.size > 1:
            check_default_device()  # a script may set one after Trainer.setup
        calls = self._world.calls
        calls.begin(f"{call} {self.where()}")
        try:
            outcome = self._repeated(operation, take)
        finally:
            calls.end()
        self._num_done += 1
        self._give = None if give is None else lambda: give(outcome)
        return outcome

    def _repeated(self, operation: Callable[[], Outcome], take: Callable[[Any], Any]) -> Outcome:
        """Returns the outcome of an operation, or the one that another rank sends."""
        while True:
            try:
                if self._world.is_given_up:
                    raise PeerLost("another rank of this loop has ended")
                return operation()
            except PeerLost as error:
                given = self._regroup(error)
            if given is not None:
                outcome: Outcome = take(given[0])
                return outcome

    def _end_stuck(self, message: str) -> None:
        """Tells the coordinator why this process is ended."""
        self.attachment.leave(CallsDiffer(message))

    def end(self, how: str = "ends its loop") -> None:
        """Records that the loop has ended, which waits for no other rank."""
        self._world.calls.leave(f"{how} {self.where()}")

    def wait_while_paused(self) -> None:
        """Returns when no rank is paused any more, or one is to end. Every rank calls it after the same step."""
        # Ranks hear of a pause at different moments, and a collective that waits for the others would time out: so they
        # poll each other.
        while self.run(self._is_paused, "pauses"):
            time.sleep(PAUSE_POLL_S)

    def _is_paused(self) -> bool:
        operator = self.attachment.operator
        gathered = self._world.gather_numbers([float(operator.is_paused), float(bool(operator.cancelled))])
        return any(is_paused for is_paused, _ in gathered) and not any(is_over for _, is_over in gathered)

    def _regroup(self, error: PeerLost) -> tuple[Any] | None:
        """Forms a group without the ranks that have died. Returns the present operation's outcome, as a 1-tuple, if
        others have ended it, else None. Raises `error`, or the coordinator's reason, where no group can be formed.
        """
        world = self._world
        world.check_calls()
        while True:
            group = self.attachment.next_group(world.generation, str(error)) if world.can_regroup else None
            if group is None:
                raise self._last_word(error)
            num_before = world.size
            try:
                world.regroup(group.store, generation=group.generation, position=group.position, size=group.world_size)
                self.on_regrouped()
                given = self._catch_up(error)
            except PeerLost as other:
                error = other
                continue
            if world.rank == 0:
                notice(f"{world.size} of {num_before} ranks go on")
                if untrained := self.untrained():
                    notice(untrained)
            return given

    def _last_word(self, error: PeerLost) -> PeerLost:
        """The error, or, if the coordinator has ended the loop or given this rank up, one with the reason."""
        if reason := self.attachment.operator.cancelled:
            return PeerLost(f"the loop is ended: {reason}")
        if lost := self.attachment.lost:
            return PeerLost(f"this rank is alone: {lost}")
        return error

    def _catch_up(self, error: PeerLost) -> tuple[Any] | None:
        """Sends the last operation's outcome to ranks that are one operation behind; returns it there, as a 1-tuple."""
        counts = [int(count) for (count,) in self._world.gather_numbers([self._num_done])]
        self.check_calls(counts)
        most = max(counts)
        if min(counts) == most:
            return None
        source = counts.index(most)
        can_give = self._world.gather_numbers([float(self._give is not None)])[source][0]
        if not can_give:
            if self._num_done < most:
                raise error
            return None
        is_source = self._world.rank == source
        state = self._world.share_state(self._give() if is_source and self._give is not None else None, source)
        return (state,) if self._num_done < most else None

    def check_calls(self, counts: Sequence[int] = ()) -> None:
        """Raises `CallsDiffer` if ranks with equal numbers of operations (`counts`, by rank) are in different calls."""
        calls = self._world.gather_texts(self._world.calls.call)
        counts = counts or [0] * len(calls)
        for count in set(counts):
            made = {rank: calls[rank] for rank in range(len(calls)) if counts[rank] == count}
            if differ(made.values()):
                raise CallsDiffer(difference(range(len(calls)), made))

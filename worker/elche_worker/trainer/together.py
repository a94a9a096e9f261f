"""What the ranks of a loop do together. When one of them dies, the others do it again without it (protocol P18.9).

A rank that has done something together and others that have not are never more than one apart, because the next thing
needs all of them. Those behind get what came of it from one that has it.
"""

import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

from elche.errors import PeerLost
from elche_worker.collectives.world import World
from elche_worker.trainer.attachment import Attachment, NoAttachment

Outcome = TypeVar("Outcome")
PAUSE_POLL_S = 0.1


def _as_it_is(outcome: Any) -> Any:
    return outcome


class Together:
    """Runs collective operations of one loop, in the same order on every rank. Used by the loop's thread alone."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.attachment: Attachment = NoAttachment()
        self.on_regrouped: Callable[[], None] = lambda: None
        """Called on every rank when the world has another group; may be collective."""
        self._num_done = 0
        self._give: Callable[[], Any] | None = None
        """What came of the last operation, for ranks that have not ended it; None if that cannot be had."""

    def run(
        self,
        operation: Callable[[], Outcome],
        *,
        give: Callable[[Any], Any] | None = _as_it_is,
        take: Callable[[Any], Any] = _as_it_is,
    ) -> Outcome:
        """The outcome of a collective operation, which may be begun again.

        `give` makes of the outcome what another rank's `take` makes the outcome of: plain values and tensors. Raises
        `PeerLost` where the loop cannot go on without the rank that has died.
        """
        while True:
            try:
                if self._world.is_given_up:
                    raise PeerLost("another rank of this loop has ended")
                outcome = operation()
                break
            except PeerLost as error:
                given = self._regroup(error)
            if given is not None:
                outcome = take(given[0])
                break
        self._num_done += 1
        self._give = None if give is None else lambda: give(outcome)
        return outcome

    def wait_while_paused(self) -> None:
        """Returns when no rank is paused any more, or one is to end. Every rank calls it after the same step."""
        # Ranks hear of a pause at different moments, and a collective that waits for the others would time out: so they
        # poll each other.
        while self.run(self._is_paused):
            time.sleep(PAUSE_POLL_S)

    def _is_paused(self) -> bool:
        operator = self.attachment.operator
        told = self._world.gather_numbers([float(operator.is_paused), float(bool(operator.cancelled))])
        return any(is_paused for is_paused, _ in told) and not any(is_over for _, is_over in told)

    def _regroup(self, error: PeerLost) -> tuple[Any] | None:
        """Goes on without those that have died. Returns what came of the present operation, if others have ended it.

        Raises the error where that cannot be.
        """
        world = self._world
        while True:
            group = self.attachment.next_group(world.generation, str(error)) if world.can_regroup else None
            if group is None:
                raise error
            num_before = world.size
            try:
                world.regroup(group.store, generation=group.generation, position=group.position, size=group.world_size)
                self.on_regrouped()
                given = self._catch_up(error)
            except PeerLost as other:
                error = other
                continue
            if world.rank == 0:
                print(f"elche: {world.size} of {num_before} ranks go on", file=sys.stderr, flush=True)
            return given

    def _catch_up(self, error: PeerLost) -> tuple[Any] | None:
        """Gives ranks that are one operation behind what came of it."""
        counts = [int(count) for (count,) in self._world.gather_numbers([self._num_done])]
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

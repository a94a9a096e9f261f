"""Resumes a loop from its checkpoint: random numbers, epoch, and a warning where it trains something twice.

A script may draw random numbers before it trains, such as for a split of its data, and must draw the same ones again.
So the generators are restored only when the loop asks for its epochs, batches, shares or `num_steps`, or trains.
"""

from typing import Any

from elche.output import notice
from elche_worker.collectives.world import World
from elche_worker.device.rng import GENERATORS, capture_rng_state, restore_rng_state, rng_digests, seed_apart
from elche_worker.trainer.saving import Position, Restored

STEP_SEED = 1_000_003
"""Distance between the seeds of two steps, more than there are ranks."""


class Resumption:
    """The loaded checkpoint, until the loop is there; and the state at the start, for later checkpoints."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.position: Position | None = None
        """Position of the checkpoint, until the loop has reached it."""
        self._restored: Restored | None = None
        """The checkpoint, until the first step."""
        self._random: dict[str, Any] | None = None
        """The checkpoint's random generator states, until they are restored."""
        self._has_asked = False
        """True if the loop has asked for its position."""
        self._omits = False
        """True if the loop has asked for `num_epoch_steps`."""
        self._begins_again = False
        """True if it has begun the checkpoint's epoch from the first batch: generators are restored when it trains."""
        self._at_start: dict[str, str] = {}
        """Digests of the random number generators before training."""
        self._of_epoch: dict[str, Any] | None = None
        """Random numbers at the beginning of the present epoch."""

    def load(self, restored: Restored) -> None:
        """Takes a loaded checkpoint."""
        self._restored, self.position, self._random = restored, restored.position, restored.random

    @property
    def begun(self) -> dict[str, Any]:
        """The state at the beginning of the loop and of the epoch, for checkpoints."""
        return {"digests": self._at_start, "epoch": self._of_epoch}

    def ask(self) -> None:
        """Called when the loop asks for its position."""
        self._has_asked = True
        if not self._begins_again:
            self.begin()

    def ask_epoch_steps(self) -> None:
        """Called when the loop asks for `num_epoch_steps`, to skip that many batches."""
        self._omits = True

    def begin_epoch(self, epoch: int) -> None:
        """Called when the loop begins an epoch. For the checkpoint's epoch of a loop that takes its batches itself, the
        generators are restored to the epoch's beginning, so that a sampler gives the same order.
        """
        self._has_asked, position = True, self.position
        if position is not None and position.epoch == epoch and position.epoch_steps and not position.done:
            self._begins_again = True
            of_epoch = self._restored.begun.get("epoch") if self._restored is not None else None
            if of_epoch is not None:
                self._restore(of_epoch, epoch)
        else:
            self.begin()
        self._of_epoch = capture_rng_state()

    def begin(self) -> None:
        """Called when training begins: restores the generators. Idempotent."""
        random, self._random = self._random, None
        if random is not None and self._restored is not None:
            self._restore(random, self._restored.position.num_steps)
        self._note_start()

    def _note_start(self) -> None:
        self._at_start = self._at_start or rng_digests()

    def _restore(self, random: dict[str, Any], number: int) -> None:
        """Restores generators on rank 0, and on other ranks those that were equal to rank 0's when the checkpoint's
        loop began: ranks that draw alike go on so. Others are seeded differently on each rank.
        """
        self._note_start()
        then = self._restored.begun.get("digests", {}) if self._restored is not None else {}
        alike = [one for one in GENERATORS if self._world.rank == 0 or self._at_start[one] == then.get(one)]
        restore_rng_state(random, alike)
        seed_apart(self._world.rank + STEP_SEED * number, [one for one in GENERATORS if one not in alike])

    def begin_step(self, *, is_given: bool, has_loader: bool) -> bool:
        """Called before each step. At the first one after a resume, prints what is trained twice, if anything; returns
        True if that is the epoch. `is_given`: elche has given out the batch; `has_loader`: a loader's state is
        restored.
        """
        self.begin()
        restored, self._restored = self._restored, None
        begins_again, self._begins_again = self._begins_again, False
        if restored is None or is_given:
            return False
        position = restored.position
        if not self._has_asked:
            self._notice(
                f"the checkpoint is of step {position.num_steps}, and this loop has not asked where it goes on: what "
                "it starts from the beginning is trained twice. Begin at trainer.num_steps, or take trainer.epochs(n)"
            )
        elif begins_again and not (self._omits or has_loader):
            self._notice(
                f"epoch {position.epoch} begins again, as this loop takes its batches itself: {position.epoch_steps} "
                "steps are trained twice. Skip the first trainer.num_epoch_steps batches, or register a loader that "
                "has a state_dict(): trainer.register_state(loader=...)"
            )
            return True
        return False

    def _notice(self, text: str) -> None:
        if not self._world.rank:
            notice(text)

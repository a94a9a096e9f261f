"""Finds where iterations of a loop end, so that a requested checkpoint contains whole iterations.

After `step()` a script may step its learning rate schedule, count, or average weights, and `step()` of one optimizer
may be half of an iteration. So a checkpoint is not made in the step after which it is due, but once the iteration is
known to be over: when the next batch of `epoch` or `shares` is asked for, and in loops over a loader of their own at
the next forward pass in train mode, before it changes anything. What a script does after an epoch belongs to its last
iteration: a resumed loop would otherwise get an epoch without batches.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from elche_worker.collectives.world import World
from elche_worker.trainer.checkpoints import AtStep, LoopCheckpoints
from elche_worker.trainer.optimizers import Key, Optimizers
from elche_worker.trainer.progress import ProgressTracker
from elche_worker.trainer.requests import Cancelled, RequestConsensus, Requests
from elche_worker.trainer.together import Together

MAX_WAIT_STEPS = 100
"""Steps after which a due checkpoint is given up if no end of an iteration was found."""
SaveNow = Callable[[AtStep | None], None]
"""Starts writing a checkpoint, of the given state at the end of a step, or of the present state for None."""


class StepOrder:
    """Learns which of several optimizers are stepped in one iteration, once an iteration has been repeated."""

    def __init__(self, num_optimizers: int) -> None:
        self._num_optimizers = num_optimizers
        self._runs: list[tuple[list[Key], int]] = []
        """The steps of the present iteration: optimizers, and how often they were stepped in a row."""
        self._last: list[tuple[list[Key], int]] = []
        """The steps of the iteration before it."""

    def add(self, keys: list[Key]) -> None:
        """Records that these optimizers are stepped. An iteration begins with those with which the loop began."""
        runs = self._runs
        if runs and runs[-1][0] == keys:
            runs[-1] = (keys, runs[-1][1] + 1)
            return
        if runs and runs[0][0] == keys:
            self._last, self._runs = runs, []
        self._runs.append((keys, 1))

    @property
    def is_whole(self) -> bool:
        """True if the present iteration has made the same steps as the one before it."""
        if not self._last and len(self._runs) == 1:
            return len(self._runs[0][0]) == self._num_optimizers
        return self._runs == self._last


class Iterations:
    """Acts on operators' requests between iterations: `save` writes a checkpoint, before which `compare` compares the
    ranks' models, and `close` ends the loop.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Optimizers,
        world: World,
        progress: ProgressTracker,
        checkpoints: LoopCheckpoints,
        together: Together,
        save: SaveNow,
        close: Callable[[], None],
        compare: Callable[[str], None],
    ) -> None:
        self._model = model
        self._progress = progress
        self._checkpoints = checkpoints
        self._together = together
        self.consensus = RequestConsensus(world.device)
        self._save = save
        self._close = close
        self.on_asked: Callable[[], None] = lambda: None
        """Called on every rank, in the same step, when a checkpoint is asked for: a framework saves one of its own."""
        self._compare = compare
        self._order = StepOrder(len(optimizers.by_key))
        self._are_given = False
        """True if the present iteration uses a batch that elche has given out."""
        self._due = Requests()
        self._at_step: AtStep | None = None
        """State at the end of the latest step, while a checkpoint is due and not made."""
        self._num_waited = 0
        self._has_saved = False
        """True if the script has saved a checkpoint since the latest step."""
        self._hooks: list[RemovableHandle] = []

    def take_requests(self) -> Sequence[float]:
        """Returns this rank's requests to all ranks: (cancel, save, pause, compare), each 0.0 or 1.0."""
        attachment = self._progress.attachment
        compare, self._has_saved = float(self._has_saved), False
        if not attachment.is_attached and not self._checkpoints.has_interval:
            return 0.0, 0.0, 0.0, compare
        cancel, checkpoint, pause = attachment.operator.take_requests()
        return cancel, max(checkpoint, float(self._checkpoints.take_due())), pause, compare

    def note_saved(self) -> None:
        """The script has saved a checkpoint by itself. It need not do so on every rank, so the ranks' models are
        compared some steps later; at the loop's end they are compared anyway.
        """
        self._has_saved = True

    def end_step(self, keys: list[Key]) -> None:
        """Notes that these optimizers were stepped, and takes in the requests that all ranks act on now."""
        self._order.add(keys)
        asked = self.consensus.take()
        if asked.calls_differ:
            self._together.check_calls()
        if asked.checkpoint or asked.compare:
            self._compare("compares models for a checkpoint")
        self._due = Requests(cancel=self._due.cancel or asked.cancel, pause=self._due.pause or asked.pause)
        if self._at_step is not None:
            self._at_step, self._num_waited = self._checkpoints.at_step(), self._num_waited + 1
            if self._num_waited > MAX_WAIT_STEPS:
                self._give_up(f"no iteration was seen to end in {MAX_WAIT_STEPS} steps: call trainer.save() at its end")
        elif asked.checkpoint and self._checkpoints.place:
            self.on_asked()
            self._await_end()
        elif asked.checkpoint:
            self._refuse("the loop has no checkpoint_dir: set ELCHE_CHECKPOINT_DIR")

    def begin_step(self) -> None:
        """Called before gradients are averaged: pauses or ends the loop if that is due, on all ranks alike."""
        checkpoints = self._checkpoints
        checkpoints.check_states()
        if checkpoints.resumption.begin_step(is_given=self._are_given, has_loader=checkpoints.has_loader):
            self._progress.epoch_steps = 0
        self._begin()
        if self._at_step is not None:  # the due checkpoint must first get the end of this iteration
            return
        due, self._due = self._due, Requests()
        if due.cancel:
            reason = self._progress.attachment.operator.cancelled or "another rank was cancelled"
            self._close()
            raise Cancelled(f"elche: the loop is ended: {reason}")
        if due.pause:
            self._together.wait_while_paused()

    @contextmanager
    def given(self) -> Iterator[None]:
        """Wraps one iteration: the loop's work on a batch that elche has given out, or whose size it has set."""
        self._are_given = True
        try:
            yield
        finally:
            self._are_given = False
            if not self._progress.has_whole_epoch:  # else the script has yet to evaluate it, and step its schedule
                self.end()

    def end(self) -> None:
        """Called between iterations: makes the checkpoint that is due, of the present state."""
        if self._at_step is not None:
            self._make(None)

    def close(self, error: BaseException | None) -> None:
        """Called at the loop's end, which also ends its last iteration, unless it raised `error`."""
        if self._at_step is not None and error is not None:
            self._give_up("the loop has ended within an iteration")
        self.end()

    def _await_end(self) -> None:
        self._at_step, self._num_waited = self._checkpoints.at_step(), 0
        if not self._are_given:
            self._hooks = [one.register_forward_pre_hook(self._on_forward) for one in self._model.modules()]

    def _on_forward(self, module: nn.Module, _: Any) -> None:
        if module.training:  # else it is an evaluation, which follows a step
            self._begin()

    def _begin(self) -> None:
        """Makes the checkpoint that is due if the present iteration has made its steps. Random numbers and batches may
        have been drawn for the next one, and a resumed loop draws them again: so those of the step's end are stored.
        """
        if self._at_step is not None and not self._are_given and self._order.is_whole:
            self._make(self._at_step)

    def _make(self, at_step: AtStep | None) -> None:
        self._forget()
        self._save(at_step)

    def _forget(self) -> None:
        self._at_step = None
        while self._hooks:
            self._hooks.pop().remove()

    def _give_up(self, reason: str) -> None:
        self._forget()
        self._refuse(reason)

    def _refuse(self, reason: str) -> None:
        self._checkpoints.refuse(self._progress.num_steps, self._progress.attachment, reason)

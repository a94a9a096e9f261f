"""Compares the models of a loop's ranks, which are equal unless the script changes one of them."""

from torch import nn

from elche.errors import Misuse
from elche.output import notice
from elche_worker.collectives.consistency import check_alike_at_end, check_still_alike, comparable, not_finite
from elche_worker.collectives.world import World
from elche_worker.trainer.optimizers import Optimizers
from elche_worker.trainer.progress import ProgressTracker
from elche_worker.trainer.together import Together
from elche_worker.user.events import record_event

CHECK_EVERY_STEPS = 512
"""Steps between two comparisons of the ranks' models. Earlier ones are made after 0, 1, 2, 4, 8, ... steps, since most
mistakes show at once."""
DRIFT_STEPS = 64
"""Steps after which parameters are not compared any more if devices are of different types: they round differently, and
the differences grow with each step."""
LEAST_COMPARED = 16
"""Fewest steps between two comparisons at ends of epochs, so that they take little of an epoch of a few steps."""


class Comparison:
    """Compares models and learning rates after some steps and at ends: of epochs, and of the loop."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Optimizers,
        world: World,
        progress: ProgressTracker,
        together: Together,
        *,
        is_mixed: bool,
    ) -> None:
        """`is_mixed`: the ranks' devices are of different types."""
        self._model = model
        self._optimizers = optimizers
        self._world = world
        self._progress = progress
        self._together = together
        self._is_mixed = is_mixed
        self.num_averaged = 0
        """Number of times that gradients were averaged."""
        self._num_compared = 0
        """`num_averaged` at the latest `compare`."""
        self._left = (-1, "")
        """When the loop over batches was left: `num_averaged`, and the text by which models are compared."""
        self._is_closed = False
        self._has_warned = False

    @property
    def _has_drifted(self) -> bool:
        return self._is_mixed and self.num_averaged > DRIFT_STEPS

    def check(self) -> None:
        """Compares before an averaging, if that is due. Raises `Misuse` on every rank if models differ. Collective."""
        number = self.num_averaged
        is_due = number & (number - 1) == 0 or number % CHECK_EVERY_STEPS == 0  # 0 and powers of 2, then every 512th
        if is_due and not self._has_drifted:
            check_still_alike(self._model, self._optimizers.rates, self._world)

    def compare(self, what: str, *, least: int = 1) -> None:
        """Raises `Misuse` on every rank when the models differ, or another rank makes another call than `what`. Used at
        the end, where no later step would notice. Does nothing within `least` steps of the latest call. Collective.
        """
        if self._is_closed or self.num_averaged - self._num_compared < least:
            return
        self._num_compared = self.num_averaged
        self._warn_of_not_finite()
        if self._world.size > 1 and not self._has_drifted:
            self._together.run(lambda: check_still_alike(self._model, self._optimizers.rates, self._world), what)

    def leave(self) -> None:
        """Records the model's digests at the end of the loop over batches. `compare_at_end` compares these: after the
        loop a script may change the model on one rank, such as by loading its best weights.
        """
        if not self._is_closed and self.num_averaged not in (self._num_compared, self._left[0]):
            self._left = self.num_averaged, comparable(self._model, self._optimizers.rates)

    def note_changed(self) -> None:
        """Makes the next comparison due: the model has changed, though perhaps without averaged gradients."""
        self._num_compared, self._left = min(self._num_compared, self.num_averaged - 1), (-1, "")

    def _warn_of_not_finite(self) -> None:
        """Reports once, on rank 0, that a weight is NaN or infinite."""
        if self._world.rank or self._has_warned or not (name := not_finite(self._model)):
            return
        self._has_warned = True
        text = f"{name} is not finite (NaN or infinite) after {self._progress.num_steps} steps: the model is of no use"
        record_event(text)
        notice(text)

    def compare_at_end(self) -> Misuse | None:
        """Returns the error with which the loop is to end if the models differ since the latest comparison.
        Does not wait for ranks that are still training, so that perhaps only the last rank finds the difference.
        """
        is_compared = self.num_averaged == self._num_compared
        if not is_compared:
            self._warn_of_not_finite()
        if self._world.size == 1 or is_compared or self._has_drifted:
            return None
        try:
            is_left = self._left[0] == self.num_averaged
            text = self._left[1] if is_left else comparable(self._model, self._optimizers.rates)
            check_alike_at_end(self._model, text, self._world)
        except Misuse as error:
            return error.with_traceback(None)  # no line of the script is at fault
        return None

    def close(self) -> None:
        """Nothing is compared any more."""
        self._is_closed = True

"""The samples of the present step, and the weight of this rank's gradient."""

from elche.errors import Misuse
from elche_worker.collectives.world import World
from elche_worker.trainer.plans import Part, Step


class StepShare:
    """This rank's share of the step that is being made."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.plan: Step | None = None
        """Batches that `epoch` has given out since the last step; None in a loop over its own loader."""
        self._stepped: Step | None = None
        """Batches that were stepped with, and that further steps use, too: of other optimizers, or of the same."""
        self.samples: int | None = None
        """Samples of which this rank's gradient is the mean, if the loop gives the number."""
        self._gives_samples: bool | None = None
        """True if the loop passes `samples` to each step; None before the first."""
        self._lost: list[Part] = []
        """Parts of these batches that were given to ranks which have died: others will train them."""

    @property
    def known(self) -> Step | None:
        """The batches of the step, where elche has given them out."""
        return self.plan or self._stepped

    @property
    def is_same_batch(self) -> bool:
        """True if the step is made of batches that were stepped with before."""
        return self.plan is None and self._stepped is not None

    def add(self, step: Step) -> None:
        """Adds a step's batches that were given out."""
        self._stepped = None
        self.keep()
        self._lost += step.without(self._world.members)
        step = step.among(self._world.members)
        self.plan = step if self.plan is None else self.plan.with_next(step)

    def keep(self) -> None:
        """Moves the parts of ranks that have died from this step to those to be trained later."""
        members = self._world.members
        if self.plan is not None and self.plan.members != members:
            self._lost += self.plan.without(members)
            self.plan = self.plan.among(members)
        if self._stepped is not None:
            self._stepped = self._stepped.among(members)

    def take_lost(self) -> list[Part]:
        """The parts that are to be trained later. Returned once."""
        lost, self._lost = self._lost, []
        return lost

    def set_samples(self, samples: int | None) -> None:
        """Sets the number of samples of which the loop's gradient is the mean, or None. Raises `Misuse` unless it is
        given at every step or at none.
        """
        if samples is not None and samples < 0:
            raise Misuse(f"samples is {samples}; it must be at least 0")
        if self._gives_samples not in (None, samples is not None):
            raise Misuse("give step(samples=...) at every step, or never")
        self.samples = samples

    def agree(self) -> None:
        """Raises `Misuse` at the first step if some ranks give the number and others do not: they would wait for each
        other in different collectives.
        """
        if self._gives_samples is None:
            given = [bool(gives) for (gives,) in self._world.gather_numbers([float(self.samples is not None)])]
            if len(set(given)) > 1:
                raise Misuse(
                    "some ranks call step(samples=...), and others step() without samples: give it on all ranks"
                )

    def settle(self) -> None:
        """Called once a step is averaged on all ranks, so that `agree` checks only the first step."""
        self._gives_samples = self.samples is not None

    def planned_fraction(self) -> float | None:
        """This rank's fraction of the samples given out, or equal ones; None if only dead ranks had samples."""
        plan = self.known
        samples = [1] * self._world.size if plan is None else plan.samples
        return samples[self._world.rank] / sum(samples) if sum(samples) else None

    def fraction(self) -> float | None:
        """Weight of this rank's gradient in the average, in [0, 1]; None when no rank has any samples."""
        if self.samples is None:
            return self.planned_fraction()
        total = sum(count for (count,) in self._world.gather_numbers([self.samples]))
        return self.samples / total if total else None

    def begin_step(self) -> None:
        """Begins the next step. Until `leave` it may be of the same batches: for another optimizer, or once more."""
        self._stepped, self.plan = self.known, None

    def leave(self) -> None:
        """The loop is done with the batches that it was stepped with."""
        self._stepped = None

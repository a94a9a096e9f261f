"""Which samples the present step has, and how much this rank's gradient of them counts."""

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
        """Batches that another optimizer was stepped with, and that the steps of the remaining optimizers use, too."""
        self.samples: int | None = None
        """How many samples this step's gradient is the mean of, if the loop gives that."""
        self._says_samples: bool | None = None
        """True if the loop gives `samples`; None before the first step."""
        self._lost: list[Part] = []
        """Parts of these batches that were given to ranks which have died: others are to train them."""

    @property
    def known(self) -> Step | None:
        """The batches that the step is made of, where elche has given them out."""
        return self.plan or self._stepped

    @property
    def is_same_batch(self) -> bool:
        """True if the step is made of batches that another optimizer was stepped with."""
        return self.plan is None and self._stepped is not None

    def add(self, step: Step) -> None:
        """One more part of an epoch is given out."""
        self._stepped = None
        self.keep()
        self._lost += step.without(self._world.members)
        step = step.among(self._world.members)
        self.plan = step if self.plan is None else self.plan.with_next(step)

    def keep(self) -> None:
        """Takes the parts of ranks that have died out of the step, and notes them to be trained later."""
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

    def say(self, samples: int | None) -> None:
        """Takes in of how many samples the loop's gradient is the mean, or None. Raises `Misuse` unless the number is
        given at every step or at none.
        """
        if samples is not None and samples < 0:
            raise Misuse(f"samples is {samples}; it must be at least 0")
        if self._says_samples not in (None, samples is not None):
            raise Misuse("give step(samples=...) at every step, or never")
        self.samples = samples

    def agree(self) -> None:
        """Before the first step, raises `Misuse` unless all ranks give the number, or none: they would otherwise wait
        for each other in different collectives.
        """
        if self._says_samples is None:
            told = [bool(says) for (says,) in self._world.gather_numbers([float(self.samples is not None)])]
            if len(set(told)) > 1:
                raise Misuse("some ranks say how many samples they have, and some do not: step(samples=...) on all")

    def settle(self) -> None:
        """The step is averaged, on all ranks: they need not agree any more."""
        self._says_samples = self.samples is not None

    def planned_fraction(self) -> float | None:
        """This rank's fraction of the samples given out; equal fractions in a loop over its own loader. None when those
        who had all of them have died.
        """
        plan = self.known
        samples = [1] * self._world.size if plan is None else plan.samples
        return samples[self._world.rank] / sum(samples) if sum(samples) else None

    def fraction(self) -> float | None:
        """How much this rank's gradient counts in the average; None when no rank has any samples."""
        if self.samples is None:
            return self.planned_fraction()
        total = sum(count for (count,) in self._world.gather_numbers([self.samples]))
        return self.samples / total if total else None

    def begin_step(self, *, keeps_batches: bool) -> None:
        """Begins the next step; with `keeps_batches` it may be of the same batches, for another optimizer."""
        self._stepped = self.known if keeps_batches else None
        self.plan = None

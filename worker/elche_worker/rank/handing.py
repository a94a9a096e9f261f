"""What a rank that joins others gets of one of them, beside the model and what rounds keep of it."""

from elche_worker.model.own_state import OwnState, packed, unpacked
from elche_worker.user.schedule import LearningRates


class Handing:
    """Learning rates that callbacks have set, and the objects of the job's `state` (protocol P4.6)."""

    def __init__(self, rates: LearningRates, own_state: OwnState) -> None:
        self._rates = rates
        self._own_state = own_state
        self._may_join = True

    def begin_generation(self) -> None:
        """Ranks may have joined: one with an older model gets what the others have in the first result."""
        self._may_join = True

    def give(self) -> bytes:
        """What goes to ranks that join. Objects are only looked at where there may be some: they may be large."""
        own = self._own_state.storable() if self._may_join else {}
        return packed({"rates": self._rates.to_json(), "own": own})

    def take(self, given: bytes) -> None:
        """A result is there, with what a rank that has joined is given; empty on others. Raises `InvalidJob`."""
        self._may_join = False
        if given:
            handed = unpacked(given)
            self._rates.restore(handed["rates"])
            self._own_state.restore(handed["own"], "the rank that hands it over")

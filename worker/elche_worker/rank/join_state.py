"""The state that the source hands to ranks that join, in addition to the model and the outer optimizer's state."""

from elche_worker.model.modes import Switches
from elche_worker.model.own_state import OwnState, packed, unpacked
from elche_worker.user.schedule import LearningRates


class JoinState:
    """The learning rates and switches that callbacks have set, and the objects of the job's `state` (protocol P4.6)."""

    def __init__(self, rates: LearningRates, switches: Switches, own_state: OwnState) -> None:
        self._rates = rates
        self._switches = switches
        self._own_state = own_state
        self._may_join = True
        """True until the first result of a generation, the only one that can be the first result of a newcomer."""

    def begin_generation(self) -> None:
        """Called when ranks may have joined: those with an older model receive the state with the first result."""
        self._may_join = True

    def give(self) -> bytes:
        """Packs the state for ranks that join; the job's own, which may be large, only where ranks may join."""
        own = self._own_state.storable() if self._may_join else {}
        switches = self._switches.to_json() if self._may_join else None
        return packed({"rates": self._rates.to_json(), "switches": switches, "own": own})

    def take(self, given: bytes) -> None:
        """Restores the state that came with a result; empty on ranks that have not joined. Raises `InvalidJob`."""
        self._may_join = False
        if given:
            handed = unpacked(given)
            self._rates.restore(handed["rates"])
            if handed["switches"] is not None:
                self._switches.restore(handed["switches"])
            self._own_state.restore(handed["own"], "the rank that hands it over")

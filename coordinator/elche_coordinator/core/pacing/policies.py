"""The policies by name.

A policy gets the ranks' speeds and the work that is left, and returns the next rounds with a reason; it does nothing
else. El Che sets the length of a round. The counts follow each rank's latest batch times, so that all arrive together
even right after a speed has changed: El Che's smoothed times would lag for rounds.
"""

from collections.abc import Callable, Sequence

from elche.settings import AgreedSettings
from elche_coordinator.core.messages.ids import Rank
from elche_coordinator.core.pacing.asynchronous import Async
from elche_coordinator.core.pacing.cadence import Cadence
from elche_coordinator.core.pacing.policy import Policy
from elche_coordinator.core.pacing.sync import Sync


def _async(settings: AgreedSettings, ranks: Sequence[Rank]) -> Policy:
    is_lockstep = settings.max_batch_diff == 0  # in which nobody overshoots
    return Cadence(settings, ranks) if is_lockstep else Async(settings, ranks)


KINDS: dict[str, Callable[[AgreedSettings, Sequence[Rank]], Policy]] = {
    "cadence": Cadence,
    "async": _async,
    "sync": lambda settings, ranks: Sync(),
}
"""Constructor of each policy in `elche.policies`."""


def new_policy(settings: AgreedSettings, ranks: Sequence[Rank]) -> Policy:
    """The policy that the job names, for these ranks."""
    return KINDS[settings.policy](settings, ranks)

"""The policies by name: when ranks average, and how many batches each makes until then.

All of them are pure: they get the ranks' speeds and the work that is left, and say what to do and why. El Che says how
long a round lasts. The counts come from each rank's latest batch times, so that all arrive together also right after a
speed has changed (El Che's smoothed times would lag for rounds).
"""

from collections.abc import Sequence

from elche.policies import POLICIES
from elche_coordinator.core.messages.ids import Rank
from elche_coordinator.core.messages.spec import Settings
from elche_coordinator.core.pacing.asynchronous import Async
from elche_coordinator.core.pacing.cadence import Cadence
from elche_coordinator.core.pacing.policy import Policy
from elche_coordinator.core.pacing.sync import Sync


def new_policy(settings: Settings, ranks: Sequence[Rank]) -> Policy:
    """The policy that the job names, for these ranks. Raises `ValueError` for an unknown one."""
    match settings.policy:
        case "cadence":
            return Cadence(settings, ranks)
        case "async":
            is_lockstep = settings.max_batch_diff == 0  # in which nobody overshoots
            return Cadence(settings, ranks) if is_lockstep else Async(settings, ranks)
        case "sync":
            return Sync()
        case _:
            *most, last = POLICIES
            raise ValueError(f"unknown policy {settings.policy!r}; known are {', '.join(most)} and {last}")

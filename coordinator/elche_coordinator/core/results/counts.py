"""What has happened in a job so far, in numbers that only grow: over all of its attempts, and whatever was lost.

Who wants rates of them must not see one fall: that would count as a new beginning, with all of it made at once.
"""

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Since this coordinator knows the job; what was in the checkpoint that it began from is not in them."""

    samples: int = 0
    """Committed; those that were committed again after the job had gone back count again."""
    made_samples: int = 0
    """Trained by ranks, whatever became of them."""
    rounds: int = 0
    """Committed."""
    sent_bytes: int = 0
    given_up_rounds: int = 0
    regroups: int = 0
    discarded_samples: int = 0
    checkpoint_failures: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(**{one.name: getattr(self, one.name) + getattr(other, one.name) for one in fields(Counts)})

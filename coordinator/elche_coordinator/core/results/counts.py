"""Counters of a job that never decrease, over all of its attempts and including lost work.

Prometheus takes a decrease for a counter's reset, and would count the whole value as new.
"""

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Counts since this coordinator has known the job, without the counts of the checkpoint from which the job
    began.
    """

    samples: int = 0
    """Committed samples; those that are committed again after the job has gone back count again."""
    made_samples: int = 0
    """Samples trained by ranks, committed or lost."""
    rounds: int = 0
    """Committed rounds."""
    sent_bytes: int = 0
    """Payload that ranks have sent for averaging, in bytes."""
    given_up_rounds: int = 0
    """Rounds that no member got a result of."""
    regroups: int = 0
    """Process groups that were formed after the first."""
    discarded_samples: int = 0
    """Committed samples that were left out of the average."""
    checkpoint_failures: int = 0
    """Checkpoints that were wanted and not written."""

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(**{one.name: getattr(self, one.name) + getattr(other, one.name) for one in fields(Counts)})

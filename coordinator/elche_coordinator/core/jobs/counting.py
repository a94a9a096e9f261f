"""The present counts of an attempt."""

from elche_coordinator.core.jobs.run import Run
from elche_coordinator.core.results.counts import Counts


def counts_of(run: Run) -> Counts:
    """The counts of an attempt; all zero before its ranks agree."""
    training = run.training
    if training is None:
        return Counts()
    return Counts(
        samples=training.ledger.total_committed() - training.restored_samples,
        made_samples=training.num_made,
        rounds=training.version - training.restored_version,
        sent_bytes=training.sent_bytes,
        given_up_rounds=training.num_given_up,
        regroups=max(0, run.generation_id - 1),
        discarded_samples=training.discarded_samples,
        checkpoint_failures=training.checkpoints.num_failures,
    )

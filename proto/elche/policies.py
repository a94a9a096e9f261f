"""When ranks average: the policies that a job can name, and what each allows."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What else of a job fits a policy."""

    may_overlap: bool = True
    """Ranks may train on while an average is made."""
    takes_outer_optimizer: bool = True
    """A round covers enough batches for an outer optimizer to make sense."""
    measures_divergence: bool = True
    """Ranks move far enough apart between rounds for the divergence guard to have something to judge."""
    ignores: tuple[str, ...] = ()
    """Settings that have no effect, and may not be given."""


POLICIES: dict[str, Traits] = {
    "cadence": Traits(),
    "async": Traits(),
    "sync": Traits(
        may_overlap=False,
        takes_outer_optimizer=False,
        measures_divergence=False,
        ignores=("anchor", "max_anchor", "overhead_target", "divergence_threshold", "speed_hint", "max_batch_diff"),
    ),
}
"""By name. How each plans its rounds is the coordinator's (`elche_coordinator.core.pacing`)."""

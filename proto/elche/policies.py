"""The policies by which ranks average, and the settings that each allows."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """Properties of a policy."""

    may_overlap: bool = True
    """True if ranks may train on while an average is made."""
    takes_outer_optimizer: bool = True
    """True if rounds have enough batches for an outer optimizer."""
    measures_divergence: bool = True
    """True if ranks move far enough apart between rounds for the divergence guard."""
    ignores: tuple[str, ...] = ()
    """Settings without effect, which may not be given."""


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
"""Policies by name. `elche_coordinator.core.pacing` implements them."""

"""Settings of a user-owned loop."""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from elche.errors import Misuse

ANCHOR = 10
"""The first anchor unless another one is given."""
OVERHEAD_TARGET = 0.10
"""The overhead target unless another one is given."""
MAX_ANCHOR = 200
"""Upper limit of the anchor unless another one is given."""


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """Settings of a user-owned loop. With `anchor`, `max_anchor`, `overhead_target` or `speed_hint`, and as
    `TrainerConfig()`, it enables El Che, by which ranks train several batches per step.

    Raises `Misuse`, which names the value, for one that is not possible.
    """

    max_anchor: int | None = None
    """Upper limit of the anchor, the number of the slowest rank's batches between two steps. None: El Che chooses it.
    0: no El Che, but a step after every batch, which is split among the ranks by their speed.
    """
    anchor: int | None = None
    """The first and least anchor: the number of the slowest rank's batches between two steps. None: 10."""
    overhead_target: float | None = None
    """The anchor grows while averaging takes more than this fraction of the time for batches; in [0.01, 0.50]. None:
    0.10.
    """
    speed_hint: tuple[int, float] | None = None
    """(slowest rank, factor by which the others are faster): a first guess until times are measured."""
    max_grad_norm: float | None = None
    """Gradient clipping threshold, an L2 norm over all parameters. Applied under El Che to each rank's sum before it is
    averaged, else to the average.
    """
    overlap: bool = True
    """Send gradients during backward. Set it to False if steps have different numbers of backward passes."""
    coordinator: str = ""
    """HOST:PORT of a coordinator (or several, separated by commas), where the loop then appears as a job; empty:
    ELCHE_COORDINATOR, if it is set.
    """
    name: str = ""
    """Name of the job; empty: the script's name."""
    timeline: bool = False
    """Record a timeline for `elche timeline`; needs a coordinator."""
    checkpoint_dir: str = ""
    """Folder, or URL that fsspec knows, for checkpoints; empty: ELCHE_CHECKPOINT_DIR, if it is set."""
    checkpoint_every_minutes: float | None = None
    """Minutes between checkpoints; None: only on request."""
    on_rank_loss: str = "continue"
    """When a rank's process dies: "continue" has the others go on, "fail" ends the loop."""
    device: str = "auto"
    """"auto": the GPU of LOCAL_RANK, or the CPU; or a torch device."""

    def __post_init__(self) -> None:
        for name, (is_possible, wanted) in POSSIBLE.items():
            value = getattr(self, name)
            _check(value is None or is_possible(value), name, value, wanted)
        outcomes = ("continue", "fail")
        _check(self.on_rank_loss in outcomes, "on_rank_loss", self.on_rank_loss, 'either "continue" or "fail"')
        self._check_el_che()

    def _check_el_che(self) -> None:
        """Raises `Misuse` if El Che's settings contradict each other."""
        if self.max_anchor == 0:
            for name in ("anchor", "overhead_target"):
                value = getattr(self, name)
                if value is not None:
                    raise Misuse(
                        f"TrainerConfig: {name}={value!r} has no effect with max_anchor=0, which is a step after every "
                        "batch: leave one of them out"
                    )
        elif self.anchor is not None:
            most = MAX_ANCHOR if self.max_anchor is None else self.max_anchor
            _check(self.anchor <= most, "anchor", self.anchor, f"at most {most}, or max_anchor more")

    @property
    def has_el_che(self) -> bool:
        """True if ranks train several batches per step. Not with settings alone that are for something else, such as
        `max_grad_norm` or `checkpoint_dir`: who gives these expects to learn as without them.
        """
        given = {one.name for one in fields(self) if getattr(self, one.name) != one.default}
        return self.max_anchor != 0 and (not given or not given.isdisjoint(OF_GIVEN_BATCHES))


OF_GIVEN_BATCHES = ("max_anchor", "anchor", "overhead_target", "speed_hint")
"""Settings that act on batches which elche gives out."""


def check_has_effect(config: TrainerConfig, *, has_shares: bool) -> None:
    """For a loop that takes its batches itself, raises `Misuse` for a setting that then has no effect. With
    `has_shares`, batches are shared by speed all the same.
    """
    for name in OF_GIVEN_BATCHES:
        value = getattr(config, name)
        if value is None or (name, value) == ("max_anchor", 0):
            continue
        if not (has_shares and name == "speed_hint"):
            raise Misuse(
                f"TrainerConfig: {name}={value!r} has no effect in a loop that takes its batches itself, with a step "
                "after each: leave it out, or have elche give out those of a loader (set_data_loader, then epoch)"
            )


def _check(condition: bool, name: str, value: object, wanted: str) -> None:
    if not condition:
        raise Misuse(f"TrainerConfig: {name} must be {wanted}, not {value!r}")


def _is_number(value: object, above: float = -math.inf) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and above < value < math.inf


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_hint(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and _is_whole(value[0], 0) and _is_number(value[1])


POSSIBLE: dict[str, tuple[Callable[[Any], bool], str]] = {
    "max_anchor": (lambda value: _is_whole(value, 0), "None, or at least 0"),
    "anchor": (lambda value: _is_whole(value, 1), "a whole number of at least 1"),
    "overhead_target": (_is_number, "a number"),
    "max_grad_norm": (lambda value: _is_number(value, 0), "None, or greater than 0"),
    "checkpoint_every_minutes": (lambda value: _is_number(value, 0), "None, or above 0"),
    "speed_hint": (_is_hint, "None, or (slowest rank, how many times faster the others are)"),
}
"""By setting, a function that is true of its possible values besides None, and these in words."""

"""Settings of a user-owned loop."""

import math
from dataclasses import dataclass

from elche.errors import Misuse


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """Settings of a user-owned loop. Giving a config at all enables El Che, also on equal devices.

    Raises `Misuse` for a value that cannot work, and names it.
    """

    max_anchor: int | None = None
    """Upper limit of the anchor, the slowest rank's batches between two steps; None: chosen by El Che; 0: no El Che, a
    step after every batch, which is split among the ranks by their speed.
    """
    anchor: int = 10
    """The anchor: batches of the slowest rank between two steps, at first and at least."""
    overhead_target: float = 0.10
    """Averaging time as a fraction of the time for batches above which the anchor grows; clamped to [0.01, 0.50]."""
    speed_hint: tuple[int, float] | None = None
    """(slowest rank, how many times faster the others are), a first guess until times are measured."""
    max_grad_norm: float | None = None
    """Gradient clipping threshold (L2 norm over all parameters): under El Che for each rank's sum before it is
    averaged, else for the average.
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
    """What is done when a rank's process dies: "continue", the others go on, or "fail", the loop ends."""
    device: str = "auto"
    """"auto": the GPU of LOCAL_RANK, or the CPU; or a torch device."""

    def __post_init__(self) -> None:
        _check(
            self.max_anchor is None or _is_whole(self.max_anchor, 0),
            "max_anchor",
            self.max_anchor,
            "None, or at least 0",
        )
        _check(_is_whole(self.anchor, 1), "anchor", self.anchor, "a whole number of at least 1")
        _check(_is_number(self.overhead_target), "overhead_target", self.overhead_target, "a number")
        _check(
            self.max_grad_norm is None or (_is_number(self.max_grad_norm) and self.max_grad_norm > 0),
            "max_grad_norm",
            self.max_grad_norm,
            "None, or greater than 0",
        )
        outcomes = ("continue", "fail")
        _check(self.on_rank_loss in outcomes, "on_rank_loss", self.on_rank_loss, 'either "continue" or "fail"')
        every = self.checkpoint_every_minutes
        _check(
            every is None or (_is_number(every) and every > 0), "checkpoint_every_minutes", every, "None, or above 0"
        )
        hint = self.speed_hint
        is_hint = isinstance(hint, tuple) and len(hint) == 2 and _is_whole(hint[0], 0) and _is_number(hint[1])
        _check(
            hint is None or is_hint, "speed_hint", hint, "None, or (slowest rank, how many times faster the others are)"
        )

    @property
    def has_el_che(self) -> bool:
        """Whether several batches may go into one step."""
        return self.max_anchor != 0


def _check(condition: bool, name: str, value: object, wanted: str) -> None:
    if not condition:
        raise Misuse(f"TrainerConfig: {name} must be {wanted}, not {value!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least

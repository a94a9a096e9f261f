"""`TrainingJob`, which a user's file defines, and which its own script can train, too."""

import atexit
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Self

from elche.errors import InvalidJob
from elche.output import notice
from elche_worker.user.job import JobDefinition
from elche_worker.user.loading import RUN_IN_JOB, check_not_loading

if TYPE_CHECKING:
    from elche_worker.model.state import TrainedState
    from elche_worker.run.handle import Handle


_idle: list[str] = []
"""The program's file, if that defines a job and has not yet trained one."""


@atexit.register
def _tell_idle() -> None:
    """Tells whoever has started a job's file as a program, as `python train.py`, that nothing was trained."""
    # A program that has imported the client submits the file, and one that has ended with an error has said so.
    if _idle and "elche_client" not in sys.modules and not hasattr(sys, "last_type"):
        file = os.path.relpath(_idle[0])
        notice(f"{file} defines a training job, and nothing was trained: train it with `elche run {file}`")


class TrainingJob(JobDefinition):
    """One training run, described by functions, so that every rank builds its own parts on its own device.

    Its fields are those of `JobDefinition`. Raises `InvalidJob`, naming it, for an invalid value.
    """

    def __new__(cls, **given: Any) -> Self:
        """A new job. Raises `InvalidJob` for an unknown field, and for one that is missing."""
        known = [one.name for one in fields(cls)]
        for name in given:
            if name not in known:
                near = get_close_matches(name, known, n=3)
                hint = f"; did you mean {' or '.join(near)}?" if near else ""
                raise InvalidJob(f"a TrainingJob has no {name}{hint}")
        needed = [one.name for one in fields(cls) if one.default is MISSING and one.default_factory is MISSING]
        missing = [name for name in needed if name not in given]
        if given and missing:  # a copy is made without fields
            raise InvalidJob(f"a TrainingJob needs {', '.join(missing)}")
        defining = sys._getframe(1).f_globals
        if defining["__name__"] == "__main__" and "__file__" in defining:
            _idle[:] = [defining["__file__"]]
        return super().__new__(cls)

    def run(
        self, *, device: str = "auto", on_epoch: Callable[[int, dict[str, float]], None] | None = None
    ) -> "TrainedState":
        """Trains on one device, in this process and without a coordinator; returns the trained state.

        `on_epoch(epoch, metrics)` is called after each epoch with the result of `evaluate`. The state is that of the
        last or the best epoch, as `restore` says. Makes no rounds and writes no checkpoints; raises `InvalidJob` for an
        outer optimizer and for `after_round`. In a file that `elche run` gets, the call must be under
        `if __name__ == "__main__":`.
        """
        check_not_loading(RUN_IN_JOB)
        _idle.clear()
        from elche_worker.run.alone import train_alone

        return train_alone(self, device=device, on_epoch=on_epoch)

    def start(
        self,
        *,
        ranks: int = 1,
        device: str = "auto",
        slow: Mapping[int, float] | None = None,
        out: str | os.PathLike[str] | None = None,
    ) -> "Handle":
        """Starts a coordinator and local ranks, and returns at once; the handle gives metrics and the trained state.

        The ranks run the file that defines the job, under the name `job`, with this program's arguments (`sys.argv`);
        so the call must be under `if __name__ == "__main__":`. `slow` maps ranks to factors by which they are slowed
        down. `out` is the folder for logs and model.
        """
        _idle.clear()
        from elche_worker.run.handle import start

        folder = None if out is None else os.fspath(out)
        return start(self, ranks=ranks, device=device, slow=slow or {}, out=folder)

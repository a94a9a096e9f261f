"""`TrainingJob`, what a user's file defines: a job that its own script can train, too."""

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from elche_worker.user.job import JobDefinition

if TYPE_CHECKING:
    from elche_worker.model.state import TrainedState
    from elche_worker.run.handle import Handle


class TrainingJob(JobDefinition):
    """One training run, described by functions, so that every rank builds its own parts on its own device.

    Its fields are those of `JobDefinition`. Raises `InvalidJob` for a value that cannot work, and names it.
    """

    def run(
        self, *, device: str = "auto", on_epoch: Callable[[int, dict[str, float]], None] | None = None
    ) -> "TrainedState":
        """Trains on one device, in this process and without a coordinator; returns the trained state.

        `on_epoch(epoch, metrics)` is called after each epoch with what `evaluate` returned. The state is the one that
        `restore` names. Writes no checkpoints.
        """
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

        The ranks run the file that defines the job, under the name `job`; so what starts it must stand under
        `if __name__ == "__main__":`. `slow` maps a rank to how many times slower it is to be. `out` is its folder.
        """
        from elche_worker.run.handle import start

        folder = None if out is None else os.fspath(out)
        return start(self, ranks=ranks, device=device, slow=slow or {}, out=folder)

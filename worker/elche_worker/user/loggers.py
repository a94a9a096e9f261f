"""Experiment trackers: each finished epoch of a job, once committed, in one run of the tracker.

Each is a thin wrapper of the tracker's own client, which is imported on the one rank that logs: `pip install
elche[tensorboard]`, `elche[wandb]` or `elche[mlflow]`. Anything with the methods of `Logger` serves as well.
"""

import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from elche.output import notice
from elche_worker.user.callbacks import EpochMetrics


@runtime_checkable
class Logger(Protocol):
    """An experiment tracker. All calls come from one thread, in order; errors are logged and counted."""

    def begin(self, job: str) -> None:
        """Opens the run of the job; called once, before the first epoch is logged."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Logs a finished epoch; `step` counts from 1."""

    def end(self) -> None:
        """Closes the run at the job's end."""


@dataclass(slots=True)
class TensorBoard:
    """Writes event files to a folder, or any place that TensorBoard writes to; a run is a folder in it."""

    folder: str = "tensorboard"
    _writer: Any = field(default=None, init=False, repr=False)

    def begin(self, job: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(f"{self.folder.rstrip('/')}/{job}")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def end(self) -> None:
        self._writer.close()


@dataclass(slots=True)
class WandB:
    """Logs to Weights & Biases; `options` go to `wandb.init`. The key is that of `wandb login` or WANDB_API_KEY."""

    project: str
    options: dict[str, Any] = field(default_factory=dict)
    _run: Any = field(default=None, init=False, repr=False)

    def begin(self, job: str) -> None:
        import wandb

        self._run = wandb.init(project=self.project, **{"id": job, "name": job, "resume": "allow", **self.options})

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def end(self) -> None:
        self._run.finish()


@dataclass(slots=True)
class MLflow:
    """Logs to an MLflow server or store; by default that of MLFLOW_TRACKING_URI."""

    experiment: str = "elche"
    tracking_uri: str | None = None
    _client: Any = field(default=None, init=False, repr=False)
    _run_id: str = field(default="", init=False, repr=False)

    def begin(self, job: str) -> None:
        from mlflow import MlflowClient

        self._client = MlflowClient(self.tracking_uri)
        known = self._client.get_experiment_by_name(self.experiment)
        experiment_id = known.experiment_id if known else self._client.create_experiment(self.experiment)
        self._run_id = self._client.create_run(experiment_id, run_name=job, tags={"elche.job": job}).info.run_id

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._client.log_metric(self._run_id, name, value, step=step)

    def end(self) -> None:
        self._client.set_terminated(self._run_id)


class Loggers:
    """Calls a job's loggers on a thread of their own, so that a slow tracker does not delay training."""

    def __init__(self, loggers: Sequence[Logger], job: str) -> None:
        self.num_errors = 0
        self._job = job
        self._loggers = {id(one): one for one in loggers}
        self._begun: dict[int, bool] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="loggers") if loggers else None

    def log(self, metrics: EpochMetrics, then: Callable[[], None] = lambda: None, *, is_last: bool = False) -> None:
        """Logs an epoch with every logger, and closes their runs after the last one; then calls `then`."""
        if self._thread is None:
            then()
        else:
            self._thread.submit(self._log, metrics, then, is_last)

    def end(self, timeout_s: float | None = None) -> None:
        """Closes all open runs once all epochs are logged; waits for that at most `timeout_s`."""
        if self._thread is None:
            return
        ending = self._thread.submit(self._end)
        try:
            ending.result(timeout_s)
        except TimeoutError:
            notice(f"the loggers have not ended in {timeout_s} s and are not waited for")
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _log(self, metrics: EpochMetrics, then: Callable[[], None], is_last: bool) -> None:
        for key, logger in self._loggers.items():
            if key not in self._begun:
                self._begun[key] = self._try(logger, "begin", self._job)
            if self._begun[key]:
                self._try(logger, "log", metrics.epoch + 1, values_of(metrics))
        if is_last:
            self._end()
        then()

    def _end(self) -> None:
        for key in [key for key, is_open in self._begun.items() if is_open]:
            self._begun[key] = False
            self._try(self._loggers[key], "end")

    def _try(self, logger: Logger, method: str, *arguments: Any) -> bool:
        try:
            getattr(logger, method)(*arguments)
            return True
        except BaseException:  # a tracker's error must not end training, not even SystemExit
            self.num_errors += 1
            where = f"{type(logger).__name__}.{method}"
            notice(f"the logger {where} raised, and training goes on:\n{traceback.format_exc()}")
            return False


def values_of(metrics: EpochMetrics) -> dict[str, float]:
    """An epoch's values by their names in trackers."""
    return {
        "train/loss": metrics.loss,
        **{f"train/{name}": value for name, value in metrics.scalars.items()},
        **{f"eval/{name}": value for name, value in metrics.metrics.items()},
        "speed/samples_per_s": metrics.samples_per_s,
        "speed/epoch_s": metrics.duration_s,
        "attempt": float(metrics.attempt),
        **{f"batches/rank_{rank}": float(number) for rank, number in enumerate(metrics.rank_batches)},
        **{f"speed/rank_{rank}": speed for rank, speed in enumerate(metrics.rank_samples_per_s)},
    }

"""Evaluations under way, their metrics, the best version, and the end of patience."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from math import isfinite
from typing import Any

from elche.evaluation import MAX_SUM_BYTES, missing_metric, note_finite, spoilt_metric
from elche.settings import AgreedSettings
from elche_coordinator.core.messages.events import EvaluationDone
from elche_coordinator.core.messages.ids import Epoch, Rank, Version
from elche_coordinator.core.messages.spec import TensorSum, figures, whole_number
from elche_coordinator.core.records.failure import Failure

MAX_VERSIONS = 32
"""Number of newest versions whose metrics a checkpoint stores."""
MAX_METRICS_BYTES = 1 << 20
"""Most bytes of these metrics, with their names: a checkpoint's state is one message to the rank that writes it."""
FIGURE_BYTES = 24
"""Bytes of a figure as text."""


@dataclass(slots=True, kw_only=True)
class Evaluation:
    """One version's evaluation, by one rank or by all, each a part."""

    epochs: list[Epoch]
    """The finished epochs that it evaluates; messages name the last one."""
    version: Version
    num_epochs: int
    """Number of epochs complete at the version."""
    waiting: dict[Rank, None]
    """Ranks whose part is missing."""
    sums: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Metrics as (sum, number of samples), over the received parts."""
    tensors: dict[str, TensorSum] = field(default_factory=dict)
    """Sums of tensors over the received parts. A rank makes metrics of them once all parts are there."""
    is_asked: bool = False
    """True if a rank was asked to make metrics of the tensors; it is in `waiting` until it answers."""
    duration_ms: float = 0.0
    """Time of the longest part, plus that for making metrics of tensors."""
    failure: Failure | None = None
    """A failure if the parts do not fit together."""

    @property
    def metrics(self) -> dict[str, float]:
        """Means over all samples."""
        return {name: total / count for name, (total, count) in self.sums.items() if count}

    @property
    def lacks_metrics(self) -> bool:
        """True if all parts are there, and no rank was asked to make metrics of their tensors."""
        return bool(self.tensors) and not self.waiting and not self.is_asked and self.failure is None

    def add(self, part: EvaluationDone) -> None:
        """Adds one rank's part, or the metrics made of the sums."""
        self.duration_ms = (
            self.duration_ms + part.duration_ms if part.is_made else max(self.duration_ms, part.duration_ms)
        )
        for name, (total, count) in part.sums.items():
            old_total, old_count = self.sums.get(name, (0.0, 0))
            self.sums[name] = (old_total + total, old_count + count)
        for name, tensor in part.tensors.items():
            self.failure = self.failure or self._add_tensor(name, tensor, part.rank)
        if self.failure is None and (size := sum(len(one.data) for one in self.tensors.values())) > MAX_SUM_BYTES:
            self.failure = Failure(
                f"eval_step returns tensors whose sums take {size} bytes; at most {MAX_SUM_BYTES} are possible",
                invalid=True,
            )

    def _add_tensor(self, name: str, tensor: TensorSum, rank: Rank) -> Failure | None:
        before = self.tensors.get(name)
        if not tensor.is_whole:
            return Failure(f"rank {rank} sent {len(tensor.data)} bytes for {name!r}, whose shape is {tensor.shape}")
        if before is not None and before.shape != tensor.shape:
            return Failure(
                f"eval_step returns {name!r} of shape {tensor.shape} on rank {rank}, and of shape {before.shape} on "
                "another: only tensors of one shape can be summed",
                invalid=True,
            )
        self.tensors[name] = tensor if before is None else before.plus(tensor)
        return None


class Evaluations:
    """All evaluations of a job, in the order of their versions."""

    def __init__(self, settings: AgreedSettings) -> None:
        self.metrics: dict[str, float] = {}
        """Metrics of the last complete evaluation."""
        self.metrics_epoch: int | None = None
        """Epochs complete at that one."""
        self.best_version: Version | None = None
        """The version with the best value of the monitored metric."""
        self.best_epoch: int | None = None
        """Epochs complete at that one."""
        self.num_since_best = 0
        """Number of evaluations since the best one."""
        self._best: float | None = None
        """The monitored metric's best finite value; None before the first."""
        self._last_finite: dict[str, int] = {}
        """Number of epochs complete when each metric was last finite."""
        self._by_version: dict[Version, dict[str, float]] = {}
        """Metrics by version, of the newest evaluations and the best one."""
        self._open: list[Evaluation] = []
        """Evaluations under way, oldest first; they are judged in this order."""
        self._void: dict[Rank, list[int]] = {}
        """By rank: epochs of voided evaluations whose part the rank will still send, to be ignored."""
        self._monitor = settings.monitor
        self._sign = -1.0 if settings.more_is_better else 1.0
        """Factor on the monitored metric, so that a smaller product is better."""
        self._patience = settings.patience

    @property
    def is_idle(self) -> bool:
        """True if no evaluation is under way."""
        return not self._open

    @property
    def best_metrics(self) -> dict[str, float]:
        """Metrics of the best evaluation."""
        return {} if self.best_version is None else self._by_version.get(self.best_version, {})

    @property
    def owed_epochs(self) -> list[Epoch]:
        """Finished epochs whose evaluation is not complete."""
        return [epoch for evaluation in self._open for epoch in evaluation.epochs]

    def has(self, rank: Rank) -> bool:
        """True if the rank has a part of an evaluation to make."""
        if not self._open and not self._void:
            return False
        return bool(self._void.get(rank)) or any(rank in evaluation.waiting for evaluation in self._open)

    def begin(self, epochs: list[Epoch], version: Version, ranks: list[Rank], num_epochs: int) -> None:
        """Begins the evaluation of a version, at which `num_epochs` epochs are complete, by these ranks."""
        waiting = dict.fromkeys(ranks)
        self._open.append(Evaluation(epochs=epochs, version=version, num_epochs=num_epochs, waiting=waiting))

    def take_part(self, part: EvaluationDone) -> list[Evaluation]:
        """Adds one rank's part, or the metrics that it has made of all parts' tensors; returns evaluations that are now
        complete, in order. Ignores stale reports.
        """
        if part.epoch in self._void.get(part.rank, ()):
            self._void[part.rank].remove(part.epoch)
            return []
        for evaluation in self._open:
            # A rank's own part that comes twice must not pass for the metrics that it was asked for.
            is_its = evaluation.epochs[-1] == part.epoch and evaluation.is_asked == part.is_made
            if is_its and part.rank in evaluation.waiting:
                del evaluation.waiting[part.rank]
                evaluation.add(part)
        return self.take_complete()

    def take_complete(self) -> list[Evaluation]:
        """Removes and returns complete evaluations, in order; one waits for those before it."""
        complete = []
        while self._open and not self._open[0].waiting and not self._open[0].lacks_metrics:
            complete.append(self._open.pop(0))
        return complete

    @property
    def lack_metrics(self) -> bool:
        """True if a rank is to be asked to make metrics of summed tensors."""
        return any(evaluation.lacks_metrics for evaluation in self._open)

    def ask(self, rank: Rank) -> list[Evaluation]:
        """Asks this rank to make metrics of summed tensors; returns the evaluations that need it, each only once."""
        asked = [evaluation for evaluation in self._open if evaluation.lacks_metrics]
        for evaluation in asked:
            evaluation.is_asked, evaluation.waiting = True, {rank: None}
        return asked

    def lose(self, rank: Rank) -> list[Epoch]:
        """Voids the evaluations in which a lost rank had a part. If it was only making metrics of the sums, another
        rank can do that. Returns the epochs whose evaluation is owed again.
        """
        self._void.pop(rank, None)
        touched = [evaluation for evaluation in self._open if rank in evaluation.waiting]
        for evaluation in touched:
            if evaluation.is_asked:
                evaluation.is_asked, evaluation.waiting = False, {}
        lost = [evaluation for evaluation in touched if evaluation.waiting]
        for evaluation in lost:
            self._open.remove(evaluation)
            for other in evaluation.waiting:
                if other != rank:
                    self._void.setdefault(other, []).append(evaluation.epochs[-1])
        return [epoch for evaluation in lost for epoch in evaluation.epochs]

    def judge(self, evaluation: Evaluation) -> Failure | None:
        """Makes a complete evaluation the newest one, and compares it with the best. Returns a failure if it cannot."""
        if evaluation.failure is not None:
            return evaluation.failure
        self.metrics, self.metrics_epoch = evaluation.metrics, evaluation.num_epochs
        self._last_finite = note_finite(self.metrics, self._last_finite, evaluation.num_epochs)
        self._by_version[evaluation.version] = evaluation.metrics
        self._forget_old()
        if self._monitor is None:
            return None
        value = self.metrics.get(self._monitor)
        if value is None:
            return Failure(missing_metric(self._monitor, self.metrics))
        self.num_since_best += 1
        # No value compares as better than NaN: as the first one it would stay the best forever.
        if isfinite(value) and (self._best is None or self._sign * value < self._sign * self._best):
            self._best, self.best_version, self.num_since_best = value, evaluation.version, 0
            self.best_epoch = evaluation.num_epochs
        return None

    def _forget_old(self) -> None:
        """Forgets the metrics of old versions, but not of the newest and the best."""
        newest_first = list(reversed(self._by_version))
        sizes = (sum(len(ascii(name)) + FIGURE_BYTES for name in self._by_version[version]) for version in newest_first)
        for index, (version, total) in enumerate(zip(newest_first, accumulate(sizes), strict=True)):
            is_old = index >= MAX_VERSIONS or total > MAX_METRICS_BYTES
            if index and is_old and version != self.best_version:
                del self._by_version[version]

    @property
    def spoilt(self) -> str:
        """The failure's text if the newest evaluation, as the final one, has a metric that became not finite;
        else "".
        """
        return spoilt_metric(self.metrics, self._last_finite, self._monitor)

    @property
    def lost_patience(self) -> str | None:
        """The reason to end training early; None to go on."""
        if self._patience is None or self.num_since_best < self._patience:
            return None
        if self._best is None:
            return f"{self._monitor} was not a finite number in {self._patience} evaluations"
        return f"{self._monitor} was not better than {self._best:g} in {self._patience} evaluations"

    def to_json(self) -> dict[str, object]:
        """State for a checkpoint, as plain values."""
        return {
            "metrics": self.metrics,
            "best": self._best,
            "best_version": self.best_version,
            "best_epoch": self.best_epoch,
            "metrics_epoch": self.metrics_epoch,
            "num_since_best": self.num_since_best,
            "last_finite": self._last_finite,
            "owed_epochs": self.owed_epochs,
            "by_version": {str(version): metrics for version, metrics in self._by_version.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores `to_json`; owed epochs are evaluated with the next round."""
        best, best_version = state["best"], state["best_version"]
        self.metrics = figures(state["metrics"])
        self._best = None if best is None else float(best)
        self.best_version = None if best_version is None else Version(whole_number(best_version, "best version"))
        # checkpoints of older versions have none of the following three
        self.best_epoch = state.get("best_epoch")
        self.metrics_epoch = state.get("metrics_epoch")
        finite = state.get("last_finite", {})
        self._last_finite = {name: whole_number(epoch, "last finite metric") for name, epoch in finite.items()}
        self.num_since_best = whole_number(state["num_since_best"], "evaluations since the best")
        self._by_version = {Version(int(version)): figures(metrics) for version, metrics in state["by_version"].items()}

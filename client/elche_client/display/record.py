"""Collects the events of a job and writes them as the JSON that scripts read."""

import json
import math
import os
from collections import deque
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, assert_never

from elche_client.events import (
    Checkpoint,
    EpochReport,
    EvaluationReport,
    Event,
    JobResult,
    JobView,
    MembershipReport,
    RoundReport,
    StallReport,
    UserEvent,
)

MAX_ROUNDS = 10_000
"""The newest rounds that a record keeps."""


@dataclass(slots=True)
class JobRecord:
    """The reports of one job so far: every epoch and evaluation, and the newest rounds."""

    job_id: str = ""
    name: str = ""
    last_view: JobView | None = None
    epochs: list[EpochReport] = field(default_factory=list)
    evaluations: list[EvaluationReport] = field(default_factory=list)
    rounds: deque[RoundReport] = field(default_factory=lambda: deque(maxlen=MAX_ROUNDS))
    checkpoint: Checkpoint | None = None
    """The newest checkpoint."""

    def add(self, event: Event) -> None:
        """Adds one event of the job."""
        match event:
            case JobView():
                self.last_view = event
                self.checkpoint = event.checkpoints[-1] if event.checkpoints else self.checkpoint
                self.name = event.name or self.name
            case RoundReport():
                self.rounds.append(event)
            case EpochReport():
                self.epochs.append(event)
            case EvaluationReport():
                self.evaluations.append(event)
            case Checkpoint():
                self.checkpoint = event
            case JobResult():
                self.checkpoint = event.checkpoints[-1] if event.checkpoints else self.checkpoint
            case StallReport() | MembershipReport() | UserEvent():
                pass
            case _:
                assert_never(event)

    def document(self, result: JobResult) -> dict[str, Any]:
        """The whole run as JSON values: its result and all reports."""
        return {
            **result_document(result),
            "job_id": self.job_id,
            "name": self.name,
            "epoch_reports": [asdict(report) for report in self.epochs],
            "evaluations": [asdict(report) for report in self.evaluations],
            "round_reports": [event_document(report) for report in self.rounds],
        }

    def write(self, path: Path, result: JobResult) -> None:
        """Writes `document` to `path`, atomically. Raises `OSError`."""
        scratch = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            scratch.write_text(to_json(self.document(result), indent=1) + "\n", encoding="utf-8")
            scratch.replace(path)
        finally:
            scratch.unlink(missing_ok=True)


def event_document(event: Event) -> dict[str, Any]:
    """An event as JSON values; a round without the binary recording that `elche replay` uses."""
    document = asdict(event)
    document.pop("recorded", None)
    return document


def result_document(result: JobResult) -> dict[str, Any]:
    """The object that `--json` prints."""
    document: dict[str, Any] = {
        "state": str(result.state),
        "epochs": result.epochs,
        "metrics": dict(result.metrics),
        "metrics_epoch": result.metrics_epoch,
        "best_epoch": result.best_epoch,
        "best_metrics": dict(result.best_metrics),
        "samples_per_s": result.samples_per_s,
        "bound_samples_per_s": result.bound_samples_per_s,
        "bound_fraction": result.bound_fraction,
        "dataset_size": result.dataset_size,
        "committed_samples": list(result.committed_samples),
        "dropped": list(result.dropped_samples),
        "discarded": result.discarded_samples,
        "rounds": result.rounds,
        "ranks": [asdict(rank) for rank in result.ranks],
        "model": result.model,
        "model_is": result.model_is,
        "duration_s": result.duration_s,
        "checkpoints": [asdict(checkpoint) for checkpoint in result.checkpoints],
    }
    if result.ended_early:
        document["ended_early"] = result.ended_early
    if result.best_problem:
        document["best_problem"] = result.best_problem
    if result.error:
        document["error"] = result.error
    if result.traceback:
        document["traceback"] = result.traceback
    return document


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Strict JSON: NaN and infinity become null."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False, default=str)


def _finite(value: Any) -> Any:
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {key: _finite(part) for key, part in value.items()}
        case list() | tuple():
            return [_finite(part) for part in value]
        case _:
            return value

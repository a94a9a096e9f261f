"""What the page draws: a job's figures over time, in bounded memory, and what happened to it when."""

import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import nan

from elche_coordinator.core.describe import JobView, RankView
from elche_coordinator.core.reports import (
    Checkpoint,
    EpochReport,
    EvaluationReport,
    JobResult,
    Report,
    RoundReport,
    StallReport,
    UserEvent,
)
from elche_coordinator.wording import in_words

MAX_POINTS = 600
"""Of a series. When it is full, every second point goes, and points come half as often."""
MAX_EVENTS = 500
MAX_JOBS = 100
"""Ended jobs beyond these are forgotten, the oldest first."""

KINDS: dict[type[Report], str] = {
    EpochReport: "epoch",
    EvaluationReport: "epoch",
    StallReport: "error",
    Checkpoint: "checkpoint",
    UserEvent: "user",
    JobResult: "state",
}

JOB_FIGURES: dict[str, Callable[[JobView], float | None]] = {
    "loss": lambda view: view.loss,
    "anchor": lambda view: view.anchor,
    "overhead": lambda view: view.overhead_fraction,
    "samples_per_s": lambda view: view.samples_per_s,
}
RANK_FIGURES: dict[str, Callable[[RankView], float | None]] = {
    "samples_per_s": lambda rank: rank.samples_per_s,
    "batches": lambda rank: rank.round_target or None,
    "divergence": lambda rank: rank.divergence,
    "memory": lambda rank: rank.gauges.memory_used_bytes or None,
}


@dataclass(frozen=True, slots=True)
class Happening:
    """Something that happened to a job, in words for people."""

    number: int
    at: float
    """Seconds since 1970."""
    kind: str
    text: str


@dataclass(slots=True)
class JobRecording:
    """One job over time."""

    at: "array[float]" = field(default_factory=lambda: array("d"))
    figures: "dict[str, array[float]]" = field(default_factory=lambda: {name: array("f") for name in JOB_FIGURES})
    ranks: "dict[int, dict[str, array[float]]]" = field(default_factory=dict)
    happenings: deque[Happening] = field(default_factory=lambda: deque(maxlen=MAX_EVENTS))
    every_s: float = 1.0
    last: JobView | None = None

    def add(self, view: JobView, now: float) -> None:
        """One more point, unless the last one is too near."""
        if self.at and 0 <= now - self.at[-1] < 0.9 * self.every_s:
            return
        for rank in view.ranks:
            if rank.rank not in self.ranks:
                self.ranks[rank.rank] = {name: array("f", [nan] * len(self.at)) for name in RANK_FIGURES}
        self.at.append(now)
        for name, figure in JOB_FIGURES.items():
            self.figures[name].append(_number(figure(view)))
        for rank in view.ranks:
            for name, rank_figure in RANK_FIGURES.items():
                self.ranks[rank.rank][name].append(_number(rank_figure(rank)))
        if len(self.at) >= MAX_POINTS:
            self._halve()

    def _halve(self) -> None:
        self.every_s *= 2
        self.at = self.at[1::2]
        self.figures = {name: values[1::2] for name, values in self.figures.items()}
        for figures in self.ranks.values():
            for name in figures:
                figures[name] = figures[name][1::2]


class Recorder:
    """Takes views about once a second, and reports as they come."""

    def __init__(self, wall: Callable[[], float] = time.time) -> None:
        self.jobs: dict[str, JobRecording] = {}
        self._wall = wall
        self._num_happenings = 0

    def take_views(self, views: list[JobView]) -> None:
        """All jobs as they are now."""
        now = self._wall()
        for view in views:
            if view.ended_for_s is not None and view.job_id not in self.jobs:
                continue  # it has been forgotten
            recording = self._recording(view.job_id)
            for kind, text in _differences(recording.last, view):
                self._note(recording, kind, text)
            has_ended = recording.last is not None and recording.last.ended_for_s is not None
            recording.last = view
            if view.num_epochs and not has_ended:
                recording.add(view, now)

    def take_report(self, job_id: str, report: Report) -> None:
        """Something that watchers are told."""
        if isinstance(report, RoundReport):
            return  # they are too many to be read
        kind = "error" if isinstance(report, JobResult) and report.error else KINDS[type(report)]
        self._note(self._recording(job_id), kind, in_words(report))

    def _recording(self, job_id: str) -> JobRecording:
        if job_id not in self.jobs:
            self.jobs[job_id] = JobRecording()
            ended = [name for name, one in self.jobs.items() if one.last and one.last.ended_for_s is not None]
            for name in ended[: max(0, len(self.jobs) - MAX_JOBS)]:
                del self.jobs[name]
        return self.jobs[job_id]

    def _note(self, recording: JobRecording, kind: str, text: str) -> None:
        self._num_happenings += 1
        recording.happenings.append(Happening(self._num_happenings, self._wall(), kind, text))


def _number(value: float | None) -> float:
    return nan if value is None else value


def _differences(before: JobView | None, now: JobView) -> Iterator[tuple[str, str]]:
    """What has changed between two views that no report tells."""
    if before is None or before.state != now.state:
        yield "state", f"{now.state}: {now.reason}" if now.reason not in ("trains", now.state) else now.state
    if before is None:
        return
    if now.num_given_up > before.num_given_up:
        yield "warning", now.pacing if "given up" in now.pacing else "an averaging was given up, and made again"
    if now.num_checkpoint_failures > before.num_checkpoint_failures:
        yield "warning", "a checkpoint could not be written; training goes on"
    if now.anchor != before.anchor and before.anchor:
        yield "pacing", f"anchor {before.anchor} → {now.anchor} batches of the slowest rank: {now.pacing}"
    if now.num_lost_ranks > before.num_lost_ranks:
        yield "error", f"a rank is lost: {now.reason}"
    known = {rank.rank: rank for rank in before.ranks}
    for rank in now.ranks:
        old = known.get(rank.rank)
        if old is not None and rank.callback_errors > old.callback_errors:
            yield "warning", f"a callback has raised on rank {rank.rank}; its log shows what"

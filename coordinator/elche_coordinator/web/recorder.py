"""Records each job for the page: its figures over time, in bounded memory, and its events."""

import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import nan

from elche_coordinator.core.describe import JobView, RankView
from elche_coordinator.core.messages import reports
from elche_coordinator.streams.report_text import describe_report

MAX_POINTS = 600
"""Rows of a table. When it is full, every second row is removed, and rows are added half as often."""
MAX_NAMES = 64
"""Columns of a table; further names are ignored."""
MAX_NAME = 80
"""Longest name of a column, in characters."""
MAX_TEXT = 500
"""Longest text of an event, in characters."""
MAX_STACKS = 8000
"""Longest text of a stall with stacks, in characters."""
MAX_EVENTS = 500
"""Newest events of a job that are recorded."""
MAX_JOBS = 100
"""Recordings in memory; more ended jobs are dropped, oldest first."""
STALLED = "stalled"

KINDS: dict[type[reports.Report], str] = {
    reports.EpochReport: "epoch",
    reports.EvaluationReport: "epoch",
    reports.StallReport: "error",
    reports.MembershipReport: "error",
    reports.Checkpoint: "checkpoint",
    reports.UserEvent: "user",
    reports.JobResult: "state",
}
"""Kinds of events by report, except for ranks that train again and jobs that end with an error (`_kind`)."""

JOB_FIGURES: dict[str, Callable[[JobView], float | None]] = {
    "loss": lambda view: view.loss,
    "anchor": lambda view: view.anchor or None,
    "overhead": lambda view: view.overhead_fraction,
    "samples_per_s": lambda view: view.samples_per_s,
    "learning_rate": lambda view: next(
        (rank.gauges.learning_rate for rank in view.ranks if rank.gauges.learning_rate is not None), None
    ),
}
RANK_FIGURES: dict[str, Callable[[RankView], float | None]] = {
    "samples_per_s": lambda rank: None if rank.state == STALLED else rank.samples_per_s,
    "batches": lambda rank: rank.round_target or None,
    "divergence": lambda rank: rank.divergence,
    "memory": lambda rank: rank.gauges.memory_used_bytes or None,
}


@dataclass(frozen=True, slots=True)
class JobEvent:
    """An event of a job, as text for people."""

    number: int
    at: float
    """Seconds since 1970."""
    kind: str
    text: str


@dataclass(slots=True)
class Table:
    """Figures in columns of equal length; NaN where a figure was not known."""

    at: "array[float]" = field(default_factory=lambda: array("d"))
    """Seconds since 1970."""
    step: "array[float]" = field(default_factory=lambda: array("d"))
    """Batches of all ranks so far. A resumed job begins at 0."""
    epoch: "array[float]" = field(default_factory=lambda: array("d"))
    """Epochs so far; 2.5 is the middle of the third epoch."""
    figures: "dict[str, array[float]]" = field(default_factory=dict)
    halvings: int = 0
    """Number of times that every second row was removed."""
    num_offered: int = 0

    def copy(self) -> "Table":
        """The same figures, in columns of their own."""
        figures = {name: column[:] for name, column in self.figures.items()}
        return replace(self, at=self.at[:], step=self.step[:], epoch=self.epoch[:], figures=figures)

    def offer(self, at: float, step: float, epoch: float, values: Mapping[str, float | None]) -> None:
        """Adds a row, unless it falls between the rows that are kept since the last halving."""
        if self.num_offered % 2**self.halvings == 0:
            self.add(at, step, epoch, values)
        self.num_offered += 1

    def add(self, at: float, step: float, epoch: float, values: Mapping[str, float | None]) -> None:
        """Adds a row."""
        named = {name[:MAX_NAME]: value for name, value in values.items()}
        for name in named:
            if name not in self.figures and len(self.figures) < MAX_NAMES:
                self.figures[name] = array("f", [nan] * len(self.at))
        # Each row has its time, step and epoch, so that the browser chooses what to draw over.
        self.at.append(at)
        self.step.append(step)
        self.epoch.append(epoch)
        for name, column in self.figures.items():
            column.append(_number(named.get(name)))
        if len(self.at) >= MAX_POINTS:
            self.halvings += 1
            self.at, self.step, self.epoch = self.at[1::2], self.step[1::2], self.epoch[1::2]
            self.figures = {name: column[1::2] for name, column in self.figures.items()}


@dataclass(slots=True)
class JobRecording:
    """The recording of one job."""

    moments: Table = field(default_factory=Table)
    """Figures about once a second, less often after halvings."""
    ranks: "dict[int, dict[str, array[float]]]" = field(default_factory=dict)
    """Further columns of `moments`, by rank."""
    epochs: Table = field(default_factory=Table)
    """Means of each epoch: the training loss and the user's scalars."""
    evaluations: Table = field(default_factory=Table)
    events: deque[JobEvent] = field(default_factory=lambda: deque(maxlen=MAX_EVENTS))
    last: JobView | None = None
    ended_at: float | None = None
    """Seconds since 1970."""
    num_batches: int = 0
    """Batches of all ranks in the complete epochs."""

    def copy(self, ranks: Iterable[int]) -> "JobRecording":
        """A copy with these ranks only, to be saved while recording goes on."""
        return replace(
            self,
            moments=self.moments.copy(),
            ranks={
                rank: {name: one[:] for name, one in self.ranks[rank].items()} for rank in ranks if rank in self.ranks
            },
            epochs=self.epochs.copy(),
            evaluations=self.evaluations.copy(),
            events=self.events.copy(),
        )

    @property
    def every_s(self) -> float:
        """Interval of `moments`, in seconds."""
        return 2.0**self.moments.halvings

    def add(self, view: JobView, now: float) -> None:
        """Adds the figures of a view, unless the last row is too recent."""
        at = self.moments.at
        # 0.9: views come a little early, too. A clock that is set back must not end the recording.
        if at and 0 <= now - at[-1] < 0.9 * self.every_s:
            return
        for rank in view.ranks:
            if rank.rank not in self.ranks:
                self.ranks[rank.rank] = {name: array("f", [nan] * len(at)) for name in RANK_FIGURES}
        halvings, step = self.moments.halvings, sum(rank.num_batches for rank in view.ranks)
        values = {name: figure(view) for name, figure in JOB_FIGURES.items()}
        self.moments.add(now, step, view.progress_fraction * view.num_epochs, values)
        known = {rank.rank: rank for rank in view.ranks}
        for number, columns in self.ranks.items():
            for name, rank_figure in RANK_FIGURES.items():
                columns[name].append(_number(rank_figure(known[number]) if number in known else None))
                if self.moments.halvings > halvings:
                    columns[name] = columns[name][1::2]

    def take_epoch(self, report: reports.EpochReport, now: float) -> None:
        """Adds the means of an epoch."""
        self.num_batches += sum(report.rank_batches)
        self.epochs.offer(now, self.num_batches, report.epoch + 1, {"loss": report.loss, **report.scalars})

    def take_evaluation(self, report: reports.EvaluationReport, now: float) -> None:
        """Adds the metrics of an evaluation."""
        self.evaluations.offer(now, self.num_batches, report.epoch + 1, report.metrics)


class Recorder:
    """The recordings of all jobs, from a view about once a second and every report."""

    def __init__(
        self, wall: Callable[[], float] = time.time, load: Callable[[str], JobRecording | None] = lambda _: None
    ) -> None:
        """`load` returns a previous coordinator's recording of a running job, if there is one."""
        self.jobs: dict[str, JobRecording] = {}
        self._ended: dict[str, None] = {}
        """Recordings of ended jobs in memory, in the order in which they were seen to have ended."""
        self._wall = wall
        self._load = load
        self._num_events = 0

    def take_views(self, views: list[JobView]) -> None:
        """Records all jobs as they are now."""
        now = self._wall()
        for view in views:
            if view.ended_s is not None and view.job_id not in self.jobs:
                continue  # it was dropped
            recording = self._recording(view.job_id)
            if recording.last is view and (view.state == "queued" or view.ended_s is not None):
                continue  # as before: the core keeps such views
            for kind, text in _differences(recording.last, view):
                self._note(recording, kind, text)
            has_ended = recording.last is not None and recording.last.ended_s is not None
            recording.last = view
            if view.ended_s is not None:
                self._ended.setdefault(view.job_id)
            if view.ended_s is not None and recording.ended_at is None:
                recording.ended_at = now
            if (view.num_epochs or view.state in ("training", "waiting", "paused")) and not has_ended:
                recording.add(view, now)

    def take_report(self, job_id: str, report: reports.Report) -> None:
        """Records a report."""
        if isinstance(report, reports.RoundReport):
            return  # there are too many to read
        recording = self._recording(job_id)
        if isinstance(report, reports.EpochReport):
            recording.take_epoch(report, self._wall())
        elif isinstance(report, reports.EvaluationReport):
            recording.take_evaluation(report, self._wall())
        limit = MAX_STACKS if isinstance(report, reports.StallReport) else MAX_TEXT
        self._note(recording, _kind(report), describe_report(report), limit)

    def _recording(self, job_id: str) -> JobRecording:
        if job_id not in self.jobs:
            self.jobs[job_id] = self._before(job_id) or JobRecording()
            while len(self.jobs) > MAX_JOBS and self._ended:
                name = next(iter(self._ended))
                del self._ended[name], self.jobs[name]
        return self.jobs[job_id]

    def _before(self, job_id: str) -> JobRecording | None:
        recording = self._load(job_id)
        if recording is not None:
            recording.ended_at = None
            self._num_events = max([self._num_events, *(event.number for event in recording.events)])
            self._note(recording, "state", "the coordinator was started again")
        return recording

    def _note(self, recording: JobRecording, kind: str, text: str, limit: int = MAX_TEXT) -> None:
        self._num_events += 1
        recording.events.append(JobEvent(self._num_events, self._wall(), kind, text[:limit]))


def _kind(report: reports.Report) -> str:
    match report:
        case reports.JobResult() if report.error:
            return "error"
        case reports.MembershipReport() if report.is_back:
            return "state"
        case _:
            return KINDS[type(report)]


def _number(value: float | None) -> float:
    """The value for a column of 32-bit floats; NaN when it is beyond their range."""
    return nan if value is None or not abs(value) < 3e38 else value


def _differences(before: JobView | None, now: JobView) -> Iterator[tuple[str, str]]:
    """Events (kind, text) for changes between two views that have no report. The end of a job has one with the reason,
    so a stopping job gets no reason here.
    """
    is_over = now.ended_s is not None or now.state == "stopping"
    if (before is None or before.state != now.state) and now.ended_s is None:
        tells = not is_over and now.reason not in ("trains", now.state)
        yield "state", f"{now.state}: {now.reason}" if tells else now.state
    if before is None:
        return
    if now.num_given_up > before.num_given_up:
        yield "warning", now.pacing if "given up" in now.pacing else "a round was given up and repeated"
    if now.num_checkpoint_failures > before.num_checkpoint_failures:
        yield "warning", "a checkpoint could not be written; training goes on"
    if now.anchor != before.anchor and before.anchor:
        yield "pacing", f"anchor {before.anchor} → {now.anchor} batches of the slowest rank: {now.pacing}"
    yield from _differences_of_ranks(before, now)


def _differences_of_ranks(before: JobView, now: JobView) -> Iterator[tuple[str, str]]:
    known = {rank.rank: rank for rank in before.ranks}
    for rank in now.ranks:
        old = known.get(rank.rank)
        if old is None:
            continue
        if rank.callback_errors > old.callback_errors:
            yield "warning", f"a callback has raised on rank {rank.rank}; see its log"

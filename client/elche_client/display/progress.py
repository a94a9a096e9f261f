"""Shows a job's events as they arrive: a live panel on a terminal, lines of text elsewhere, or lines of JSON."""

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Self, assert_never

from rich.console import Console
from rich.live import Live
from rich.text import Text

from elche.formatting import duration, membership_text, stall_text
from elche_client.display import kubeflow
from elche_client.display.formatting import figure, printable, quantity, si
from elche_client.display.kubeflow import Reporter
from elche_client.display.notices import notices_above
from elche_client.display.panel import job_panel
from elche_client.display.record import event_document, to_json
from elche_client.events import (
    EVENT_NAMES,
    Checkpoint,
    EpochReport,
    EvaluationReport,
    Event,
    JobResult,
    JobState,
    JobView,
    MembershipReport,
    RoundReport,
    StallReport,
    UserEvent,
)
from elche_client.transport.rank_output import RankOutput

ECHOED = len("^C^C")
"""Columns left free beside the panel for the terminal's echo of Ctrl-C: on a new line it would move the panel, and
leave its old border behind.
"""
MIN_WIDTH = 20


class ProgressDisplay(ABC):
    """Shows a job's events and the output of its ranks, inside its context."""

    @abstractmethod
    def show(self, event: Event) -> None:
        """Shows an event."""

    @abstractmethod
    def write(self, printed: RankOutput) -> None:
        """Shows what a rank has printed."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:  # noqa: B027  # most displays have nothing to end
        pass


def make_progress(*, on_stderr: bool, as_events: bool = False) -> ProgressDisplay:
    """The display of this process; in a pod of Kubeflow's trainer it also reports to that."""
    shown = _shown(on_stderr=on_stderr, as_events=as_events)
    return Told(shown, Reporter()) if kubeflow.URL in os.environ else shown


def _shown(*, on_stderr: bool, as_events: bool) -> ProgressDisplay:
    if as_events:
        return EventLines()
    console = Console(stderr=on_stderr, highlight=False)
    stream = sys.stderr if on_stderr else sys.stdout
    if stream.isatty() and os.environ.get("TERM") != "dumb":
        return LiveProgress(console)
    return LineProgress(console)


class Told(ProgressDisplay):
    """Wraps a display, and reports events to Kubeflow."""

    def __init__(self, shown: ProgressDisplay, reporter: Reporter) -> None:
        self._shown = shown
        self._reporter = reporter

    def show(self, event: Event) -> None:
        self._reporter.note(event)
        self._shown.show(event)

    def write(self, printed: RankOutput) -> None:
        self._shown.write(printed)

    def __enter__(self) -> Self:
        self._shown.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._shown.__exit__(*error)
        self._reporter.close()


class LiveProgress(ProgressDisplay):
    """Redraws the job's panel in place; a line per finished epoch scrolls away above it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False)
        self._lines = ReportLines()
        self._notices = notices_above(self._print)

    def __enter__(self) -> Self:
        self._live.start()
        self._notices.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._notices.__exit__(*error)
        self._live.stop()

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False)

    def show(self, event: Event) -> None:
        line = self._lines.describe(event)
        if isinstance(event, JobView):
            self._live.transient = event.state is JobState.SUCCEEDED  # the summary replaces the panel
            width = max(MIN_WIDTH, self._console.width - ECHOED)
            self._live.update(job_panel(event, width=width), refresh=True)
        elif line:
            self._print(line)

    def write(self, printed: RankOutput) -> None:
        lines = (Text.assemble((f"{who} | ", "dim"), line) for who, line in printed_lines(printed))
        self._console.print(Text("\n").join(lines))


class LineProgress(ProgressDisplay):
    """Prints a line when the job's state changes, an epoch ends or an evaluation is done."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._lines = ReportLines()
        self._states: dict[str, tuple[JobState, str]] = {}
        """By job: the state that was printed last."""

    def show(self, event: Event) -> None:
        line = self._lines.describe(event)
        if isinstance(event, JobView):
            line = self._describe_change(event)
        if line:
            self._console.print(line, markup=False, soft_wrap=True)

    def write(self, printed: RankOutput) -> None:
        self._console.print(printed_text(printed), markup=False, soft_wrap=True)

    def _describe_change(self, view: JobView) -> str:
        reason = printable(view.reason) if view.state in (JobState.QUEUED, JobState.STARTING) else ""
        before = self._states.get(view.job_id)
        if before == (view.state, reason):
            return ""
        self._states[view.job_id] = (view.state, reason)
        if view.state is JobState.STARTING and not (before and before[0] is JobState.STARTING):
            reason = ""  # a start is expected to go on; what is said later is news, such as that orders do not arrive
        return f"{printable(view.name)}: {view.state}" + (f", {reason}" if reason else "")


class EventLines(ProgressDisplay):
    """Prints every event except the result as one line of JSON on stdout; the output of ranks goes to stderr."""

    def show(self, event: Event) -> None:
        if not isinstance(event, JobResult):
            sys.stdout.write(to_json({"event": EVENT_NAMES[type(event)], **event_document(event)}) + "\n")
            sys.stdout.flush()

    def write(self, printed: RankOutput) -> None:
        sys.stderr.write(printed_text(printed) + "\n")
        sys.stderr.flush()


def printed_lines(printed: RankOutput) -> list[tuple[str, str]]:
    """Pairs (rank, line) without terminal control codes; the first one counts the lines that were dropped."""
    who = f"rank {printable(printed.rank)}"
    dropped = [(who, f"({quantity(printed.num_dropped, 'lines')} dropped)")] if printed.num_dropped else []
    return [*dropped, *((who, printable(line.expandtabs(4))) for line in printed.lines)]


def printed_text(printed: RankOutput) -> str:
    """The output of a rank as text, each line with its rank."""
    return "\n".join(f"{who} | {line}" for who, line in printed_lines(printed))


class ReportLines:
    """One line of text per report. The number of epochs is taken from the views in between."""

    def __init__(self) -> None:
        self._num_epochs = 0
        self._last_reported = 0
        """The attempt whose last model was reported. Epochs that end in one round share its evaluation."""

    def describe(self, event: Event) -> str:
        """The event's line; "" if it has none."""
        match event:
            case JobView():
                self._num_epochs = event.num_epochs or self._num_epochs
                return ""
            case EpochReport():
                speed = event.committed / event.duration_s if event.duration_s else 0.0
                facts = [] if event.loss is None else [f"loss {figure(event.loss)}"]
                facts += _named(event.scalars)
                facts += [quantity(speed, "samples/s")] if speed else []
                return self._line(event.epoch, [*facts, duration(event.duration_s)])
            case EvaluationReport():
                if event.is_final and event.attempt == self._last_reported:
                    return ""
                if event.is_final:
                    self._last_reported = event.attempt
                    return "  ".join(["the last model", *_named(event.metrics)])
                return self._line(event.epoch, ["evaluated", *_named(event.metrics)])
            case StallReport():
                return _stall_line(event)
            case MembershipReport():
                return printable(membership_text(event.text, event.num_ranks))
            case Checkpoint():
                size = f"{si(event.size_bytes)}B in {duration(event.duration_s)}"
                return f"checkpoint {printable(event.path)}  {size}"
            case UserEvent():
                dropped = f"  ({event.num_dropped} events before it were dropped)" if event.num_dropped else ""
                return f"rank {event.rank}: {printable(event.text)}{dropped}"
            case RoundReport() | JobResult():
                return ""
            case _:
                assert_never(event)

    def _line(self, epoch: int, facts: list[str]) -> str:
        total = f"/{self._num_epochs}" if self._num_epochs else ""
        return "  ".join([f"epoch {epoch + 1}{total}", *facts])


def _stall_line(event: StallReport) -> str:
    text = printable(stall_text(event))
    stacks = "".join(f"\n  {printable(line)}" for line in event.stacks.splitlines())
    return f"{text}; its threads:{stacks}" if stacks else text


def _named(values: Mapping[str, float]) -> list[str]:
    return [f"{printable(name)} {figure(value)}" for name, value in values.items()]

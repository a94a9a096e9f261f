"""The live panel of a job: pure functions from a `JobView` to rich objects."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, OverflowMethod, RenderResult
from rich.measure import Measurement
from rich.panel import Panel
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from elche.formatting import duration
from elche_client.display.formatting import figure, percent, printable, quantity, si
from elche_client.events import JobState, JobView, RankView

MAX_RANKS = 16
WIDE = 100
"""Terminal columns from which each rank has a bar of its round."""

STATE_STYLES = {
    JobState.TRAINING: "bold green",
    JobState.FINISHING: "bold green",
    JobState.SUCCEEDED: "bold green",
    JobState.FAILED: "bold red",
    JobState.CANCELLED: "bold yellow",
}
RANK_STYLES = {"training": "green", "averaging": "cyan", "starting": "yellow", "stalled": "red"}


@dataclass(frozen=True, slots=True)
class Bar:
    """A progress bar of two parts: committed, and processed but not committed yet."""

    committed: float
    """Fraction, from 0 to 1."""
    processed: float
    """Fraction, from 0 to 1; includes the committed part."""
    width: int | None = None
    """Columns; None: all there are."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(self.width or options.max_width, options.max_width)
        solid = round(width * _within(self.committed))
        light = max(round(width * _within(self.processed)) - solid, 0)
        full, faint, rest = "#=-" if options.ascii_only else "━━─"
        yield Segment(full * solid, Style(color="green"))
        yield Segment(faint * light, Style(color="yellow"))
        yield Segment(rest * (width - solid - light), Style(dim=True))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(self.width or 8, self.width or options.max_width)


def job_panel(view: JobView, *, width: int) -> Panel:
    """The panel of a job, for a terminal of `width` columns."""
    parts: list[Table | Text] = [epoch_line(view), figures_line(view)]
    waits = view.state in (JobState.QUEUED, JobState.FINISHING)  # no round is planned: shows only the reason
    if why := view.reason if waits else view.pacing or view.reason:
        overflow: OverflowMethod = "fold" if waits else "ellipsis"
        parts.append(Text(printable(why), style="dim", no_wrap=not waits, overflow=overflow))
    if view.ranks:
        parts += [Text(), rank_table(view.ranks[:MAX_RANKS], wide=width >= WIDE)]
    if len(view.ranks) > MAX_RANKS:
        parts.append(Text(f"and {len(view.ranks) - MAX_RANKS} more ranks", style="dim"))
    averages = f"  averages by {printable(view.backend)}" if view.backend else ""
    return Panel(
        Group(*parts),
        title=job_title(view.name, view.state),
        title_align="left",
        subtitle=Text(f"job {printable(view.job_id)}{averages}", style="dim"),
        subtitle_align="right",
        border_style="dim",
        width=width,
    )


def job_title(name: str, state: JobState) -> Text:
    style = STATE_STYLES.get(state, "yellow")
    return Text.assemble((printable(name), "bold not dim"), "  ", (state, f"{style} not dim"))


def epoch_line(view: JobView) -> Table | Text:
    if not view.dataset_size or not view.num_epochs:
        return Text("waiting for the ranks to load the file" if view.ranks else "waiting for ranks", style="yellow")
    line = Table.grid(padding=(0, 2), expand=True)
    for column in ("left", "bar", "percent", "samples"):
        line.add_column(ratio=1 if column == "bar" else None, no_wrap=True)
    committed = view.epoch_committed / view.dataset_size
    processed = view.epoch_processed / view.dataset_size
    samples = f"{si(view.epoch_committed)} of {quantity(view.dataset_size, 'samples')}"
    epoch = f"epoch {min(view.epoch + 1, view.num_epochs)}/{view.num_epochs}"
    line.add_row(Text(epoch, style="bold"), Bar(committed, processed), percent(_within(processed)), samples)
    return line


def figures_line(view: JobView) -> Text:
    """Training loss, speed, rounds, anchor and remaining time."""
    rounds = "1 round" if view.num_rounds == 1 else quantity(view.num_rounds, "rounds")
    figures = [
        ("loss ", figure(view.loss) if view.loss is not None else "-"),
        ("", quantity(view.samples_per_s, "samples/s")),
        ("", rounds),
        ("anchor ", str(view.anchor) if view.anchor else "-"),
        ("ETA ", duration(view.eta_s) if view.eta_s is not None else "-"),
    ]
    parts = [Text.assemble((label, "dim"), (value, "bold")) for label, value in figures]
    return Text("   ").join(parts)


def rank_table(ranks: Sequence[RankView], *, wide: bool) -> Table:
    """One row per rank; `wide` adds a bar of its batches in the open round."""
    table = Table(box=None, padding=(0, 1), pad_edge=False, expand=wide, header_style="dim")
    several_hosts = len({rank.host for rank in ranks}) > 1
    for title, justify in _columns(wide=wide, several_hosts=several_hosts):
        is_text = title in ("device", "host")
        table.add_column(
            title,
            justify="right" if justify == ">" else "left",
            no_wrap=True,
            overflow="ellipsis",
            ratio=1 if title == "" else None,
            min_width=6 if is_text else None,
            max_width=28 if is_text else None,
        )
    for rank in ranks:
        table.add_row(*_row(rank, wide=wide, several_hosts=several_hosts))
    return table


def _columns(*, wide: bool, several_hosts: bool) -> list[tuple[str, str]]:
    columns = [("rank", ">"), ("device", "<"), ("state", "<"), ("ms/batch", ">"), ("batches", ">")]
    columns += [("", "<")] if wide else []
    columns += [("share", ">"), ("waited", ">")]
    return [columns[0], ("host", "<"), *columns[1:]] if several_hosts else columns


def _row(rank: RankView, *, wide: bool, several_hosts: bool) -> list[Text | Bar]:
    done = rank.round_batches / rank.round_target if rank.round_target else 0.0
    cells: list[Text | Bar] = [Text(str(rank.rank))]
    cells += [Text(printable(rank.host))] if several_hosts else []
    cells += [
        Text(printable(rank.device)),
        Text(printable(rank.state), style=RANK_STYLES.get(rank.state, "")),
        Text(f"{rank.ms_per_batch:.1f}" if rank.ms_per_batch else "-"),
        Text(f"{rank.round_batches}/{rank.round_target}" if rank.round_target else str(rank.round_batches)),
    ]
    cells += [Bar(0.0, done)] if wide else []
    return [*cells, Text(percent(rank.share_fraction)), Text(duration(rank.waited_s))]


def _within(fraction: float) -> float:
    return min(max(fraction, 0.0), 1.0) if fraction == fraction else 0.0

"""The summary of a job that has ended, and tables of jobs and checkpoints: pure functions that return rich objects."""

import math
from collections.abc import Sequence
from datetime import UTC, datetime

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from elche.evaluation import never_finite
from elche.formatting import duration
from elche_client.display.formatting import figure, percent, printable, quantity, si
from elche_client.display.panel import MAX_RANKS, STATE_STYLES, job_title
from elche_client.events import Checkpoint, HostView, JobResult, JobState, JobView, RankResult

MIN_NAME = 12
"""Least columns for names that a user has to type, which are folded and never cut."""

FEW_BATCHES = 1000
"""Batches of a rank below which three and more ranks may cost much accuracy (docs/convergence.md: 12 % with 500)."""

SHORT = (
    f"under {FEW_BATCHES} a rank, so that one device may reach a better model; "
    "rounds of --averaging blocking --anchor 1 --overhead-target 0.5 may lose less, in more time"
)
"""The remark on such a training in the summary."""

PIPE_WIDTH = 400
"""Columns of a table that is not printed on a terminal: enough that no id or path is cut."""


def plain_table() -> Table:
    """A table without lines, and without columns so far."""
    return Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim")


def wide_console() -> Console:
    """The console of standard output; if that is not a terminal, so wide that nothing is cut."""
    console = Console(highlight=False)
    if not console.file.isatty():
        console.width = PIPE_WIDTH
    return console


def summary_panel(
    result: JobResult, *, name: str, record: str = "", artifacts: str = "", width: int | None = None
) -> Panel:
    """The results of a job and the paths of its files. `artifacts`: where they are stored, or why not. `width` None: as
    wide as the content.
    """
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(overflow="fold")
    metrics = {printable(name) for name in (result.best_metrics if is_best(result) else result.metrics)}
    facts_of_job = _facts(result, record)
    facts_of_job += [("artifacts", artifacts)] if artifacts else []
    facts_of_job += [("few batches", SHORT)] if is_short(result) else []
    for label, value in facts_of_job:
        facts.add_row(label, Text(printable(value), style="bold" if label in metrics else ""))
    parts: list[Table | Text] = [facts]
    if result.ranks:
        parts += [Text(), ranks_table(result.ranks[:MAX_RANKS])]
    if len(result.ranks) > MAX_RANKS:
        parts.append(Text(f"and {len(result.ranks) - MAX_RANKS} more ranks", style="dim"))
    border = "green" if result.state is JobState.SUCCEEDED else "yellow"
    return Panel(
        Group(*parts),
        title=job_title(name, result.state),
        title_align="left",
        border_style=border,
        width=width,
        expand=width is not None,
    )


def _facts(result: JobResult, record: str) -> list[tuple[str, str]]:
    saved = result.best_metrics if is_best(result) else result.metrics
    facts = [(printable(name), figure(value)) for name, value in saved.items()]
    if result.samples_per_s:
        facts.append(("speed", quantity(result.samples_per_s, "samples/s")))
    if result.bound_samples_per_s:
        bound = f"{quantity(result.bound_samples_per_s, 'samples/s')} without any communication"
        facts += [("bound", bound), ("of the bound", percent(result.bound_fraction))]
    epochs = f"{result.epochs} of {quantity(result.dataset_size, 'samples')}, {si(result.rounds)} rounds"
    facts += [("epochs", epochs)] if result.dataset_size else [("rounds", si(result.rounds))]
    part = _part_trained(result)
    own = f", {quantity(sum(rank.samples for rank in result.ranks), 'samples')} since a checkpoint" if part < 1 else ""
    facts += [("duration", duration(result.duration_s) + own)]
    dropped = sum(result.dropped_samples)
    facts += [("dropped", f"{quantity(dropped, 'samples')} by drop_last")] if dropped else []
    discarded = result.discarded_samples
    facts += [("discarded", f"{quantity(discarded, 'samples')} whose values were left out")] if discarded else []
    facts += [("ended early", result.ended_early)] if result.ended_early else []
    odd = never_finite(result.metrics)
    facts += [("metrics", odd)] if odd else []
    facts += [("model", result.model)] if result.model else []
    facts += [("the model is", which_model(result))] if result.model_is and result.best_epoch is not None else []
    facts += [("not the best", result.best_problem)] if result.best_problem else []
    facts += [("checkpoint", result.checkpoints[-1].path)] if result.checkpoints else []
    facts += [("the best", one.path) for one in result.checkpoints if one.is_best]
    return [*facts, ("record", record)] if record else facts


def is_short(result: JobResult) -> bool:
    """True if three or more ranks have trained so few batches each that averaging may have cost much accuracy. Before
    the checkpoint at which they began they had as many per sample.
    """
    batches = [rank.batches for rank in result.ranks]
    return (
        bool(result.metrics) and len(batches) > 2 and sum(batches) / len(batches) < FEW_BATCHES * _part_trained(result)
    )


def _part_trained(result: JobResult) -> float:
    """The fraction of the samples that the ranks have trained since they began: below 1 if that was at a checkpoint.
    Of a loop, which has no bound, it is not known: what a rank has trained that died is not all reported.
    """
    own, committed = sum(rank.samples for rank in result.ranks), sum(result.committed_samples)
    return own / committed if result.bound_samples_per_s and 0 < own < committed else 1.0


def is_best(result: JobResult) -> bool:
    """True if the saved model is the best one, not the last."""
    return result.model_is not in ("", "last")


def which_model(result: JobResult) -> str:
    """Describes the saved model, with the metrics of the best and the last one."""
    best, last = (
        ", ".join(f"{printable(name)} {figure(value)}" for name, value in metrics.items())
        for metrics in (result.best_metrics, result.metrics)
    )
    if is_best(result):
        return f"{result.model_is}, {best}; last: {last}"
    return f"last, {last}; best of epoch {result.best_epoch}: {best}"


def _epoch(view: JobView) -> int:
    """The epoch in progress, from 1; for an ended job the number of complete ones."""
    is_last = view.state is JobState.SUCCEEDED and view.epoch + 1 >= view.num_epochs
    is_complete = is_last or 0 < view.dataset_size <= view.epoch_committed
    return min(view.epoch + (1 if is_complete or not view.state.has_ended else 0), view.num_epochs)


def ranks_table(ranks: Sequence[RankResult]) -> Table:
    table = plain_table()
    for title in ("rank", "device", "batches", "share", "ms/batch", "waited"):
        table.add_column(title, justify="left" if title == "device" else "right", no_wrap=True, overflow="ellipsis")
    samples = sum(rank.samples for rank in ranks)
    total = samples or sum(rank.batches for rank in ranks)
    for number, rank in enumerate(ranks):
        share = percent((rank.samples if samples else rank.batches) / total) if total else "-"
        cells = (str(number), printable(rank.device), str(rank.batches), share, f"{rank.ms_per_batch:.1f}")
        table.add_row(*(Text(cell) for cell in cells), Text(duration(rank.waited_s)))
    return table


def checkpoints_table(checkpoints: Sequence[Checkpoint]) -> Table:
    table = plain_table()
    for title in ("version", "epochs", "batches", "size", "", "metrics", "checkpoint"):
        is_text = title in ("", "metrics", "checkpoint")
        table.add_column(title, justify="left" if is_text else "right", overflow="fold" if is_text else "ellipsis")
    for one in checkpoints:
        metrics = ", ".join(f"{printable(name)} {figure(value)}" for name, value in one.metrics.items())
        size = f"{si(one.size_bytes)}B"
        counts = (str(one.version), str(one.epoch), str(one.global_step), size)
        cells = (*counts, "best" if one.is_best else "", metrics or "-", printable(one.path))
        table.add_row(*(Text(cell, style="green" if one.is_best else "") for cell in cells))
    return table


def jobs_table(views: Sequence[JobView], now: datetime | None = None) -> Table:
    """A row for each job, with its id, which begins with the name and is never cut."""
    now = now or datetime.now(UTC)
    table = plain_table()
    table.add_column("job", overflow="fold", min_width=MIN_NAME)
    for title in ("state", "epoch", "train loss", "samples/s", "ranks", "age"):
        table.add_column(title, justify="left" if title == "state" else "right", no_wrap=True)
    for view in views:
        age_s = max(0.0, (now - view.submitted_at).total_seconds()) if view.submitted_at else math.nan
        table.add_row(
            Text(printable(view.job_id)),
            Text(view.state, style=STATE_STYLES.get(view.state, "yellow")),
            Text(f"{_epoch(view)}/{view.num_epochs}" if view.num_epochs else "-"),
            Text(figure(view.loss) if view.loss is not None else "-"),
            Text(si(view.samples_per_s) if view.samples_per_s else "-"),
            Text(str(view.num_ranks)),
            Text(duration(age_s)),
        )
    return table


SAY_WHY = (JobState.QUEUED, JobState.STARTING, JobState.WAITING, JobState.FINISHING)


def says_why(view: JobView) -> bool:
    """True for a job whose reason is news: one that waits, starts, is stalled, or writes its final model."""
    is_stalled = any(rank.stalled_s for rank in view.ranks) and not view.state.has_ended
    return bool(view.reason) and (is_stalled or view.state in SAY_WHY)


def host_problems(hosts: Sequence[HostView]) -> list[str]:
    """A line for each host that can start no ranks."""
    return [printable(f"{host.host}: can start no ranks: {host.problem}") for host in hosts if host.problem]


def hosts_table(hosts: Sequence[HostView]) -> Table:
    table = plain_table()
    for title in ("host", "device", "model", "memory", "job", "rank"):
        folds = title in ("host", "job")  # users have to type these
        is_number = title in ("memory", "rank")
        table.add_column(
            title,
            justify="right" if is_number else "left",
            no_wrap=not folds,
            overflow="fold" if folds else "ellipsis",
        )
    for host in hosts:
        for index, slot in enumerate(host.slots):
            free = "drained" if host.is_drained else "unfit" if host.problem else "free"
            table.add_row(
                Text(printable(host.host) if index == 0 else ""),
                Text(printable(slot.device)),
                Text(printable(slot.model)),
                Text(f"{slot.memory_bytes / 2**30:.3g} GiB" if slot.memory_bytes else ""),
                Text(printable(slot.job_id)) if slot.job_id else Text(free, style="dim"),
                Text(str(slot.rank) if slot.job_id else ""),
            )
        if host.labels:
            labels = ", ".join(f"{name}={value}" for name, value in sorted(host.labels.items()))
            table.add_row(Text(f"  {printable(labels)}", style="dim"))
    return table

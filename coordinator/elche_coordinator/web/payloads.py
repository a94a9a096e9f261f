"""The JSON values that the page receives, with lists and texts limited to what people can read."""

import json
import shlex
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from math import isfinite
from typing import Any, TypeVar

from elche.settings import SETTINGS
from elche_coordinator.core.describe import JobDetails, JobView, RankView
from elche_coordinator.core.messages.reports import Checkpoint
from elche_coordinator.core.messages.spec import JobSpec
from elche_coordinator.core.records.fleet import HostView
from elche_coordinator.job_states import ENDED
from elche_coordinator.web.recorder import (
    MAX_NAME,
    MAX_NAMES,
    RANK_FIGURES,
    STALLED,
    JobRecording,
    Table,
)

MAX_CHARTED = 12
"""Ranks with lines in a chart; of more, the fastest and the slowest."""
MAX_ROWS = 100
"""Ranks in the table; of more, the slowest ones."""
PER_PAGE = 25
"""Jobs or hosts on one page of a list."""
MAX_SLOTS = 16
"""Slots that are shown of one host."""
MAX_CHECKPOINTS = 20
"""Newest checkpoints that are shown."""
MAX_TEXT = 1000
"""Longest text that is shown, in characters."""
MAX_TRACEBACK = 16_000
"""Longest traceback that is shown, in characters."""
SAVED_FIELDS = (
    *("ranks", "loss", "samples_per_s", "anchor", "pacing", "policy", "averaging", "overhead", "round_s"),
    *("averaging_s", "discarded", "spread", "num_ranks_hidden", "table", "epoch", "epochs", "progress", "queue_wait_s"),
    *("ran_s", "settings", "metrics"),
)
"""Values of an ended job of an earlier run that only its saved recording has."""

Item = TypeVar("Item")


# Lists, filtered and paged here so that messages stay small.


@dataclass(frozen=True, slots=True)
class ListQuery:
    """Filter and page of a list."""

    text: str = ""
    """Part of the name, id or reason, in any case."""
    state: str = ""
    """One of `ENDED`, or "open" for jobs that have not ended; empty: all."""
    page: int = 0


def jobs(
    views: Sequence[JobView], wanted: ListQuery, now: Callable[[JobView], JobView] = lambda view: view
) -> dict[str, Any]:
    """One page of the jobs, newest first; views are oldest first, and `now` rebuilds those that are shown."""
    text = wanted.text.lower()
    found = [view for view in reversed(views) if not text or text in _searched(view)]
    counts = Counter(view.state if view.state in ENDED else "open" for view in found)
    chosen = [view for view in found if wanted.state in ("", view.state if view.state in ENDED else "open")]
    return {
        **_page([summary(now(view)) for view in _part(chosen, wanted.page)], len(chosen), wanted.page),
        "counts": {state: counts[state] for state in ("open", *ENDED)},
        "num_training": sum(view.state == "training" for view in views),
        "num_all": len(views),
    }


def hosts(views: Sequence[HostView], wanted: ListQuery) -> dict[str, Any]:
    """One page of the hosts."""
    text = wanted.text.lower()
    found = [view for view in views if text in f"{view.host} {view.agent_id}".lower()]
    names = Counter(view.host for view in views)
    shown = [{**_host(view), "is_namesake": names[view.host] > 1} for view in _part(found, wanted.page)]
    return {
        **_page(shown, len(found), wanted.page),
        "num_all": len(views),
        "num_slots": sum(len(view.slots) for view in views),
        "num_busy": sum(len(view.ranks) for view in views),
    }


def _searched(view: JobView) -> str:
    return f"{view.job_id[:MAX_NAME]} {view.name[:MAX_NAME]} {view.reason[:MAX_TEXT]}".lower()


def _part(items: Sequence[Item], page: int) -> Sequence[Item]:
    start = _clamped(page, len(items)) * PER_PAGE
    return items[start : start + PER_PAGE]


def _clamped(page: int, num: int) -> int:
    return max(0, min(page, (num - 1) // PER_PAGE))


def _page(items: list[dict[str, Any]], num: int, page: int) -> dict[str, Any]:
    return {"items": items, "num": num, "page": _clamped(page, num), "pages": max(1, -(-num // PER_PAGE))}


def _host(view: HostView) -> dict[str, Any]:
    return {
        "id": _cut(view.agent_id, MAX_NAME),
        "host": _cut(view.host, MAX_NAME),
        "num_slots": len(view.slots),
        "busy": len(view.ranks),
        "drained": view.is_drained,
        "problem": _cut(view.problem, MAX_TEXT),
        "slots": [
            {
                "device": _cut(f"{slot.device} {slot.model}".strip(), MAX_NAME),
                "job": _cut(view.ranks[index][0], MAX_NAME) if index in view.ranks else None,
                "rank": view.ranks[index][1] if index in view.ranks else None,
            }
            for index, slot in enumerate(view.slots[:MAX_SLOTS])
        ],
    }


# One job.


def summary(view: JobView) -> dict[str, Any]:
    """An entry of the list of jobs."""
    return {
        "id": _cut(view.job_id, MAX_NAME),
        "name": _cut(view.name, MAX_NAME),
        "state": _cut(view.state, MAX_NAME),
        "reason": _cut(view.reason, MAX_TEXT),
        "ranks": view.num_ranks,
        "epoch": view.epoch,
        "epochs": view.num_epochs,
        "progress": _finite(view.progress_fraction) or 0.0,
        "eta_s": _finite(view.eta_s),
        "submitted_at": _finite(view.submitted_at),
        "num_stalled": sum(rank.state == STALLED for rank in view.ranks),
    }


def detail(view: JobView) -> dict[str, Any]:
    """One job with its ranks, as it is now."""
    slowest_first = sorted(view.ranks, key=lambda rank: -rank.ms_per_batch / (rank.num_batches > 0 or 1e9))
    return {
        **summary(view),
        "loss": _finite(view.loss),
        "samples_per_s": _finite(view.samples_per_s),
        "anchor": view.anchor,
        "rounds": view.num_rounds,
        "pacing": _cut(view.pacing, MAX_TEXT),
        "policy": _cut(view.policy, MAX_NAME),
        "averaging": _cut(view.averaging, MAX_NAME),
        "overhead": _finite(view.overhead_fraction) if view.ranks else None,
        "round_s": _finite(view.round_s),
        "averaging_s": _finite(view.averaging_s),
        "metrics": _metrics(view.metrics),
        "checkpoints": [_checkpoint(one) for one in _shown_checkpoints(view.checkpoints)],
        "num_checkpoints": len(view.checkpoints),
        "discarded": view.discarded_samples,
        "spread": _spread(view),
        "num_ranks_hidden": max(0, len(view.ranks) - MAX_ROWS),
        "table": [_row(rank) for rank in sorted(slowest_first[:MAX_ROWS], key=lambda rank: rank.rank)],
        "ended": view.state in ENDED,
    }


def about(view: JobView, known: JobDetails | None, ended_at: float | None = None) -> dict[str, Any]:
    """The job's submission and outcome, which change seldom. `ended_at` is in seconds since 1970."""
    if known is None:
        return {}
    spec, result = known.spec, known.result
    return {
        "file": _cut(spec.file_name, MAX_TEXT),
        "command": _cut(command(spec), MAX_TEXT),
        "submitted_by": _cut(spec.submitted_by, MAX_NAME),
        "is_loop": spec.is_attached,
        "resume": _cut(spec.resume, MAX_TEXT),
        "asked_ranks": spec.num_ranks,
        "num_wanted": known.num_wanted,
        "settings": _settings(known),
        "given": [_cut(name, MAX_NAME) for name in list(spec.settings)[:MAX_NAMES]],
        "queue_wait_s": _finite(view.queue_wait_s),
        "ran_s": _finite(known.ran_s) if result else None,
        "ended_at": _finite(ended_at),
        "artifacts": _cut(view.artifacts, MAX_TEXT),
        "can_resume": bool(result and result.checkpoints and not spec.is_attached),
        **({} if result is None else _outcome(known)),
    }


def _outcome(known: JobDetails) -> dict[str, Any]:
    result = known.result
    assert result is not None
    best = next((one for one in reversed(result.checkpoints) if one.is_best), None)
    best_epoch = (
        best.epoch if best else result.best_epoch
    )  # the best model may be the last one, which need not be a checkpoint
    return {
        "outcome": str(result.outcome),
        "error": _cut(result.error, MAX_TEXT),
        "traceback": result.traceback[-MAX_TRACEBACK:],
        "failed_rank": result.failed_rank,
        "model": _cut(result.model, MAX_TEXT),
        "model_is": _cut(result.model_is, MAX_TEXT),
        "best_problem": _cut(result.best_problem, MAX_TEXT),
        "ended_early": _cut(result.ended_early, MAX_TEXT),
        "trained_s": _finite(result.duration_s),
        "rate": _finite(result.samples_per_s),
        "final": _metrics(result.metrics),
        "monitor": _cut(known.settings.monitor or "", MAX_NAME) if known.settings else "",
        "best": None
        if best_epoch is None
        else {
            "epoch": best_epoch,
            "path": _cut(best.path, MAX_TEXT) if best else "",
            "metrics": _metrics(best.metrics if best else result.best_metrics),
        },
    }


def with_saved(shown: dict[str, Any], kept: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a job of an earlier run, completed by those that were saved at its end."""
    table = kept.get("table")
    fits = isinstance(table, list) and all(isinstance(row, dict) and row.keys() >= _ROW for row in table)
    if not fits:
        return shown
    gone = [{**row, "state": "exited", "stalled_s": None} for row in kept["table"]]
    return {**shown, **{name: {**kept, "table": gone}[name] for name in SAVED_FIELDS if name in kept and name in shown}}


def command(spec: JobSpec) -> str:
    """The command line that submits the same job again; empty for an attached loop."""
    if spec.is_attached:
        return ""
    words = ["elche", "submit", *(["--module", spec.module] if spec.module else [spec.file_name])]
    least = f"{spec.min_ranks}.." if spec.min_ranks else ""
    words += ["--ranks", f"{least}{spec.num_ranks}"] if spec.num_ranks else []
    for rank, factor in sorted(spec.slow_factors.items()):
        words += ["--slow", f"{rank}={factor:g}"]
    words += ["--verify"] if spec.verify_rounds else []
    words += ["--folder", "."] if "/" in spec.file_name and spec.bundle else []
    words += ["--priority", str(spec.priority)] if spec.priority else []
    words += ["--project", spec.project] if spec.project else []
    words += ["--artifacts", spec.artifacts] if spec.artifacts else []
    words += [word for one in spec.conditions for word in ("--on", one)]
    words += [word for one in spec.secrets for word in ("--secret", one)]
    words += ["--requirements", "requirements.txt"] if spec.requirements else []
    for name, text in sorted(spec.settings.items()):
        words += [f"--{name.replace('_', '-')}", _option(name, text)]
    # Without the values, which may be secret: the command takes them from its environment.
    words += [word for name in spec.environment for word in ("--env", name)]
    return shlex.join([*words, *(["--", *spec.arguments] if spec.arguments else [])])


def _option(name: str, text: str) -> str:
    """A setting's JSON value in the form of the command line."""
    try:
        shown = SETTINGS[name].unparse(json.loads(text))
    except (KeyError, ValueError):  # asked for of another version
        return text
    return text if shown is None else shown


def _settings(known: JobDetails) -> dict[str, str]:
    """The settings in use; before the ranks have reported them, those of the submission."""
    if known.settings is None:
        return {
            _cut(name, MAX_NAME): _cut(_option(name, text), MAX_NAME)
            for name, text in list(known.spec.settings.items())[:MAX_NAMES]
        }
    left_out = ("layout_hash", "shard_sizes", "wants_metrics", "keeps_state", "has_evaluation", "averaging_options")
    names = [field.name for field in fields(known.settings) if field.name not in left_out]
    values = {name: getattr(known.settings, name) for name in names}  # not `asdict`, which copies a million shards
    return {name: _cut("none" if value is None else str(value), MAX_NAME) for name, value in values.items()}


# Figures over time.


@dataclass(slots=True)
class Cursor:
    """The part of a table that a page has received."""

    columns: tuple[object, ...] = ()
    num_rows: int = 0


def rows(table: Table, cursor: Cursor, more: "Mapping[str, array[float]] | None" = None) -> dict[str, Any] | None:
    """Rows that are new to the page, or all if the table was halved or has new columns; None if there are none."""
    figures = {**table.figures, **(more or {})}
    columns = (table.halvings, *figures)
    start = cursor.num_rows if columns == cursor.columns else 0
    if columns == cursor.columns and start == len(table.at):
        return None
    cursor.columns, cursor.num_rows = columns, len(table.at)
    return {
        "is_whole": start == 0,
        "at": [round(at, 2) for at in table.at[start:]],
        "step": list(table.step[start:]),
        "epoch": [round(epoch, 5) for epoch in table.epoch[start:]],
        "figures": {
            name: [float(f"{value:.5g}") if isfinite(value) else None for value in column[start:]]
            for name, column in figures.items()
        },
    }


def series(recording: JobRecording) -> dict[str, Any]:
    """All figures of a job without those of its ranks, for comparison with another job."""
    tables = {"moments": recording.moments, "epochs": recording.epochs, "evaluations": recording.evaluations}
    return {name: rows(table, Cursor()) for name, table in tables.items()}


def rank_columns(recording: JobRecording, ranks: Iterable[int]) -> "dict[str, array[float]]":
    """The columns of some ranks, each named `FIGURE@RANK`."""
    known = [rank for rank in ranks if rank in recording.ranks]
    return {f"{name}@{rank}": recording.ranks[rank][name] for name in RANK_FIGURES for rank in known}


def charted(view: JobView) -> tuple[int, ...]:
    """The ranks that charts show: all, or of many the fastest and the slowest at present."""
    by_speed = sorted(view.ranks, key=lambda rank: rank.ms_per_batch)
    half = MAX_CHARTED // 2
    shown = by_speed if len(by_speed) <= MAX_CHARTED else [*by_speed[:half], *by_speed[-half:]]
    return tuple(sorted(rank.rank for rank in shown))


def events(recording: JobRecording, after: int = 0) -> list[dict[str, Any]]:
    """The events after the one with number `after`."""
    return [asdict(one) for one in recording.events if one.number > after]


def _shown_checkpoints(checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
    newest = checkpoints[-MAX_CHECKPOINTS:]
    return [*(one for one in checkpoints[:-MAX_CHECKPOINTS] if one.is_best), *newest]


def _checkpoint(one: Checkpoint) -> dict[str, Any]:
    return {
        "path": _cut(one.path, MAX_TEXT),
        "epoch": one.epoch,
        "step": one.global_step,
        "size_bytes": one.size_bytes,
        "duration_s": _finite(one.duration_s),
        "metrics": _metrics(one.metrics),
        "is_best": one.is_best,
    }


def _row(rank: RankView) -> dict[str, Any]:
    gauges = rank.gauges
    is_stalled = rank.state == STALLED
    return {
        "rank": rank.rank,
        "host": _cut(rank.host, MAX_NAME),
        "agent": _cut(rank.agent_id, MAX_NAME),
        "device": _cut(rank.device, MAX_NAME),
        "state": _cut(rank.state, MAX_NAME),
        "stalled_s": _finite(getattr(rank, "stalled_s", None)) if is_stalled else None,
        "ms": _finite(rank.ms_per_batch),
        "samples_per_s": None if is_stalled else _finite(rank.samples_per_s),
        "share": _finite(rank.share_fraction),
        "made": rank.round_batches,
        "target": rank.round_target,
        "batches": rank.num_batches,
        "divergence": _finite(rank.divergence),
        "loss": _finite(rank.loss),
        "waited_s": _finite(rank.waited_s),
        "data_wait_s": _finite(rank.data_wait_s),
        "compute_s": _finite(rank.compute_s),
        "throttled_s": _finite(rank.throttled_s),
        "memory": gauges.memory_used_bytes,
        "memory_total": gauges.memory_total_bytes,
        "gpu": _finite(gauges.gpu_utilization),
        "celsius": _finite(gauges.gpu_temperature_celsius),
        "watts": _finite(gauges.gpu_power_watts),
    }


_ROW = frozenset({"rank", "host", "agent", "device", "state", "ms", "share", "waited_s", "compute_s", "memory"})


def _spread(view: JobView) -> dict[str, Any] | None:
    """The slowest rank, and the ratio by which the fastest is faster, without stalled ranks."""
    known = [rank for rank in view.ranks if rank.ms_per_batch and rank.samples_per_s and rank.state != STALLED]
    if not known:
        return None
    slowest = min(known, key=lambda rank: rank.samples_per_s)
    fastest = max(known, key=lambda rank: rank.samples_per_s)
    return {
        "rank": slowest.rank,
        "device": _cut(slowest.device, MAX_NAME),
        "host": _cut(slowest.host, MAX_NAME),
        "ms": _finite(slowest.ms_per_batch),
        "ratio": _finite(fastest.samples_per_s / slowest.samples_per_s),
        "divergence": _finite(max((one.divergence for one in view.ranks if one.divergence is not None), default=None)),
    }


def _metrics(metrics: Mapping[str, float]) -> dict[str, float | None]:
    return {_cut(name, MAX_NAME): _finite(value) for name, value in list(metrics.items())[:MAX_NAMES]}


def _finite(value: float | None) -> float | None:
    return value if value is not None and isfinite(value) else None


def _cut(text: str, most: int) -> str:
    """At most `most` characters of a text, as valid UTF-8."""
    short = text if len(text) <= most else f"{text[: most - 1]}…"
    # Half of a surrogate pair, as in a file's name that is not UTF-8, would fail the whole answer.
    return short.encode("utf-8", "replace").decode()

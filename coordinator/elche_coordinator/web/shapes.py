"""Jobs as the page gets them: JSON values, with only as many ranks in charts as people can tell apart."""

from collections import Counter
from collections.abc import Mapping
from math import isfinite
from typing import Any

from elche_coordinator.core.describe import JobView, RankView
from elche_coordinator.core.fleet import AgentRecord
from elche_coordinator.core.reports import Checkpoint
from elche_coordinator.web.recorder import Happening, JobRecording

MAX_CHARTED = 12
MAX_ROWS = 100
"""Ranks in the table: the slowest ones."""


def summary(view: JobView) -> dict[str, Any]:
    """A line of the list of jobs."""
    return {
        "id": view.job_id,
        "name": view.name,
        "state": view.state,
        "reason": view.reason,
        "ranks": len(view.ranks),
        "epoch": view.epoch,
        "epochs": view.num_epochs,
        "progress": view.progress_fraction,
        "eta_s": view.eta_s,
        "loss": _finite(view.loss),
        "samples_per_s": view.samples_per_s,
        "submitted_at": view.submitted_at,
    }


def detail(view: JobView) -> dict[str, Any]:
    """One job with its ranks."""
    slowest_first = sorted(view.ranks, key=lambda rank: -rank.ms_per_batch / (rank.num_batches > 0 or 1e9))
    return {
        **summary(view),
        "anchor": view.anchor,
        "rounds": view.num_rounds,
        "pacing": view.pacing,
        "backend": view.backend,
        "policy": view.policy,
        "averaging": view.averaging,
        "overhead": view.overhead_fraction,
        "round_s": view.round_s,
        "averaging_s": view.averaging_s,
        "sent_bytes": view.sent_bytes,
        "metrics": {name: _finite(value) for name, value in view.metrics.items()},
        "checkpoints": [_checkpoint(one) for one in view.checkpoints],
        "checkpoint_failures": view.num_checkpoint_failures,
        "given_up": view.num_given_up,
        "spread": _spread(view),
        "num_ranks_hidden": max(0, len(view.ranks) - MAX_ROWS),
        "table": [_row(rank) for rank in sorted(slowest_first[:MAX_ROWS], key=lambda rank: rank.rank)],
        "ended": view.state in ("succeeded", "failed", "cancelled"),
    }


def charted(view: JobView) -> tuple[int, ...]:
    """The ranks that charts show: all, or the fastest and the slowest of now."""
    by_speed = sorted(view.ranks, key=lambda rank: rank.ms_per_batch)
    half = MAX_CHARTED // 2
    shown = by_speed if len(by_speed) <= MAX_CHARTED else [*by_speed[:half], *by_speed[-half:]]
    return tuple(sorted(rank.rank for rank in shown))


def series(recording: JobRecording, ranks: tuple[int, ...], since: float | None) -> dict[str, Any]:
    """The job's points and those of some ranks after a time; None: all of them, in place of what the page has."""
    start = -1.0 if since is None else since
    first = next((index for index, at in enumerate(recording.at) if at > start), len(recording.at))
    return {
        "is_whole": since is None,
        "every_s": recording.every_s,
        "at": [round(at, 2) for at in recording.at[first:]],
        "job": {name: _values(values[first:]) for name, values in recording.figures.items()},
        "ranks": {
            str(rank): {name: _values(values[first:]) for name, values in recording.ranks[rank].items()}
            for rank in ranks
            if rank in recording.ranks
        },
    }


def happenings(recording: JobRecording, after: int = 0) -> list[dict[str, Any]]:
    """What happened after the one with a number."""
    return [_happening(one) for one in recording.happenings if one.number > after]


def agents(records: Mapping[Any, AgentRecord], taken: Mapping[Any, Any]) -> list[dict[str, Any]]:
    """The hosts."""
    busy = Counter(place.agent_id for place in taken)
    return [
        {
            "id": agent_id,
            "host": record.host,
            "slots": [f"{slot.device} {slot.model}".strip() for slot in record.slots],
            "busy": busy[agent_id],
            "drained": record.is_drained,
        }
        for agent_id, record in records.items()
    ]


def _checkpoint(one: Checkpoint) -> dict[str, Any]:
    return {
        "version": one.version,
        "path": one.path,
        "epoch": one.epoch,
        "size_bytes": one.size_bytes,
        "duration_s": _finite(one.duration_s),
        "is_best": one.is_best,
    }


def _row(rank: RankView) -> dict[str, Any]:
    gauges = rank.gauges
    return {
        "rank": rank.rank,
        "host": rank.host,
        "device": rank.device,
        "state": rank.state,
        "ms": rank.ms_per_batch,
        "samples_per_s": rank.samples_per_s,
        "share": rank.share_fraction,
        "made": rank.round_batches,
        "target": rank.round_target,
        "divergence": _finite(rank.divergence),
        "loss": _finite(rank.loss),
        "waited_s": _finite(rank.waited_s),
        "data_wait_s": _finite(rank.data_wait_s),
        "compute_s": rank.compute_s,
        "throttled_s": _finite(rank.throttled_s),
        "memory": gauges.memory_used_bytes,
        "memory_total": gauges.memory_total_bytes,
        "gpu": _finite(gauges.gpu_utilization),
        "celsius": _finite(gauges.gpu_temperature_celsius),
        "watts": _finite(gauges.gpu_power_watts),
        "errors": rank.callback_errors,
    }


def _spread(view: JobView) -> dict[str, Any] | None:
    """The slowest and the fastest rank, and by how much."""
    known = [rank for rank in view.ranks if rank.ms_per_batch and rank.samples_per_s]
    if not known:
        return None
    slowest = min(known, key=lambda rank: rank.samples_per_s)
    fastest = max(known, key=lambda rank: rank.samples_per_s)
    return {
        "rank": slowest.rank,
        "device": slowest.device,
        "host": slowest.host,
        "ms": slowest.ms_per_batch,
        "ratio": fastest.samples_per_s / slowest.samples_per_s,
        "divergence": _finite(max(rank.divergence for rank in view.ranks)),
    }


def _happening(one: Happening) -> dict[str, Any]:
    return {"number": one.number, "at": one.at, "kind": one.kind, "text": one.text}


def _values(values: Any) -> list[float | None]:
    return [float(f"{value:.5g}") if isfinite(value) else None for value in values]


def _finite(value: float | None) -> float | None:
    return value if value is not None and isfinite(value) else None

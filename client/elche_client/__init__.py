"""Submits training jobs to an elche coordinator and watches them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elche_client.client import Client, JobHandle
    from elche_client.events import (
        Checkpoint,
        EpochReport,
        EvaluationReport,
        Event,
        HostView,
        JobResult,
        JobState,
        JobView,
        LogLine,
        MembershipReport,
        RankResult,
        RankView,
        RoundReport,
        SlotView,
        StallReport,
        UserEvent,
    )

__all__ = [
    "Checkpoint",
    "Client",
    "EpochReport",
    "EvaluationReport",
    "Event",
    "HostView",
    "JobHandle",
    "JobResult",
    "JobState",
    "JobView",
    "LogLine",
    "MembershipReport",
    "RankResult",
    "RankView",
    "RoundReport",
    "SlotView",
    "StallReport",
    "UserEvent",
]


def __getattr__(name: str) -> Any:
    # Names are loaded on first use: `elche --help` starts from this package and must not wait for gRPC.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "client" if name in ("Client", "JobHandle") else "events"
    return getattr(import_module(f"{__name__}.{home}"), name)

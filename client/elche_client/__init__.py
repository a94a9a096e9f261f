"""Submits training jobs to an elche coordinator and watches them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elche_client.aio import AsyncClient, AsyncJobHandle
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
    "AsyncClient",
    "AsyncJobHandle",
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
    homes = {"AsyncClient": "aio", "AsyncJobHandle": "aio", "Client": "client", "JobHandle": "client"}
    home = homes.get(name, "events")
    return getattr(import_module(f"{__name__}.{home}"), name)

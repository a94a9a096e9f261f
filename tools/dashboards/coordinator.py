"""The coordinator itself: does it keep up, does it write its records, who is connected."""

import look
from cluster import RESTARTED, SELF, coordinator_is_up
from grafana_foundation_sdk.builders.dashboard import Dashboard

FULL = ((None, look.GOOD), (0.7, look.WARN), (0.9, look.BAD))
"""Of what has a limit."""
CONNECTIONS = {"agent": look.GREY, "rank": look.BLUE, "watcher": look.CYAN}
MESSAGES = {
    "agent in": look.GREY,
    "agent out": "#C8C8C8",
    "rank in": look.BLUE,
    "rank out": look.PALE,
    "watcher in": look.CYAN,
    "watcher out": "#9FE3E3",
}


def coordinator() -> Dashboard:
    return look.page(
        "elche-coordinator",
        "elche / Coordinator",
        "The coordinator's own health.",
        coordinator_is_up(),
        look.figure(
            "Runs since",
            "Time since its process started.",
            f"time() - (process_start_time_seconds{SELF})",
            unit="dtdurations",
        ),
        look.figure(
            "Event loop, late by",
            "Largest delay in 10 seconds. Above 0.1 s commands reach ranks late; above 1 s it is overloaded.",
            "elche_coordinator_loop_lag_seconds",
            unit="s",
            steps=((None, look.GOOD), (0.1, look.WARN), (1, look.BAD)),
            span=4,
        ),
        look.figure(
            "Records not written",
            "Failed attempts to write records to disk, in the last hour. Jobs wait until a write succeeds.",
            "sum(increase(elche_coordinator_persist_failures_total[1h])) or vector(0)",
            unit="none",
            steps=((None, look.GOOD), (1, look.BAD)),
            span=4,
        ).decimals(0),
        look.figure(
            "CPU",
            "Cores in use. The event loop runs on one core: near 100 % it is at its limit.",
            f"rate(process_cpu_seconds_total[1m]){SELF}",
            unit="percentunit",
            steps=FULL,
        ).decimals(0),
        look.figure("Memory", "Resident memory.", f"process_resident_memory_bytes{SELF}", unit="bytes").decimals(0),
        look.figure(
            "Files open, of its limit",
            "Open file descriptors; each connection needs one. At 100 % no connection is accepted.",
            f"process_open_fds / process_max_fds{SELF}",
            unit="percentunit",
            steps=FULL,
            span=4,
        ).decimals(1),
        look.lines(
            "Event loop, late by: peaks above the dashed line slow down every job",
            "Largest delay of the event loop in 10 seconds.",
            look.over_time("elche_coordinator_loop_lag_seconds", "late"),
            unit="s",
            steps=((None, "transparent"), (0.1, look.WARN)),
            colors={"late": look.BLUE},
        ),
        look.lines(
            "Making records durable: each round waits for it once",
            "Median and 99th percentile of the time to write and sync. Slow: the disk is busy or remote.",
            look.over_time(_quantile(0.5), "median"),
            look.over_time(_quantile(0.99), "99 %"),
            unit="s",
            colors={"median": look.BLUE, "99 %": look.ORANGE},
        ),
        look.lines(
            "Messages: in from ranks is the load",
            "Messages per second by peer and direction.",
            look.over_time(
                "sum by (kind, direction) (rate(elche_coordinator_messages_total[$__rate_interval]))",
                "{{kind}} {{direction}}",
            ),
            unit=look.PER_SECOND,
            colors=MESSAGES,
        ),
        look.stacked(
            look.lines(
                "Connections: a step down is somebody who left",
                "Open gRPC streams: of agents (one per host), ranks, and watchers (clients and pages).",
                look.over_time("sum by (kind) (elche_coordinator_streams)", "{{kind}}"),
                unit="none",
                colors=CONNECTIONS,
            )
        ).decimals(0),
        look.lines(
            "CPU: near 100 % it is at its limit",
            "Cores in use.",
            look.over_time(f"rate(process_cpu_seconds_total[$__rate_interval]){SELF}", "CPU"),
            unit="percentunit",
            colors={"CPU": look.BLUE},
        ),
        look.lines(
            "Memory: should not rise for hours",
            "Resident memory of its process.",
            look.over_time(f"process_resident_memory_bytes{SELF}", "memory"),
            unit="bytes",
            colors={"memory": look.BLUE},
        ),
        events=[RESTARTED],
    )


def _quantile(part: float) -> str:
    buckets = "rate(elche_coordinator_persist_duration_seconds_bucket[$__rate_interval])"
    return f"histogram_quantile({part}, sum by (le) ({buckets})) >= 0"  # drops NaN, which has no scale

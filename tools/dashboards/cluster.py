"""The cluster at a glance: is anything wrong, which jobs train, when do they end, what is free."""

import look
from grafana_foundation_sdk.builders.dashboard import Dashboard
from grafana_foundation_sdk.builders.stat import Panel as Figure
from grafana_foundation_sdk.builders.table import Panel as Table
from states import JOB_STATES, STATE, TEXTS, coded

ALERTS = 'ALERTS{alertname=~"Elche.+", alertstate="firing"}'
SPEED = "avg_over_time(elche_rank_samples_per_second[1m])"
SLOWEST = f"max by (job) ({SPEED}) / min by (job) ({SPEED} > 0)"
SELF = " and on (instance) elche_agents"
"""Of Prometheus's own metrics of processes, those of the coordinator."""
RESTARTED = look.Event("coordinator restarted", "process_start_time_seconds", "{{instance}}", look.WARN, only=SELF)
OPEN_JOB = {
    "title": "Open this job",
    "url": "/d/elche-job?var-job=${__data.fields.Job}&${__url_time_range}",
    "targetBlank": False,
}


def cluster() -> Dashboard:
    return look.page(
        "elche-cluster",
        "elche / Cluster",
        "All jobs and devices of one coordinator.",
        coordinator_is_up(),
        _alerts(),
        look.figure(
            "Jobs that train",
            "Jobs in state training.",
            'sum(elche_job_state{state="training"}) or vector(0)',
            unit="none",
        ),
        look.figure(
            "Jobs that wait",
            "Queued jobs. Look into it when devices are free, or when the number stays.",
            'sum(elche_jobs{state="queued"}) or vector(0)',
            unit="none",
            steps=((None, look.PLAIN), (1, look.WARN)),
        ),
        look.figure(
            "Devices free",
            "Device slots that no job uses. If jobs wait nevertheless, each needs more than these.",
            look.now('sum(elche_slots{state="free"})', "free"),
            look.now("sum(elche_slots)", "of"),
            unit="none",
            span=6,
        ),
        look.figure(
            "Agents",
            "Hosts that offer devices: as many as elche-worker was started on, unless one was lost.",
            "elche_agents",
            unit="none",
        ),
        look.figure(
            "Samples per second",
            "Samples trained per second by all jobs.",
            "sum(rate(elche_job_samples_total[1m])) or vector(0)",
            unit="locale",
        ).decimals(0),
        _jobs(),
        look.timeline(
            "What happened: state of each job",
            "Red is failed; grey is queued.",
            look.over_time(coded("elche_job_state", "", JOB_STATES, "job"), "{{job}}"),
            texts=TEXTS,
        ),
        "Use of the devices",
        look.lines(
            "Samples per second of each job: falls when devices slow down or wait",
            "Samples trained per second, averaged over the last scrapes.",
            look.over_time("sum by (job) (rate(elche_job_samples_total[$__rate_interval]))", "{{job}}"),
            unit="short",
        ),
        look.stacked(
            look.lines(
                "Device slots: green works, grey is free",
                "Number of device slots by state.",
                look.over_time("sum by (state) (elche_slots)", "{{state}}"),
                unit="none",
            )
        )
        .decimals(0)
        .override_by_name("free", look.set_to(color=look.fixed(look.GREY)))
        .override_by_name("busy", look.set_to(color=look.fixed(look.GREEN))),
        events=[look.Event("rank lost", "elche_job_lost_ranks_total", "{{job}}", look.BAD), RESTARTED],
    )


def coordinator_is_up() -> Figure:
    text = "Whether Prometheus can scrape the coordinator. While it is down, no managed job makes progress."
    steps = ((None, look.BAD), (1, look.GOOD))
    panel = look.figure("Coordinator", text, "count(elche_agents) or vector(0)", unit="none", steps=steps)
    return panel.mappings(look.shows({"0": ("DOWN", look.BAD), "1": ("up", look.GOOD)}))


def _alerts() -> Figure:
    text = "Alerts of docker/prometheus/rules/elche.yml that fire now; each one's description says what to do."
    panel = look.figure(
        "Alerts", text, f"count({ALERTS}) or vector(0)", unit="none", steps=((None, look.GOOD), (1, look.BAD))
    )
    return panel.mappings(look.shows({"0": ("none", look.GOOD)}))


def _jobs() -> Table:
    columns = {
        "": look.column("max by (job, name) (elche_job_info)"),
        "State": look.column(coded("elche_job_state", "", JOB_STATES, "job")),
        "Progress": look.column("max by (job) (elche_job_progress_ratio)"),
        "Ends in": look.column("max by (job) (elche_job_remaining_seconds)"),
        "Ranks": look.column("max by (job) (elche_job_ranks)"),
        "Samples/s": look.column("max by (job) (elche_job_samples_per_second)"),
        "Slowest rank": look.column(SLOWEST),
        "Averaging": look.column("max by (job) (elche_job_overhead_ratio)"),
        "Loss": look.column("max by (job) (elche_job_loss)"),
        "Lost ranks": look.column("max by (job) (elche_job_lost_ranks_total)"),
        "Checkpoint": look.column("max by (job) (elche_job_checkpoint_age_seconds)"),
    }
    return (
        look.rows(
            "Jobs: click one to open it",
            "Slowest rank: how many times slower than the fastest. Averaging: fraction of the time in which "
            "rounds kept ranks from training. Checkpoint: age of the newest one.",
            columns,
            labels={"job": "Job", "name": "Name"},
        )
        .override_by_name("Job", look.set_to(links=[OPEN_JOB], custom__width=180))
        .override_by_name("State", STATE)
        .override_by_name(
            "Progress",
            look.set_to(unit="percentunit", min=0, max=1, **look.GAUGE, color=look.fixed(look.BLUE), custom__width=180),
        )
        .override_by_name("Ends in", look.set_to(unit="dtdurations"))
        .override_by_name("Samples/s", look.set_to(unit="locale", decimals=0))
        .override_by_name("Slowest rank", look.set_to(unit=look.TIMES, decimals=1))
        .override_by_name(
            "Averaging", look.set_to(unit="percentunit", decimals=1, thresholds=look.WASTE, **look.COLORED)
        )
        .override_by_name("Loss", look.set_to(decimals=3))
        .override_by_name(
            "Lost ranks", look.set_to(thresholds=look.limits((1, look.WARN), (2, look.BAD)), **look.COLORED)
        )
        .override_by_name("Checkpoint", look.set_to(unit="dtdurations"))
    )

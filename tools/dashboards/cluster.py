"""The cluster at a glance: is anything wrong, which jobs train, when do they end, what is free."""

from grafana_foundation_sdk.builders.dashboard import Dashboard
from grafana_foundation_sdk.builders.stat import Panel as Figure
from grafana_foundation_sdk.builders.table import Panel as Table
from look import (
    BAD,
    BLUE,
    COLORED,
    GAUGE,
    GOOD,
    GREEN,
    GREY,
    PLAIN,
    TIMES,
    WARN,
    WASTE,
    Event,
    column,
    figure,
    fixed,
    limits,
    lines,
    now,
    over_time,
    page,
    rows,
    set_to,
    shows,
    stacked,
    timeline,
)
from states import JOB_STATES, STATE, TEXTS, coded

ALERTS = 'ALERTS{alertname=~"Elche.+", alertstate="firing"}'
SPEED = "avg_over_time(elche_rank_samples_per_second[1m])"
SLOWEST = f"max by (job) ({SPEED}) / min by (job) ({SPEED} > 0)"
SELF = " and on (instance) elche_agents"
"""Of Prometheus's own metrics of processes, those of the coordinator."""
RESTARTED = Event("coordinator restarted", "process_start_time_seconds", "{{instance}}", WARN, only=SELF)
OPEN_JOB = {
    "title": "Open this job",
    "url": "/d/elche-job?var-job=${__data.fields.Job}&${__url_time_range}",
    "targetBlank": False,
}


def cluster() -> Dashboard:
    return page(
        "elche-cluster",
        "elche / Cluster",
        "All jobs and devices of one coordinator.",
        coordinator_is_up(),
        _alerts(),
        figure(
            "Jobs that train",
            "Jobs in state training.",
            'sum(elche_job_state{state="training"}) or vector(0)',
            unit="none",
        ),
        figure(
            "Jobs that wait",
            "Queued jobs. Look into it when devices are free, or when the number stays.",
            'sum(elche_jobs{state="queued"}) or vector(0)',
            unit="none",
            steps=((None, PLAIN), (1, WARN)),
        ),
        figure(
            "Devices free",
            "Device slots that no job uses. If jobs wait nevertheless, each needs more than these.",
            now('sum(elche_slots{state="free"})', "free"),
            now("sum(elche_slots)", "of"),
            unit="none",
            span=6,
        ),
        figure(
            "Agents",
            "Hosts that offer devices: as many as elche-worker was started on, unless one was lost.",
            "elche_agents",
            unit="none",
        ),
        figure(
            "Samples per second",
            "Samples trained per second by all jobs.",
            "sum(rate(elche_job_samples_total[1m])) or vector(0)",
            unit="locale",
        ).decimals(0),
        _jobs(),
        timeline(
            "What happened: state of each job",
            "Red is failed; grey is queued.",
            over_time(coded("elche_job_state", "", JOB_STATES, "job"), "{{job}}"),
            texts=TEXTS,
        ),
        "Use of the devices",
        lines(
            "Samples per second of each job: falls when devices slow down or wait",
            "Samples trained per second, averaged over the last scrapes.",
            over_time("sum by (job) (rate(elche_job_samples_total[$__rate_interval]))", "{{job}}"),
            unit="short",
        ),
        stacked(
            lines(
                "Device slots: green works, grey is free",
                "Number of device slots by state.",
                over_time("sum by (state) (elche_slots)", "{{state}}"),
                unit="none",
            )
        )
        .decimals(0)
        .override_by_name("free", set_to(color=fixed(GREY)))
        .override_by_name("busy", set_to(color=fixed(GREEN))),
        events=[Event("rank lost", "elche_job_lost_ranks_total", "{{job}}", BAD), RESTARTED],
    )


def coordinator_is_up() -> Figure:
    text = "Whether Prometheus can scrape the coordinator. While it is down, no managed job makes progress."
    steps = ((None, BAD), (1, GOOD))
    panel = figure("Coordinator", text, "count(elche_agents) or vector(0)", unit="none", steps=steps)
    return panel.mappings(shows({"0": ("DOWN", BAD), "1": ("up", GOOD)}))


def _alerts() -> Figure:
    text = "Alerts of docker/prometheus/rules/elche.yml that fire now; each one's description says what to do."
    panel = figure("Alerts", text, f"count({ALERTS}) or vector(0)", unit="none", steps=((None, GOOD), (1, BAD)))
    return panel.mappings(shows({"0": ("none", GOOD)}))


def _jobs() -> Table:
    columns = {
        "": column("max by (job, name) (elche_job_info)"),
        "State": column(coded("elche_job_state", "", JOB_STATES, "job")),
        "Progress": column("max by (job) (elche_job_progress_ratio)"),
        "Ends in": column("max by (job) (elche_job_remaining_seconds)"),
        "Ranks": column("max by (job) (elche_job_ranks)"),
        "Samples/s": column("max by (job) (elche_job_samples_per_second)"),
        "Slowest rank": column(SLOWEST),
        "Averaging": column("max by (job) (elche_job_overhead_ratio)"),
        "Loss": column("max by (job) (elche_job_loss)"),
        "Lost ranks": column("max by (job) (elche_job_lost_ranks_total)"),
        "Checkpoint": column("max by (job) (elche_job_checkpoint_age_seconds)"),
    }
    return (
        rows(
            "Jobs: click one to open it",
            "Slowest rank: how many times slower than the fastest. Averaging: fraction of the time in which "
            "rounds kept ranks from training. Checkpoint: age of the newest one.",
            columns,
            labels={"job": "Job", "name": "Name"},
        )
        .override_by_name("Job", set_to(links=[OPEN_JOB], custom__width=180))
        .override_by_name("State", STATE)
        .override_by_name(
            "Progress", set_to(unit="percentunit", min=0, max=1, **GAUGE, color=fixed(BLUE), custom__width=180)
        )
        .override_by_name("Ends in", set_to(unit="dtdurations"))
        .override_by_name("Samples/s", set_to(unit="locale", decimals=0))
        .override_by_name("Slowest rank", set_to(unit=TIMES, decimals=1))
        .override_by_name("Averaging", set_to(unit="percentunit", decimals=1, thresholds=WASTE, **COLORED))
        .override_by_name("Loss", set_to(decimals=3))
        .override_by_name("Lost ranks", set_to(thresholds=limits((1, WARN), (2, BAD)), **COLORED))
        .override_by_name("Checkpoint", set_to(unit="dtdurations"))
    )

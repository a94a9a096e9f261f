"""Ranks and their devices: where the time goes, memory, temperature, batches."""

from grafana_foundation_sdk.builders.dashboard import Dashboard
from grafana_foundation_sdk.builders.table import Panel as Table
from grafana_foundation_sdk.builders.timeseries import Panel as Lines
from look import (
    BAD,
    BLUE,
    GREEN,
    JOB,
    PER_SECOND,
    PLAIN,
    RANK,
    TIMES,
    WARN,
    Event,
    column,
    each_rank,
    fixed,
    heading,
    lines,
    page,
    rows,
    set_to,
    shows,
)
from states import RANK_STATES, TEXTS, coded

THESE = 'job="$job", rank=~"$rank"'
WASTE = {
    "mode": "absolute",
    "steps": [{"color": PLAIN, "value": None}, {"color": WARN, "value": 0.1}, {"color": BAD, "value": 0.3}],
}


def ranks() -> Dashboard:
    return (
        page("elche-ranks", "elche / Ranks and devices", "Ranks of one job, and the devices that they train on.")
        .with_variable(JOB)
        .with_variable(RANK)
        .annotation(
            Event("rank lost", 'elche_job_lost_ranks_total{job="$job"}', "A rank died or could not be reached.", BAD)
        )
        .with_panel(_table())
        .with_row(heading("Batches"))
        .with_panel(
            lines(
                "Speed: flat is good",
                "Samples per second between rounds, waits for data included.",
                each_rank(f"elche_rank_samples_per_second{{{THESE}}}"),
                unit=PER_SECOND,
                by_rank=True,
            )
            .decimals(0)
            .span(8)
        )
        .with_panel(_batches())
        .with_panel(
            lines(
                "Batches ready ahead: at 0 the data cannot keep up",
                "Batches that are fetched and not yet trained.",
                each_rank(f"elche_rank_prefetch_batches{{{THESE}}}"),
                unit="none",
                by_rank=True,
            ).span(8)
        )
        .with_row(heading("Where the time goes"))
        .with_panel(
            _wait("Waiting for data: should be near 0", "data_wait", "To lower it: more num_workers, a faster disk.")
        )
        .with_panel(
            _wait("Kept from training by rounds", "round_wait", "Averaging, and waiting in it for slower ranks.")
        )
        .with_panel(
            _wait(
                "Held back at the limit of batches",
                "throttled",
                "The rank is max_batch_diff batches ahead; a slower rank must catch up first.",
            )
        )
        .with_row(heading("Learning"))
        .with_panel(
            lines(
                "Loss of each rank: one that leaves the others is bad",
                "Mean training loss of the batches that the rank last reported.",
                each_rank(f"elche_rank_loss{{{THESE}}}"),
                unit="short",
                by_rank=True,
            )
            .decimals(3)
            .span(8)
        )
        .with_panel(
            lines(
                "Gradient norm: peaks are unstable training",
                "L2 norm before clipping. Only jobs with max_grad_norm measure it.",
                each_rank(f"elche_rank_gradient_norm{{{THESE}}}"),
                unit="short",
                by_rank=True,
            ).span(8)
        )
        .with_panel(
            lines(
                "Learning rate",
                "Learning rate of the optimizer's first parameter group.",
                each_rank(f"elche_rank_learning_rate{{{THESE}}}"),
                unit="short",
                by_rank=True,
            ).span(8)
        )
        .with_panel(
            lines(
                "Parameter norm: steady growth is missing weight decay",
                "L2 norm of the trained parameters, measured at every tenth batch after a round.",
                each_rank(f"elche_rank_parameter_norm{{{THESE}}}"),
                unit="short",
                by_rank=True,
            ).span(8)
        )
        .with_row(heading("Devices"))
        .with_panel(_memory())
        .with_panel(
            lines(
                "GPU busy: low means it waits",
                "Fraction of the last second in which the GPU was busy.",
                each_rank(f"elche_rank_gpu_utilization_ratio{{{THESE}}}"),
                unit="percentunit",
                by_rank=True,
            )
            .max(1)
            .no_value("No GPU, or NVML does not know")
            .span(6)
        )
        .with_panel(
            lines(
                "GPU temperature: bad above the line",
                "Most GPUs lower their clock from 83 to 90 °C.",
                each_rank(f"elche_rank_gpu_temperature_celsius{{{THESE}}}"),
                unit="celsius",
                steps=((None, "transparent"), (85, BAD)),
                by_rank=True,
            )
            .no_value("No GPU, or NVML does not know")
            .span(6)
        )
        .with_panel(
            lines(
                "GPU power",
                "Power draw of the device.",
                each_rank(f"elche_rank_gpu_power_watts{{{THESE}}}"),
                unit="watt",
                by_rank=True,
            )
            .no_value("No GPU, or NVML does not know")
            .span(6)
        )
    )


def _table() -> Table:
    def gauge(name: str) -> str:
        return f"max by (rank, device) (elche_rank_{name}{{{THESE}}})"

    def rate(name: str) -> str:
        return f"max by (rank, device) (rate(elche_rank_{name}_seconds_total{{{THESE}}}[5m]))"

    def spent(name: str) -> str:
        return f"{rate(name)} / ({' + '.join(map(rate, ('compute', 'data_wait', 'round_wait', 'throttled')))})"

    speed = f"max by (rank, device) (avg_over_time(elche_rank_samples_per_second{{{THESE}}}[1m]))"
    fastest = 'scalar(max(avg_over_time(elche_rank_samples_per_second{job="$job"}[1m])))'
    columns = {
        "State": column(coded("elche_rank_state", THESE, RANK_STATES, "rank, device")),
        "Samples/s": column(speed),
        "Times slower": column(f"{fastest} / ({speed} > 0)"),
        "Batch": column(gauge("batch_seconds")),
        "Share": column(gauge("share_ratio")),
        "Training": column(spent("compute")),
        "Data wait": column(spent("data_wait")),
        "In rounds": column(spent("round_wait")),
        "Held back": column(spent("throttled")),
        "Divergence": column(gauge("divergence_ratio")),
        "Peak": column(f"{gauge('memory_peak_bytes')} / {gauge('memory_total_bytes')}"),
        "Memory": column(f"{gauge('memory_used_bytes')} / {gauge('memory_total_bytes')}"),
        "Errors": column(gauge("callback_errors_total")),
    }
    colored = {"type": "color-text"}
    cell = {"type": "gauge", "mode": "basic", "valueDisplayMode": "text"}
    panel = rows(
        "Ranks: the largest number in “times slower” is the slowest",
        "Training, data wait, in rounds and held back: fractions of the last five minutes. "
        "Batch: time per batch. Errors: exceptions that callbacks raised.",
        columns,
        labels={"rank": "Rank", "device": "Device"},
    ).height(8)
    panel = (
        panel.override_by_name("Rank", set_to(custom__width=60))
        .override_by_name("Device", set_to(custom__width=170))
        .override_by_name(
            "State", set_to(mappings=[each.to_json() for each in shows(TEXTS)], custom__cellOptions=colored)
        )
        .override_by_name("Samples/s", set_to(unit="locale", decimals=0))
        .override_by_name("Times slower", set_to(unit=TIMES, decimals=1))
        .override_by_name("Batch", set_to(unit="s"))
        .override_by_name("Divergence", set_to(unit="percentunit", decimals=2))
        .override_by_name("Peak", set_to(unit="percentunit", decimals=0))
        .override_by_name("Memory", set_to(unit="percentunit", decimals=0))
        .override_by_name("Errors", set_to(custom__cellOptions=colored, thresholds=_errors()))
    )
    for name, bar in (("Share", BLUE), ("Training", GREEN)):
        filled = set_to(unit="percentunit", min=0, max=1, decimals=0, color=fixed(bar), custom__cellOptions=cell)
        panel = panel.override_by_name(name, filled)
    for name in ("Data wait", "In rounds", "Held back"):
        wasted = set_to(unit="percentunit", decimals=1, thresholds=WASTE, custom__cellOptions=colored)
        panel = panel.override_by_name(name, wasted)
    return panel


def _errors() -> dict[str, object]:
    return {"mode": "absolute", "steps": [{"color": PLAIN, "value": None}, {"color": BAD, "value": 1}]}


def _batches() -> Lines:
    def quantile(part: float) -> str:
        buckets = f"rate(elche_rank_batch_duration_seconds_bucket{{{THESE}}}[$__rate_interval])"
        return f"histogram_quantile({part}, sum by (le, rank) ({buckets})) >= 0"

    panel = lines(
        "Time of batches: 99 % (dashed) far above is bad",
        "Median (line) and 99th percentile (dashed) of the time per batch.",
        each_rank(quantile(0.5)),
        each_rank(quantile(0.99), "rank {{rank}} 99 %"),
        unit="s",
        by_rank=True,
    )
    dashes, hidden = {"fill": "dash", "dash": [6, 6]}, {"legend": True, "tooltip": False, "viz": False}
    return panel.span(8).override_by_regexp(
        "/ 99 %$/", set_to(custom__lineStyle=dashes, custom__lineWidth=1, custom__hideFrom=hidden)
    )


def _wait(title: str, name: str, text: str) -> Lines:
    panel = lines(
        title,
        f"Fraction of the time. {text}",
        each_rank(f"clamp_max(rate(elche_rank_{name}_seconds_total{{{THESE}}}[$__rate_interval]), 1)"),
        unit="percentunit",
        steps=((None, "transparent"), (0.1, WARN)),
        by_rank=True,
    )
    return panel.span(8)


def _memory() -> Lines:
    panel = lines(
        "Memory: near 100 % it fails",
        "Used fraction of the device's memory; of the host's, for a rank on a CPU.",
        each_rank(f"elche_rank_memory_used_bytes{{{THESE}}} / elche_rank_memory_total_bytes{{{THESE}}}"),
        unit="percentunit",
        by_rank=True,
    )
    return panel.max(1).span(6)

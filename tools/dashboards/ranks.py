"""Ranks and their devices: where the time goes, memory, temperature, batches."""

import look
from grafana_foundation_sdk.builders.dashboard import Dashboard
from grafana_foundation_sdk.builders.table import Panel as Table
from grafana_foundation_sdk.builders.timeseries import Panel as Lines
from job import RANK_LOST
from states import RANK_STATES, STATE, coded

THESE = 'job="$job", rank=~"$rank"'


def ranks() -> Dashboard:
    return look.page(
        "elche-ranks",
        "elche / Ranks and devices",
        "Ranks of one job, and the devices that they train on.",
        _table(),
        "Batches",
        _curves(
            "Speed: flat is good",
            "Samples per second between rounds, waits for data included.",
            "samples_per_second",
            look.PER_SECOND,
        ).decimals(0),
        _batches(),
        _curves(
            "Batches ready ahead: at 0 the data cannot keep up",
            "Batches that are fetched and not yet trained.",
            "prefetch_batches",
            "none",
        ),
        "Where the time goes",
        _wait("Waiting for data: should be near 0", "data_wait", "To lower it: more num_workers, a faster disk."),
        _wait("Kept from training by rounds", "round_wait", "Averaging, and waiting in it for slower ranks."),
        _wait(
            "Held back at the limit of batches",
            "throttled",
            "The rank is max_batch_diff batches ahead; a slower rank must catch up first.",
        ),
        "Learning",
        _curves(
            "Loss of each rank: one that leaves the others is bad",
            "Mean training loss of the batches that the rank last reported.",
            "loss",
        ).decimals(3),
        _curves(
            "Gradient norm: peaks are unstable training",
            "L2 norm before clipping. Only jobs with max_grad_norm measure it.",
            "gradient_norm",
        ),
        _curves("Learning rate", "Learning rate of the optimizer's first parameter group.", "learning_rate"),
        _curves(
            "Parameter norm: steady growth is missing weight decay",
            "L2 norm of the trained parameters, measured at every tenth batch after a round.",
            "parameter_norm",
        ),
        "Devices",
        look.lines(
            "Memory: near 100 % it fails",
            "Used fraction of the device's memory; of the host's, for a rank on a CPU.",
            f"elche_rank_memory_used_bytes{{{THESE}}} / elche_rank_memory_total_bytes{{{THESE}}}",
            unit="percentunit",
            by_rank=True,
            span=6,
        ).max(1),
        _of_gpu(
            "GPU busy: low means it waits",
            "Fraction of the last second in which the GPU was busy.",
            "utilization_ratio",
            "percentunit",
        ).max(1),
        _of_gpu(
            "GPU temperature: bad above the line",
            "Most GPUs lower their clock from 83 to 90 °C.",
            "temperature_celsius",
            "celsius",
            steps=((None, "transparent"), (85, look.BAD)),
        ),
        _of_gpu("GPU power", "Power draw of the device.", "power_watts", "watt"),
        events=[RANK_LOST],
        variables=[look.JOB, look.RANK],
    )


def _curves(title: str, text: str, name: str, unit: str = "short") -> Lines:
    """A metric of each rank."""
    return look.lines(title, text, f"elche_rank_{name}{{{THESE}}}", unit=unit, by_rank=True, span=8)


def _of_gpu(title: str, text: str, name: str, unit: str, steps: look.Steps = ((None, look.GOOD),)) -> Lines:
    query = f"elche_rank_gpu_{name}{{{THESE}}}"
    panel = look.lines(title, text, query, unit=unit, steps=steps, by_rank=True, span=6)
    return panel.no_value("No GPU, or NVML does not know")


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
        "State": look.column(coded("elche_rank_state", THESE, RANK_STATES, "rank, device")),
        "Samples/s": look.column(speed),
        "Times slower": look.column(f"{fastest} / ({speed} > 0)"),
        "Batch": look.column(gauge("batch_seconds")),
        "Share": look.column(gauge("share_ratio")),
        "Training": look.column(spent("compute")),
        "Data wait": look.column(spent("data_wait")),
        "In rounds": look.column(spent("round_wait")),
        "Held back": look.column(spent("throttled")),
        "Divergence": look.column(gauge("divergence_ratio")),
        "Peak": look.column(f"{gauge('memory_peak_bytes')} / {gauge('memory_total_bytes')}"),
        "Memory": look.column(f"{gauge('memory_used_bytes')} / {gauge('memory_total_bytes')}"),
        "Errors": look.column(gauge("callback_errors_total")),
    }
    panel = look.rows(
        "Ranks: the largest number in “times slower” is the slowest",
        "Training, data wait, in rounds and held back: fractions of the last five minutes. "
        "Batch: time per batch. Errors: exceptions that callbacks raised.",
        columns,
        labels={"rank": "Rank", "device": "Device"},
    ).height(8)
    panel = (
        panel.override_by_name("Rank", look.set_to(custom__width=60))
        .override_by_name("Device", look.set_to(custom__width=170))
        .override_by_name("State", STATE)
        .override_by_name("Samples/s", look.set_to(unit="locale", decimals=0))
        .override_by_name("Times slower", look.set_to(unit=look.TIMES, decimals=1))
        .override_by_name("Batch", look.set_to(unit="s"))
        .override_by_name("Divergence", look.set_to(unit="percentunit", decimals=2))
        .override_by_name("Peak", look.set_to(unit="percentunit", decimals=0))
        .override_by_name("Memory", look.set_to(unit="percentunit", decimals=0))
        .override_by_name("Errors", look.set_to(**look.COLORED, thresholds=look.limits((1, look.BAD))))
    )
    for name, bar in (("Share", look.BLUE), ("Training", look.GREEN)):
        filled = look.set_to(unit="percentunit", min=0, max=1, decimals=0, color=look.fixed(bar), **look.GAUGE)
        panel = panel.override_by_name(name, filled)
    for name in ("Data wait", "In rounds", "Held back"):
        wasted = look.set_to(unit="percentunit", decimals=1, thresholds=look.WASTE, **look.COLORED)
        panel = panel.override_by_name(name, wasted)
    return panel


def _batches() -> Lines:
    def quantile(part: float) -> str:
        buckets = f"rate(elche_rank_batch_duration_seconds_bucket{{{THESE}}}[$__rate_interval])"
        return f"histogram_quantile({part}, sum by (le, rank) ({buckets})) >= 0"

    panel = look.lines(
        "Time of batches: 99 % (dashed) far above is bad",
        "Median (line) and 99th percentile (dashed) of the time per batch.",
        quantile(0.5),
        look.each_rank(quantile(0.99), "rank {{rank}} 99 %"),
        unit="s",
        by_rank=True,
        span=8,
    )
    dashes, hidden = {"fill": "dash", "dash": [6, 6]}, {"legend": True, "tooltip": False, "viz": False}
    return panel.override_by_regexp(
        "/ 99 %$/", look.set_to(custom__lineStyle=dashes, custom__lineWidth=1, custom__hideFrom=hidden)
    )


def _wait(title: str, name: str, text: str) -> Lines:
    return look.lines(
        title,
        f"Fraction of the time. {text}",
        f"clamp_max(rate(elche_rank_{name}_seconds_total{{{THESE}}}[$__rate_interval]), 1)",
        unit="percentunit",
        steps=((None, "transparent"), (0.1, look.WARN)),
        by_rank=True,
        span=8,
    )

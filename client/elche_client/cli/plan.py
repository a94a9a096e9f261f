"""`elche plan`: what a job would do on devices that one may not have yet."""

from __future__ import annotations

import re

import click

from elche.plan import MAX_DEVICES, OPTIMIZERS
from elche.settings import COMPRESSIONS, SETTINGS
from elche_client.cli.options import SECONDS, Parsed, address_option, json_option, quantity_of

# Units that a user may write, each in the base unit.
BYTES = {"kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40}
BYTES_PER_S = {
    **{f"{prefix}bit/s": size / 8 for prefix, size in (("k", 1e3), ("M", 1e6), ("G", 1e9))},
    **{f"{prefix}B/s": size for prefix, size in (("k", 1e3), ("M", 1e6), ("G", 1e9))},
}


def batch_times(text: str) -> tuple[float, ...]:
    """Milliseconds for each device, of times per batch such as 25ms,57ms or 8x25ms."""
    times: list[float] = []
    for part in text.split(","):
        found = re.fullmatch(r"(?:([0-9]{1,4}) ?x)?(.*)", part.strip(), re.ASCII)
        assert found is not None
        seconds, count = quantity_of(found[2], SECONDS), int(found[1] or 1)
        if seconds is None or count < 1:
            raise ValueError(f"{part!r} is not a time per batch: write it such as 25ms,57ms,0.4s or 8x25ms")
        times += [seconds * 1000] * count
    if len(times) > MAX_DEVICES:
        raise ValueError(f"{len(times)} devices are too many to simulate: at most {MAX_DEVICES}")
    return tuple(times)


TIMES = Parsed("TIMES", batch_times)


def size_of(text: str) -> int:
    """Bytes of a size such as 350MB."""
    size = quantity_of(text, BYTES)
    if size is None:
        raise ValueError(f"{text!r} is not a size: write it such as 350MB or 1.5GiB")
    return round(size)


def link_of(text: str) -> tuple[float, float]:
    """A bandwidth, and after a comma the round trip, 1 ms unless given, such as 50Mbit/s,20ms; in bytes per second and
    seconds.
    """
    bandwidth, comma, trip = text.partition(",")
    bytes_per_s = quantity_of(bandwidth, BYTES_PER_S)
    round_trip_s = quantity_of(trip, SECONDS) if comma else 1e-3
    if bytes_per_s is None or round_trip_s is None:
        raise ValueError(f"{text!r} is not a bandwidth: write it such as 50Mbit/s, 10Gbit/s or 50Mbit/s,20ms")
    return bytes_per_s, round_trip_s


def failures_of(text: str) -> tuple[float, float]:
    """The mean time between failures, and after a comma that of a restart, 30 s unless given, such as 2h,5min; in
    seconds.
    """
    mtbf, comma, restart = text.partition(",")
    mtbf_s = quantity_of(mtbf, SECONDS)
    restart_s = quantity_of(restart, SECONDS) if comma else 30.0
    if mtbf_s is None or restart_s is None:
        raise ValueError(f"{text!r} is not a time between failures: write it such as 2h, 30min or 2h,5min")
    return mtbf_s, restart_s


def _choice(name: str) -> click.Choice[str]:
    return click.Choice(SETTINGS[name].choices)


@click.command()
@click.option("--ranks", type=TIMES, help="Time per batch of each device: 25ms,57ms or 8x25ms.")
@click.option("--like", metavar="JOB|RUN", help="Instead of --ranks: the times of a job, or of a run's folder.")
@click.option(
    "--model",
    type=Parsed("SIZE", size_of),
    required=True,
    help="Size of the trained parameters in float32, such as 350MB.",
)
@click.option(
    "--link",
    type=Parsed("BANDWIDTH[,RTT]", link_of),
    default="10Gbit/s,1ms",
    show_default=True,
    help="Bandwidth of each device in both directions, and round-trip time to others.",
)
@click.option(
    "--mtbf",
    type=Parsed("TIME[,RESTART]", failures_of),
    help="Mean time between failures of one device, and the time until it is back.",
)
@click.option("--add", type=TIMES, help="Also show the plan with these additional devices.")
@click.option("--epoch", type=click.IntRange(min=1, max=10**9), metavar="N", help="Batches of an epoch.")
@click.option("--policy", type=_choice("policy"), default="cadence", show_default=True, help="When ranks average.")
@click.option(
    "--averaging",
    type=_choice("averaging"),
    default="auto",
    show_default=True,
    help="Whether ranks wait for an average.",
)
@click.option("--compress", type=click.Choice(COMPRESSIONS), help="Compress what is sent.")
@click.option(
    "--optimizer",
    type=click.Choice(OPTIMIZERS),
    default="adam",
    show_default=True,
    help="For the estimate of memory: adam has two copies of the parameters, momentum one, sgd none.",
)
@address_option
@json_option
def plan(
    ranks: tuple[float, ...] | None,
    like: str | None,
    model: int,
    link: tuple[float, float],
    mtbf: tuple[float, float] | None,
    add: tuple[float, ...] | None,
    epoch: int | None,
    policy: str,
    averaging: str,
    compress: str | None,
    optimizer: str,
    address: str,
    as_json: bool,
) -> int:
    """Estimate what a job would do on devices that you may not have yet: throughput, traffic, memory and lost time.

    The coordinator's own decisions are simulated, with devices that train as fast as you say. Nothing is started.

    \b
    Examples:
      elche plan --ranks 25ms,57ms,400ms --model 350MB --link 50Mbit/s --mtbf 2h
      elche plan --ranks 8x25ms --model 350MB --link 10Gbit/s,0.2ms --add 40ms
      elche plan --like runs/digits-20260101-120000 --model 350MB --add 40ms
    """
    from elche.plan import PlanRequest
    from elche_client.commands import plan as plans

    if (ranks is None) == (like is None):
        raise click.UsageError("give the devices either as --ranks 25ms,57ms or as --like JOB")
    ranks = ranks or plans.times_like(like or "", address)
    if add and len(ranks) + len(add) > MAX_DEVICES:
        raise click.BadParameter(f"with --add there are more than {MAX_DEVICES} devices", param_hint="'--add'")
    bytes_per_s, round_trip_s = link
    request = PlanRequest(
        batch_ms=ranks,
        model_bytes=model,
        link_bytes_per_s=bytes_per_s,
        round_trip_s=round_trip_s,
        mtbf_s=mtbf[0] if mtbf else None,
        restart_s=mtbf[1] if mtbf else 0.0,
        epoch_batches=epoch,
        policy=policy,
        averaging=averaging,
        compress=compress,
        optimizer=optimizer,
    )
    return plans.show(request, add or (), as_json=as_json)

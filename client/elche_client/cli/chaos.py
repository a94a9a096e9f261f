"""The command `elche chaos`."""

from __future__ import annotations

import click

from elche_client.cli.options import SECONDS, Parsed, address_option, json_option, quantity_of
from elche_client.events import Fault

USUAL = (Fault.RANK, Fault.STOP, Fault.NETWORK)
"""Faults from which a job recovers without outside help."""


def seconds_of(text: str) -> float:
    """Seconds of a time such as 30s or 5min."""
    seconds = quantity_of(text, SECONDS)
    if seconds is None:
        raise ValueError(f"{text!r} is not a time: write it such as 30s, 5min or 2h")
    return seconds


def faults_of(text: str) -> tuple[Fault, ...]:
    """Parses kinds of faults, separated by commas. One that is named twice is drawn twice as often."""
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in list(Fault)]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is not a fault; there are {', '.join(Fault)}")
    return tuple(map(Fault, names))


TIME = Parsed("TIME", seconds_of)


@click.command()
@click.argument("job")
@click.option(
    "--mtbf", type=TIME, default="30s", show_default=True, help="Mean time between two faults, such as 10s or 5min."
)
@click.option(
    "--what",
    type=Parsed("FAULTS", faults_of),
    default=",".join(USUAL),
    show_default=True,
    help="What is broken: rank (killed), stop (stopped for 1 to 15 s), network (connections with the coordinator are "
    "cut), agent (a worker is killed), coordinator (killed), disk (the coordinator's is full for 1 to 15 s). Something "
    "must start agents and coordinator again. A fault that is named twice comes twice as often.",
)
@click.option("--seed", type=int, metavar="N", help="Repeats the order of faults of an earlier run.")
@click.option("--for", "limit", type=TIME, metavar="TIME", help="Stop after this time; default: when JOB ends.")
@address_option
@json_option
def chaos(
    job: str,
    mtbf: float,
    what: tuple[Fault, ...],
    seed: int | None,
    limit: float | None,
    address: str,
    as_json: bool,
) -> int:
    """Break parts of JOB at random moments while it trains, and report what that cost.

    The coordinator must have been started with --allow-chaos. With JOB's --audit true, and its folder on this machine,
    the report ends with the audit's verdict.

    \b
    Examples:
      elche chaos JOB
      elche chaos JOB --mtbf 10s --what rank,rank,stop --for 5min
      elche chaos JOB --what rank,agent,coordinator --seed 7
    """
    import math
    import secrets

    from elche_client.commands import chaos

    return chaos.run(
        job,
        address,
        mtbf_s=mtbf,
        faults=what,
        seed=secrets.randbelow(10_000) if seed is None else seed,
        limit_s=limit or math.inf,
        as_json=as_json,
    )

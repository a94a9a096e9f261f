"""`elche top`: all jobs and devices of a coordinator, live."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from elche.errors import Unreachable
from elche_client.client import Client
from elche_client.commands.interrupts import interrupted
from elche_client.display.formatting import printable
from elche_client.display.record import to_json
from elche_client.display.summary import host_problems, hosts_table, jobs_table, says_why, wide_console
from elche_client.events import HostView, JobState, JobView

MAX_ENDED = 5
"""Newest ended jobs that are shown below the others."""
WAITING = (JobState.QUEUED, JobState.WAITING)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Jobs and hosts at one moment."""

    address: str
    jobs: Sequence[JobView]
    hosts: Sequence[HostView]
    problem: str = ""
    """The reason why it is outdated: the coordinator does not answer; or why all jobs wait."""

    def __rich__(self) -> RenderableType:
        going = [job for job in self.jobs if not job.state.has_ended]
        ended = [job for job in self.jobs if job.state.has_ended]
        waiting = [job for job in going if job.state in WAITING]
        slots = [slot for host in self.hosts for slot in host.slots]
        busy = sum(bool(slot.job_id) for slot in slots)
        samples_per_s = sum(job.samples_per_s for job in going)
        head = (
            f"{self.address}   {busy} of {len(slots)} devices busy   {len(going) - len(waiting)} jobs run, "
            f"{len(waiting)} wait, {len(ended)} have ended   {samples_per_s:,.0f} samples/s"
        )
        parts: list[RenderableType] = [Text(printable(head), style="bold")]
        parts += [Text(printable(self.problem), style="red")] if self.problem else []
        shown = [*going, *ended[-MAX_ENDED:]]
        parts += [Text(), jobs_table(shown) if shown else Text("no jobs")]
        parts += [Text(printable(f"{job.job_id}: {job.reason}"), style="yellow") for job in going if says_why(job)]
        parts += [Text(), hosts_table(self.hosts) if self.hosts else Text("no hosts: start elche-worker")]
        parts += [Text(line, style="yellow") for line in host_problems(self.hosts)]
        return Group(*parts)


def top(address: str, *, every_s: float, as_json: bool = False) -> int:
    """Shows jobs and hosts until Ctrl-C; once if the output is not a terminal."""
    console = Console(highlight=False)
    with Client(address) as client:
        shown = _snapshot(client)
        if as_json:
            jobs, hosts = ([asdict(one) for one in some] for some in (shown.jobs, shown.hosts))
            click.echo(to_json({"jobs": jobs, "hosts": hosts}))
            return 0
        if not console.is_terminal:
            wide_console().print(shown)
            return 0
        with interrupted() as stop, Live(shown, console=console, screen=True, auto_refresh=False) as live:
            while not stop.wait(every_s):
                try:
                    shown = _snapshot(client)
                except Unreachable as error:
                    shown = Snapshot(shown.address, shown.jobs, shown.hosts, f"{error}; retrying")
                live.update(shown, refresh=True)
    return 0


def _snapshot(client: Client) -> Snapshot:
    jobs = client.jobs()
    problem = f"all jobs wait: {client.problem}" if client.problem else ""
    return Snapshot(client.address, jobs, client.hosts(), problem)

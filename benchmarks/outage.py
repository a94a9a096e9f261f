"""Kills the coordinator of a job that trains, starts it again later, and measures what that costs; and, with --acts,
does what an operator does to coordinator and workers every day.

A batch is a sleep; two ranks, 2.3:1. Prints a JSON object for each time away: batches per second from the kill until
two seconds after the new start, as a fraction of those before; ranks that were started again; and whether every sample
was committed exactly once.

    python benchmarks/outage.py                          # 3 s at defaults, 30 s with ride_out_s=35: 2 minutes
    python benchmarks/outage.py --away 3 --ride-out 10 --times 5
    python benchmarks/outage.py --acts --times 3 --write # the table of docs/reliability.md: 20 minutes

With --acts two workers with one rank each and a coordinator run as on three hosts, each with its own folder. For each
act a line of the table: in how many runs the auditor proves that every sample of every epoch is in the final model
once, and what it says of the others; samples that were trained and are not in it, so that they were trained again;
seconds in which no rank trained; and seconds from the act's begin until both ranks trained again: the median, and the
worst of several runs. A checkpoint is due every 6 s. With --write the table takes the place of the page's.
"""

import argparse
import json
import math
import os
import re
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType

import noted
from programs import end, start_agent, start_coordinator

import elche_audit
from elche_client import Client

BATCH_S = 0.02
SLOW = 2.3
BEFORE_S = 8.0
AFTER_S = 2.0


def measure(folder: Path, away_s: float, ride_out_s: float, policy: str) -> dict[str, object]:
    """One run with one outage."""
    notes = folder / "notes"
    notes.mkdir()
    rate = (1 + 1 / SLOW) / BATCH_S
    num_batches = round(rate * (BEFORE_S + away_s + AFTER_S + 15.0))
    coordinator, address = start_coordinator(folder)
    agent = start_agent(folder, address, "cpu,cpu")
    try:
        client = Client(address, reconnect_s=away_s + 60)
        environment = noted.environment(notes, BATCH_S, num_batches)
        handle = client.submit(
            noted.__file__,
            num_ranks=2,
            slow_factors={1: SLOW},
            environment=environment,
            ride_out_s=ride_out_s,
            policy=policy,
        )
        while len(noted.all_batches(notes)) < 5 * rate:
            time.sleep(0.1)
        began_s = time.monotonic()
        time.sleep(BEFORE_S)
        killed_s = time.monotonic()
        end(coordinator)
        time.sleep(away_s)
        coordinator, _ = start_coordinator(folder, listen=address)
        back_s = time.monotonic()
        time.sleep(AFTER_S)
        end_s = time.monotonic()
        result = client.job(handle.id).result()
    finally:
        end(agent, coordinator)
    made = noted.all_batches(notes)
    before = sum(began_s <= at_s < killed_s for _, at_s in made) / (killed_s - began_s)
    during = sum(killed_s <= at_s < end_s for _, at_s in made) / (end_s - killed_s)
    return {
        "away_s": round(back_s - killed_s, 2),
        "ride_out_s": ride_out_s,
        "throughput_fraction": round(during / before, 4),
        "ranks_started_again": len({pid for pid, _ in made}) - 2,
        "exact": result.committed_samples == (num_batches * noted.BATCH_SIZE,) and len(made) == num_batches,
    }


class Site:
    """A coordinator and two workers, each with its folder."""

    environment: Mapping[str, str] = MappingProxyType({})
    """Of its client."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.address = ""
        self.workers: dict[int, subprocess.Popen[bytes]] = {}
        self.start_coordinator("127.0.0.1:0")
        self.start_workers(*HOSTS)

    def client(self) -> Client:
        file, tls = (self.environment.get(name) for name in ("ELCHE_TOKEN_FILE", "ELCHE_TLS"))
        return Client(self.address, token=Path(file).read_text() if file else "", tls=tls, reconnect_s=120)

    def start_coordinator(self, listen: str = "") -> None:
        self.coordinator, self.address = start_coordinator(self.folder, listen=listen or self.address)

    def start_workers(self, *hosts: int) -> None:
        for host in hosts:
            self.workers[host] = start_agent(self.folder, self.address, "cpu", name=f"work-{host}")

    def stop_coordinator(self) -> None:
        self.coordinator.terminate()
        self.coordinator.wait()

    def stop_workers(self, *hosts: int) -> None:
        """SIGTERM to the agents, as from systemd with KillMode=mixed, or from docker."""
        for host in hosts:
            self.workers[host].terminate()
        for host in hosts:
            self.workers[host].wait()

    def signal_all_of(self, host: int, number: int) -> None:
        """A signal to the agent and to all that it has started."""
        os.killpg(self.workers[host].pid, number)
        self.workers[host].wait()

    def kill_coordinator(self) -> None:
        end(self.coordinator)

    def end(self) -> None:
        for host, worker in self.workers.items():
            if worker.poll() is None:
                self.signal_all_of(host, signal.SIGKILL)
        self.kill_coordinator()


def restart_coordinator(site: Site) -> None:
    site.stop_coordinator()
    site.start_coordinator()


def restart_worker(site: Site) -> None:
    site.stop_workers(1)
    site.start_workers(1)


def compose_up(site: Site) -> None:
    """The order of compose with rebuilt images: the coordinator is stopped first, and is back after the workers."""
    site.stop_coordinator()
    site.stop_workers(*HOSTS)
    site.start_coordinator()
    site.start_workers(*HOSTS)


def compose_down_and_up(site: Site) -> None:
    site.stop_workers(*HOSTS)
    site.stop_coordinator()
    site.start_coordinator()
    site.start_workers(*HOSTS)


def reboot_of_coordinator_and_worker(site: Site) -> None:
    """One host runs both."""
    site.stop_coordinator()
    site.stop_workers(1)
    time.sleep(AWAY_S)
    site.start_coordinator()
    site.start_workers(1)


def crash_of_a_host(site: Site) -> None:
    site.signal_all_of(1, signal.SIGKILL)
    time.sleep(AWAY_S)
    site.start_workers(1)


def requeue(site: Site) -> None:
    site.signal_all_of(1, signal.SIGTERM)
    time.sleep(AWAY_S)
    site.start_workers(1)


def crash_of_all(site: Site) -> None:
    site.kill_coordinator()
    for host in HOSTS:
        site.signal_all_of(host, signal.SIGKILL)
    time.sleep(AWAY_S)
    site.start_coordinator()
    site.start_workers(*HOSTS)


HOSTS = (0, 1)
ACT_S = 20.0
"""How long the job would take without the act."""
PAUSE_S = 0.5
"""Of a rank: ten of its batches."""
AWAY_S = 5.0
"""How long a host takes to start again."""
ACTS: dict[str, Callable[[Site], None]] = {
    "`systemctl restart` of the coordinator": restart_coordinator,
    "`systemctl restart` of one worker": restart_worker,
    "`docker compose up -d` after a rebuild": compose_up,
    "`docker compose down`, then `up -d`": compose_down_and_up,
    "the coordinator's host, with a worker, is rebooted (5 s)": reboot_of_coordinator_and_worker,
    "Slurm requeues a worker (SIGTERM to all of its processes, back after 5 s)": requeue,
    "a worker's host loses power (SIGKILL to all, back after 5 s)": crash_of_a_host,
    "all hosts lose power (the same)": crash_of_all,
}


ActOf = tuple[Callable[[Path], Site], Callable[[Site], None]]
"""How a site is made of its folder, and what is done to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one act has cost one job."""

    refuted: str
    """What the auditor says against it; empty when it proves that every sample counts once."""
    samples_again: int
    still_s: float
    both_s: float


def measure_act(folder: Path, make_site: Callable[[Path], Site], act: Callable[[Site], None]) -> Cost:
    """One job with one act."""
    notes = folder / "notes"
    notes.mkdir()
    rate = (1 + 1 / SLOW) / BATCH_S
    num_batches = round(rate * ACT_S)
    site = make_site(folder)
    try:
        client = site.client()
        while len(client.hosts()) < len(HOSTS):
            time.sleep(0.1)
        environment = noted.environment(notes, BATCH_S, num_batches)
        settings = {"audit": True, "checkpoint_every_minutes": 0.1}
        handle = client.submit(noted.__file__, num_ranks=2, slow_factors={1: SLOW}, environment=environment, **settings)
        while len(noted.all_batches(notes)) < BEFORE_S * rate:
            assert not client.get(handle.id).state.has_ended, client.get(handle.id).reason
            time.sleep(0.1)
        began_s = time.monotonic()
        act(site)
        result = site.client().job(handle.id).result()
    finally:
        site.end()
    made = noted.all_batches(notes)
    verdict = elche_audit.judge(*sorted(folder.glob(f"work-*/{handle.id}")))
    refuted = "" if elche_audit.exit_code(verdict) == 0 else "; ".join(elche_audit.lines(verdict))
    if result.committed_samples != (num_batches * noted.BATCH_SIZE,):
        refuted = f"{result.state}, {result.committed_samples}"
    times = sorted(at_s for _, at_s in made)
    return Cost(
        refuted=refuted,
        samples_again=(len(made) - num_batches) * noted.BATCH_SIZE,
        still_s=max(later - earlier for earlier, later in pairwise(times) if later >= began_s),
        both_s=_both_since(notes, began_s) - began_s,
    )


def row(name: str, costs: Sequence[Cost]) -> str:
    """The act's line of the table: each figure is the median, and the worst where there are several."""
    num_proven = sum(not cost.refuted for cost in costs)
    said = [f"{num_proven} of {len(costs)}", *(cost.refuted for cost in costs if cost.refuted)]

    def figure(values: Sequence[float], digits: int) -> str:
        shown = [statistics.median(values), *([max(values)] if len(values) > 1 else [])]
        first, *worst = ("never" if math.isinf(value) else f"{value:.{digits}f}" for value in shown)
        return f"{first} ({worst[0]})" if worst else first

    figures = (
        figure([cost.samples_again for cost in costs], 0),
        figure([cost.still_s for cost in costs], 1),
        figure([cost.both_s for cost in costs], 1),
    )
    return f"| {name} | {'; '.join(said)} | {' | '.join(figures)} |"


def measure_acts(times: int, only: str, acts: Mapping[str, ActOf]) -> str:
    """The table, of which each line is printed when it is there."""
    rows = [
        "| act | every sample once | trained again | nobody trains, s | both train again after, s |",
        "|---|---|---|---|---|",
    ]
    print(*rows, sep="\n", flush=True)
    for name, (make_site, act) in acts.items():
        if only not in name:
            continue
        costs = []
        for _ in range(times):
            with tempfile.TemporaryDirectory() as folder:
                costs.append(measure_act(Path(folder), make_site, act))
        rows.append(row(name, costs))
        print(rows[-1], flush=True)
    return "\n".join(rows) + "\n"


def write(table: str, name: str = "acts") -> None:
    """Puts the table in the place of the page's of this name."""
    path = Path(__file__).parents[1] / "docs" / "reliability.md"
    page = path.read_text()
    new, found = re.subn(rf"(?<=<!-- {name} -->\n).*?(?=<!-- end -->)", lambda _: table, page, flags=re.DOTALL)
    assert found == 1, f"{path} has no table {name}"
    path.write_text(new)


def _both_since(notes: Path, began_s: float) -> float:
    """When both ranks had made a batch after the longest pause that each had from then on; never, if one made none. A
    pause of less than `PAUSE_S` is none.
    """
    ends = []
    for rank in range(2):
        times = [began_s, *(at_s for _, at_s in noted.all_batches(notes, rank) if at_s > began_s)]
        longest = max(pairwise(times), key=lambda pair: pair[1] - pair[0], default=(began_s, math.inf))
        ends.append(longest[1] if longest[1] - longest[0] >= PAUSE_S else began_s)
    return max(ends)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--away", type=float, help="seconds until the coordinator starts again")
    parser.add_argument("--ride-out", type=float, default=10.0, help="ride_out_s of the job")
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--policy", default="cadence")
    parser.add_argument("--acts", action="store_true", help="the table of everyday acts")
    parser.add_argument("--only", default="", help="with --acts: those that have this in their name")
    parser.add_argument("--write", action="store_true", help="with --acts: into docs/reliability.md")
    options = parser.parse_args(arguments)
    if options.write and (options.only or not options.acts):
        parser.error("--write takes the whole table of --acts")
    if options.acts:
        table = measure_acts(options.times, options.only, {name: (Site, act) for name, act in ACTS.items()})
        if options.write:
            write(table)
        return
    cases = [(3.0, 10.0), (30.0, 35.0)] if options.away is None else [(options.away, options.ride_out)]
    for away_s, ride_out_s in cases * options.times:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(measure(Path(folder), away_s, ride_out_s, options.policy)), flush=True)


if __name__ == "__main__":
    main()

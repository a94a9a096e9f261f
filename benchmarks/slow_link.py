"""How near to the no-communication bound two unequal ranks train when a slow link joins them (Linux, root).

Two hosts are two network namespaces, joined by a link of 50 Mbit/s and 20 ms each way (`wan_link.py`). The coordinator
and an agent run on one, an agent on the other. Each host's batches last as long as they are told to
(`slow_link_job.py`). Prints a table in Markdown and, on the last line, one JSON object.

    python benchmarks/slow_link.py                                     # four rows, nine minutes
    python benchmarks/slow_link.py --rows overlapped --batches 2500    # a minute
    python benchmarks/slow_link.py --model-mb 10 --batches 12000
    python benchmarks/slow_link.py --model-mb 100 --batches 400 --pad-ms 250 575 --loss 0.01 --rows "overlapped, int2"
"""

import argparse
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from wan_link import WanLink

from elche_client import Client, JobHandle, JobResult, JobState, JobView, RoundReport

HERE = Path(__file__).resolve().parent
BIN = Path(sys.executable).parent
PORT = 7717
LISTENING = "elche-coordinator listening on "
FIRST_COUNTED = 2
"""The first round spreads the start state, and the second measures the ranks' speeds."""
STOP_GRACE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What differs between the rows of the table."""

    averaging: str
    compress: str = ""

    def __str__(self) -> str:
        return f"{self.averaging}, {self.compress}" if self.compress else self.averaging


SETTINGS = tuple(
    Setting(averaging=averaging, compress=compress)
    for compress in ("", "int8", "int4", "int2", "topk", "auto")
    for averaging in ("blocking", "overlapped")
)
BY_DEFAULT = SETTINGS[:4]


@dataclass(slots=True)
class Observed:
    """What a client has heard of one job."""

    rounds: list[RoundReport] = field(default_factory=list)
    pacing: list[tuple[int, str]] = field(default_factory=list)
    """Rounds committed, and how the next was decided then."""
    result: JobResult | None = None


class Hosts:
    """Starts the programs of one row on the two hosts, and ends them."""

    def __init__(self, link: WanLink, folder: Path, environment: dict[str, str]) -> None:
        self._link = link
        self._folder = folder
        self._environment = environment

    @contextmanager
    def run(self, side: int, name: str, *arguments: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
        """One of elche's programs on a host, for the length of a `with`; its log is in the folder."""
        command = self._link.command(side, [BIN / name, *arguments, "--exit-with-stdin"])
        with (self._folder / f"{name}-{side}.log").open("w") as log:
            process = subprocess.Popen(
                command,
                env=self._environment | variables,
                stdin=subprocess.PIPE,  # its end tells the program that we are gone
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(STOP_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def run(link: WanLink, folder: Path, setting: Setting, arguments: argparse.Namespace) -> Observed:
    """One job, from its processes' start to their end. The calling thread must be on host 0."""
    token = secrets.token_hex()
    hosts = Hosts(
        link,
        folder,
        {
            **os.environ,
            "ELCHE_TOKEN": token,
            "ELCHE_NUM_BATCHES": str(arguments.batches // arguments.epochs),
            "ELCHE_MODEL_MB": str(arguments.model_mb),
            "ELCHE_AVERAGING": setting.averaging,
            "ELCHE_COMPRESS": setting.compress,
        },
    )
    address = f"{link.addresses[0]}:{PORT}"
    with ExitStack() as stack:
        listen = ("--listen", address, "--http", "off", "--data", str(folder / "coordinator"))
        coordinator = stack.enter_context(hosts.run(0, "elche-coordinator", *listen))
        assert coordinator.stdout is not None
        if not coordinator.stdout.readline().startswith(LISTENING):
            raise RuntimeError((folder / "elche-coordinator-0.log").read_text())
        for side, pad_ms in enumerate(arguments.pad_ms):
            offer = ("--coordinator", address, "--devices", "cpu", "--work-dir", str(folder / f"host-{side}"))
            stack.enter_context(hosts.run(side, "elche-worker", *offer, ELCHE_PAD_MS=str(pad_ms)))
        client = stack.enter_context(Client(address, token=token))
        job = client.submit(HERE / "slow_link_job.py", num_ranks=2, epochs=arguments.epochs, output_dir=folder / "out")
        return observe(job)


def observe(job: JobHandle) -> Observed:
    """Follows a job to its end."""
    observed = Observed()
    for event in job.watch():
        match event:
            case RoundReport():
                observed.rounds.append(event)
            case JobView():
                observed.pacing.append((event.num_rounds, event.pacing))
            case JobResult():
                observed.result = event
    if observed.result is None or observed.result.state is not JobState.SUCCEEDED:
        raise RuntimeError(f"the job did not succeed: {observed.result}")
    return observed


def measure(observed: Observed) -> dict[str, Any]:
    """Means over the rounds after calibration. Pairs are of the fast rank and the slow one."""
    result, rounds = observed.result, observed.rounds[FIRST_COUNTED:]
    assert result is not None
    order = sorted(range(len(result.ranks)), key=lambda rank: result.ranks[rank].ms_per_batch)
    duration_s = sum(one.duration_s for one in rounds)
    return {
        "bound_fraction": result.bound_fraction,
        "rounds": len(rounds),
        "round_s": duration_s / len(rounds),
        "sync_ms": mean(one.sync_ms for one in rounds),
        "waited_ms": [mean(one.rank_waited_ms[rank] for one in rounds) for rank in order],
        "idle_fraction": [1 - sum(one.rank_compute_ms[rank] for one in rounds) / 1000 / duration_s for rank in order],
        "sent_bytes": [round(mean(one.rank_sent_bytes[rank] for one in rounds)) for rank in order],
        "anchor": [rounds[0].anchor, rounds[-1].anchor],
    }


COLUMNS = (
    "averaging",
    "of the bound",
    "rounds",
    "round",
    "averaging itself",
    "waited per round (fast, slow)",
    "not computing (fast, slow)",
    "sent per rank and round",
)


def table(rows: dict[str, dict[str, Any]]) -> str:
    """The rows in Markdown."""
    lines = [COLUMNS, ("---",) * len(COLUMNS)]
    for name, row in rows.items():
        waited, idle = row["waited_ms"], row["idle_fraction"]
        lines.append(
            (
                name,
                f"{row['bound_fraction']:.1%}",
                str(row["rounds"]),
                f"{row['round_s']:.2f} s",
                f"{row['sync_ms']:.0f} ms",
                f"{waited[0]:.0f} ms, {waited[1]:.0f} ms",
                f"{idle[0]:.1%}, {idle[1]:.1%}",
                f"{max(row['sent_bytes']) / 1e6:.2f} MB",
            )
        )
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-mb", type=float, default=2.5, help="parameters, in 10^6 bytes (default 2.5)")
    parser.add_argument("--batches", type=int, default=6000, help="batches in all, for each row (default 6000)")
    parser.add_argument("--epochs", type=int, default=1, help="into how many epochs they are divided (default 1)")
    parser.add_argument(
        "--pad-ms",
        type=float,
        nargs=2,
        default=(25.0, 57.5),
        metavar=("NEAR", "FAR"),
        help="per batch, on the coordinator's host and on the other (default 25 57.5)",
    )
    parser.add_argument("--rate-mbit", type=float, default=50.0, help="of the link, each way (default 50)")
    parser.add_argument("--delay-ms", type=float, default=20.0, help="of the link, each way (default 20)")
    parser.add_argument("--loss", type=float, default=0.0, help="how likely a packet is lost (default 0)")
    names, chosen = [str(setting) for setting in SETTINGS], [str(setting) for setting in BY_DEFAULT]
    parser.add_argument(
        "--rows", nargs="+", choices=names, default=chosen, metavar="ROW", help=f"of: {'; '.join(names)}"
    )
    parser.add_argument("--details", type=Path, metavar="FILE", help="write every round, as JSON")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))  # so that every `with` is left
    rows, details = {}, {}
    with WanLink(delay_ms=arguments.delay_ms, rate_mbit=arguments.rate_mbit, loss=arguments.loss) as link:
        link.enter(0)
        for setting in SETTINGS:
            if str(setting) not in arguments.rows:
                continue
            with tempfile.TemporaryDirectory() as folder:
                observed = run(link, Path(folder), setting, arguments)
            rows[str(setting)] = measure(observed)
            rounds = [asdict(one) for one in observed.rounds]
            details[str(setting)] = {"rounds": rounds, "pacing": observed.pacing}
            print(f"{setting}: {rows[str(setting)]['bound_fraction']:.1%} of the bound", file=sys.stderr)
    print(table(rows) + "\n")
    print(json.dumps(rows))
    if arguments.details:
        arguments.details.write_text(json.dumps(details, indent=1, default=bytes.hex))


if __name__ == "__main__":
    main()

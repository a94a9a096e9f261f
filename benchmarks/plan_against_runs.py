"""How near plans come to real runs, of ranks that train by sleeping: `elche plan` beside `elche run`, in pairs.

Each job is run on this machine, and planned twice: with the times per batch that were asked for, and with those that
the run has measured, which are longer on a busy machine. Throughput is counted from the third round to the last but
one. Prints a table in Markdown; where there are two figures, the run's comes first.

    python benchmarks/plan_against_runs.py                   # some four minutes
    python benchmarks/plan_against_runs.py --seconds 10      # shorter runs, more noise
"""

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from programs import elche_run

from elche.plan import Plan, PlanRequest
from elche_client.commands.plan import make_plans

HERE = Path(__file__).resolve().parent
FIRST_COUNTED = 2
"""The first round spreads the start state, and the second measures the ranks' speeds."""
MODEL_BYTES = 4 * (32 * 64 + 64 + 64 * 10 + 10)
"""Of benchmarks/padded.py."""
LOOPBACK: dict[str, float] = {"link_bytes_per_s": 1e9, "round_trip_s": 2e-4}


@dataclass(frozen=True, slots=True)
class Ran:
    """What a run has come to."""

    batches_per_s: float
    rounds_per_minute: float
    averaging_ms: float
    """Median of the averagings themselves."""
    batch_ms: tuple[float, ...]
    """Mean of each rank."""


JOBS = (
    ("two ranks, overlapped", (25.0, 57.5), "cadence", "overlapped"),
    ("two ranks, blocking", (25.0, 57.5), "cadence", "blocking"),
    ("three ranks, overlapped", (60.0, 100.0, 400.0), "cadence", "overlapped"),
    ("three ranks, averaged after every batch", (60.0, 100.0, 400.0), "sync", "blocking"),
)


def run(pads_ms: tuple[float, ...], policy: str, averaging: str, num_batches: int) -> Ran:
    """Runs the job."""
    environment = {
        "ELCHE_PAD_MS": ",".join(map(str, pads_ms)),
        "ELCHE_NUM_BATCHES": str(num_batches),
        "ELCHE_AVERAGING": averaging,
    }
    options = ["--ranks", str(len(pads_ms)), "--device", "cpu", "--policy", policy]
    _, record = elche_run(HERE / "padded.py", *options, environment=environment)
    return ran(record["round_reports"][FIRST_COUNTED:-1])


def ran(rounds: list[dict[str, Any]]) -> Ran:
    """What the reports of these rounds say."""
    took_s = sum(one["duration_s"] for one in rounds)
    batches = [sum(column) for column in zip(*(one["rank_batches"] for one in rounds), strict=True)]
    compute_ms = [sum(column) for column in zip(*(one["rank_compute_ms"] for one in rounds), strict=True)]
    times = tuple(ms / num for ms, num in zip(compute_ms, batches, strict=True))
    return Ran(sum(batches) / took_s, 60 * len(rounds) / took_s, median(one["sync_ms"] for one in rounds), times)


def row(name: str, pads_ms: tuple[float, ...], policy: str, averaging: str, seconds: float) -> str:
    """One row of the table."""
    request = PlanRequest(batch_ms=pads_ms, model_bytes=MODEL_BYTES, policy=policy, averaging=averaging, **LOOPBACK)
    asked = make_plans([request])[0]
    was = run(pads_ms, policy, averaging, round(asked.batches_per_s * seconds))
    measured = make_plans([replace(request, batch_ms=was.batch_ms)])[0]
    times = ", ".join(f"{asked_ms:g} ({ms:.1f})" for asked_ms, ms in zip(pads_ms, was.batch_ms, strict=True))
    plans = " | ".join(_beside(one, was) for one in (asked, measured))
    rounds = f"{was.rounds_per_minute:.3g}, {measured.rounds_per_minute:.3g}"
    averaging = f"{was.averaging_ms:.3g}, {1000 * measured.averaging_s:.3g}"
    return f"| {name} | {times} | {was.batches_per_s:.2f} | {plans} | {rounds} | {averaging} |"


def _beside(plan: Plan, was: Ran) -> str:
    return f"{plan.batches_per_s:.2f}, {plan.batches_per_s / was.batches_per_s - 1:+.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0, help="how long each job trains (default 30)")
    arguments = parser.parse_args()
    columns = ("job", "ms per batch (measured)", "run, batches/s", "plan", "plan of measured times", "rounds/min", "ms")
    print(f"| {' | '.join(columns)} |")
    print("|---|---|---|---|---|---|---|")
    for job in JOBS:
        print(row(*job, arguments.seconds), flush=True)


if __name__ == "__main__":
    main()

"""How much the ranks of simulated jobs train, beside an oracle that trains whenever it does not evaluate.

python benchmarks/nobody_waits.py [PART OF A NAME]
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from oracle import simulation

from elche_coordinator.simulator.oracle import run_to_fraction
from elche_coordinator.simulator.simulation import RankModel

Case = tuple[str, list[RankModel], dict[str, Any]]


def pair(fast_ms: float = 20.0, **slow: Any) -> list[RankModel]:
    """Two ranks, the second 2.3 times slower."""
    return [RankModel(batch_ms=fast_ms), RankModel(batch_ms=2.3 * fast_ms, **slow)]


def with_tail(models: list[RankModel]) -> list[RankModel]:
    """Each twentieth batch takes ten times as long."""
    return [replace(one, tail=(0.05, 10.0), jitter_fraction=0.1) for one in models]


def cases() -> Iterator[Case]:
    """Name, ranks and options of each job. Batches have ten samples."""
    for num in (1, 2, 3, 5, 23, 60):
        yield f"epochs of {num}", pair(), {"dataset_size": 10 * num, "epochs": max(10, 1200 // num)}
    for num in (5, 23, 60):
        options = {"dataset_size": 10 * num, "epochs": 3000 // num}
        yield f"epochs of {num}, batches of 2 and 4.6 ms, heavy tail", with_tail(pair(2.0)), options
    three = [RankModel(batch_ms=ms) for ms in (5.0, 25.0, 57.5)]
    yield "epochs of 23, three ranks of 5, 25 and 57 ms", three, {"dataset_size": 230, "epochs": 100}
    apart = [RankModel(batch_ms=20.0), RankModel(batch_ms=400.0)]
    yield "epochs of 23, ranks of 20 and 400 ms", apart, {"dataset_size": 230, "epochs": 60}
    slow_start = pair(first_ms=(346.0,) * 3)
    yield "slow start: three batches of 346 ms, epochs of 23", slow_start, {"dataset_size": 230, "epochs": 60}
    burst = pair(changes=((5.0, 1000.0), (8.0, 46.0)))
    yield "burst: 3 s of 1,000 ms a batch, epochs of 23", burst, {"dataset_size": 230, "epochs": 100}
    short = pair(3.0, changes=((3.0, 200.0), (4.0, 6.9)))
    yield "burst: 1 s of 200 ms a batch of 7 ms, epochs of 300", short, {"dataset_size": 300, "epochs": 200}
    for ms in (10.0, 500.0, 1600.0, 3000.0, 14000.0, 16000.0):
        options = {"dataset_size": 1000, "epochs": 20 if ms < 10000 else 300, "evaluation_ms": ms}
        yield f"evaluations of {ms:.0f} ms, epochs of 1.4 s", pair(), {"has_evaluation": True, **options}
    for ms in (300.0, 2000.0, 3000.0):
        options = {"dataset_size": 230, "epochs": 60 if ms < 1000 else 600, "evaluation_ms": ms}
        ranks = [*pair(), RankModel(batch_ms=30.0)]
        yield f"evaluations of {ms:.0f} ms, three ranks, epochs of 0.2 s", ranks, {"has_evaluation": True, **options}
    options = {"has_evaluation": True, "eval_size": 100, "evaluation_ms": 3000.0}
    yield "shared evaluations of 3 s, epochs of 0.3 s", pair(), {"dataset_size": 230, "epochs": 60, **options}
    for latency_ms in (0.5, 15.0):
        ranks = [RankModel(batch_ms=25.0), RankModel(batch_ms=57.5)]
        options = {"dataset_size": 1000, "epochs": 1, "latency_ms": latency_ms}
        yield f"a job of 100 batches, coordinator {latency_ms} ms away", ranks, options
    options = {"dataset_size": 20000, "epochs": 2, "latency_ms": 15.0}
    yield "batches of 2 and 4.6 ms, coordinator 15 ms away", pair(2.0), options


def fraction(models: list[RankModel], options: dict[str, Any], averaging: str) -> float:
    """Of one job with the defaults of such an averaging."""
    return run_to_fraction(simulation(models, options, averaging))[1]


def main() -> None:
    """Prints a row for each job whose name has the argument in it."""
    print("| | overlapped | blocking |\n|---|---|---|")
    for name, models, options in cases():
        if not sys.argv[1:] or sys.argv[1] in name:
            reached = [f"{fraction(models, options, one):.1%}" for one in ("overlapped", "blocking")]
            print(f"| {name} | {' | '.join(reached)} |", flush=True)


if __name__ == "__main__":
    main()

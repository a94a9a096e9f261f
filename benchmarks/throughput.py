"""How near to the no-communication bound two unequal ranks train: steady, and after their speeds swap.

Runs `elche run benchmarks/padded.py` and prints one JSON object. The bound is the sum over ranks of batch size over
its own mean compute time per batch, measured in the same run.

    python benchmarks/throughput.py            # about a minute
    python benchmarks/throughput.py --swap     # the speeds swap in mid-run
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from programs import elche_run

HERE = Path(__file__).resolve().parent
BATCH_SIZE = 64
PAD_MS = (25.0, 57.5)
SWAP_AFTER_ROUNDS_S = 10.0
SKIPPED_ROUNDS = 3
COUNTED_ROUNDS = 10


def run(*, num_batches: int, swap: bool, policy: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """One run; its result and its rounds."""
    environment = {"ELCHE_NUM_BATCHES": str(num_batches)}
    with tempfile.NamedTemporaryFile() as file:
        if swap:
            # The file is there from the start; its pads are reversed once it is this old (process start included).
            environment |= {"ELCHE_SWAP_FILE": file.name, "ELCHE_SWAP_AT_S": str(SWAP_AFTER_ROUNDS_S + 8)}
        options = ["--ranks", "2", "--policy", policy]
        result, record = elche_run(HERE / "padded.py", *options, environment=environment)
    return result, record["round_reports"]


def fraction_after_swap(rounds: list[dict[str, Any]]) -> float:
    """Throughput of rounds 4 to 13 after the swap as a part of the bound."""
    slower = [rank_ms(one, 0) > 1.3 * PAD_MS[0] for one in rounds]
    first = slower.index(True, 2)
    counted = rounds[first + SKIPPED_ROUNDS : first + SKIPPED_ROUNDS + COUNTED_ROUNDS]
    assert len(counted) == COUNTED_ROUNDS, f"only {len(counted)} rounds after the swap"
    bound = 0.0
    for rank in range(len(PAD_MS)):
        compute_ms = sum(one["rank_compute_ms"][rank] for one in counted)
        bound += BATCH_SIZE * sum(one["rank_batches"][rank] for one in counted) / compute_ms * 1000
    return sum(one["samples"] for one in counted) / sum(one["duration_s"] for one in counted) / bound


def rank_ms(one: dict[str, Any], rank: int) -> float:
    """Milliseconds per batch of a rank in a round; 0 when it made none."""
    return one["rank_compute_ms"][rank] / one["rank_batches"][rank] if one["rank_batches"][rank] else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--swap", action="store_true", help="swap the two speeds in mid-run")
    parser.add_argument("--batches", type=int, default=2000, help="batches in all (default 2000)")
    parser.add_argument("--policy", default="cadence", help="averaging policy (default cadence)")
    arguments = parser.parse_args()
    result, rounds = run(num_batches=arguments.batches, swap=arguments.swap, policy=arguments.policy)
    answer = {name: result[name] for name in ("samples_per_s", "bound_samples_per_s", "bound_fraction", "rounds")}
    if arguments.swap:
        answer["bound_fraction_after_swap"] = fraction_after_swap(rounds)
    print(json.dumps(answer))


if __name__ == "__main__":
    main()

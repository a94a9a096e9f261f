"""The ports of public scripts on two unequal ranks against one device, over paired seeds; a table in Markdown.

python benchmarks/ports.py                             # hours
python benchmarks/ports.py --ports vae gcn --seeds 5
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from virtual_convergence import interval

PORTS = Path(__file__).resolve().parents[1] / "examples" / "ports"
METRICS = {
    "contrastive": "knn_accuracy",
    "dcgan": "frechet",
    "detection": "f1",
    "diffusion": "energy_distance",
    "distillation": "accuracy",
    "dlrm": "log_loss",
    "dqn": "length",
    "fine_tuning": "accuracy",
    "gcn": "accuracy",
    "image_classification": "accuracy",
    "k_fold": "accuracy",
    "lora": "nats_per_byte",
    "lstm": "val_loss",
    "moco": "knn_accuracy",
    "nanogpt": "val_loss",
    "pinn": "error",
    "reinforce": "running_reward",
    "segmentation": "mean_iou",
    "vae": "negative_elbo",
}
ELCHE_RUN = (sys.executable, "-m", "elche_client", "run")
LOOPS = ("contrastive", "dqn", "lstm", "nanogpt", "pinn", "reinforce")


def metric_of(name: str, seed: int, *ranks: str) -> float:
    """The metric of the model that one training has saved: the best, where it is monitored, else the last."""
    options = ["--", "--seed", str(seed)] if name in LOOPS else ["--seed", str(seed)]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [*ELCHE_RUN, str(PORTS / f"{name}.py"), "--device", "cpu", "--json", *ranks, *options],
            capture_output=True,
            text=True,
            check=False,
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    if done.returncode:
        raise SystemExit(f"{name}, seed {seed}: {done.stderr}")
    result = json.loads(done.stdout.splitlines()[-1])
    saved = result["best_metrics"] if result.get("model_is", "").startswith("best") else result["metrics"]
    return float(saved[METRICS[name]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ports", nargs="+", choices=METRICS, default=list(METRICS), metavar="NAME")
    parser.add_argument("--seeds", type=int, default=5, help="pairs of each port, at least 2")
    options = parser.parse_args()

    print(
        "| port | metric | one device | two ranks, one 2.3 times as slow | difference (95 %) |\n|---|---|---|---|---|"
    )
    for name in options.ports:
        alone = [metric_of(name, seed, "--ranks", "1") for seed in range(options.seeds)]
        on_two = [metric_of(name, seed, "--ranks", "2", "--slow", "1=2.3") for seed in range(options.seeds)]
        differences = [two - one for one, two in zip(alone, on_two, strict=True)]
        mean, half = interval(differences)
        of_both = f"{statistics.mean(alone):.4g} | {statistics.mean(on_two):.4g}"
        print(
            f"| {name} | {METRICS[name]} | {of_both} | {mean:+.3g} ({mean - half:+.3g} to {mean + half:+.3g}) |",
            flush=True,
        )


if __name__ == "__main__":
    main()

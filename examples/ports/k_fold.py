"""Like scikit-learn's k-fold cross-validation around a training in PyTorch: one training after the other in one file,
and the mean of what they reach. `python k_fold.py --ranks 2` trains each fold as a job of its own: its ranks run this
file, and learn from the environment which fold it is; so does `elche run k_fold.py --env FOLD=3`, for one fold.
"""

import argparse
import os
from functools import cache

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import StratifiedKFold
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from elche_worker import TrainingJob

NUM_FOLDS = 5


@cache
def load_fold(fold: int, *, is_held_out: bool) -> tuple[Tensor, Tensor]:
    """Images (N, 64) and labels of a fold, or of all the others."""
    digits = load_digits()
    folds = list(StratifiedKFold(NUM_FOLDS, shuffle=True, random_state=0).split(digits.data, digits.target))
    chosen = folds[fold][1 if is_held_out else 0]
    return torch.tensor(digits.data[chosen] / 16, dtype=torch.float32), torch.tensor(digits.target[chosen])


def this_fold() -> int:
    return int(os.environ.get("FOLD", "0"))


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 10))


def train_step(model: nn.Module, batch: list[Tensor]) -> Tensor:
    images, labels = batch
    return cross_entropy(model(images), labels)


def eval_step(model: nn.Module, batch: list[Tensor]) -> dict[str, Tensor]:
    images, labels = batch
    return {"accuracy": (model(images).argmax(1) == labels).float().mean()}


job = TrainingJob(
    model=build_model,
    optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=2e-3),
    dataset=lambda: TensorDataset(*load_fold(this_fold(), is_held_out=False)),
    train_step=train_step,
    eval_dataset=lambda: TensorDataset(*load_fold(this_fold(), is_held_out=True)),
    eval_step=eval_step,
    batch_size=32,
    epochs=10,
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folds", type=int, default=NUM_FOLDS, help="how many of the five to train")
    parser.add_argument("--ranks", type=int, default=1)
    options = parser.parse_args()

    accuracies = []
    for fold in range(options.folds):
        os.environ["FOLD"] = str(fold)
        handle = job.start(ranks=options.ranks)
        epochs = list(iter(handle.next_metrics, None))
        handle.join()
        accuracies.append(epochs[-1].metrics["accuracy"])
        print(f"fold {fold}: accuracy {accuracies[-1]:.3f}", flush=True)
    print(f"mean accuracy of {options.folds} folds: {sum(accuracies) / len(accuracies):.4f}", flush=True)


if __name__ == "__main__":
    main()

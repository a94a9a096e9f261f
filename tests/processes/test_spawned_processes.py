"""Processes that a job's file starts by `multiprocessing`, to prepare its data."""

from collections.abc import Callable
from pathlib import Path

import pytest

from support.real_processes import Command

POOL = """
import multiprocessing
import os

import torch
from torch.utils.data import TensorDataset

from elche_worker import TrainingJob


def squared(number):
    return float(number**2)


def dataset():
    with multiprocessing.get_context(os.environ["HOW"]).Pool(1) as pool:
        return TensorDataset(torch.tensor(pool.map(squared, range(20)))[:, None] / 400)


def train_step(model, batch):
    return model(batch[0]).square().mean()


job = TrainingJob(
    model=lambda: torch.nn.Linear(1, 1),
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
    dataset=dataset,
    train_step=train_step,
    batch_size=10,
    epochs=1,
)
"""


@pytest.mark.parametrize(
    "how", [pytest.param("spawn", marks=pytest.mark.long(reason="forkserver imports the file, too")), "forkserver"]
)
def test_a_pool_of_any_start_method_runs_functions_of_the_file(
    elche: Callable[..., Command], tmp_path: Path, how: str
) -> None:
    """Its processes found no module with the function, ended, and were started anew, forever. From Python 3.14 on
    forkserver is the default.
    """
    path = tmp_path / "train.py"
    path.write_text(POOL)
    done = elche("run", str(path), "--ranks", "1", "--device", "cpu", "--env", f"HOW={how}")
    assert done.code == 0, done.err

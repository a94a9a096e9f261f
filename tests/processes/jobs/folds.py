"""Three trainers in turn, as cross validation has them; LOOP_MORE is how many more rank 1 sets up, LOOP_FAILS the fold
that fails on all ranks, or on LOOP_FAILS_ON, after which the next one is trained all the same; LOOP_READS ends with all
of its input.
"""

import os
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from elche_worker import Trainer

FAILS = int(os.environ.get("LOOP_FAILS", "-1"))
FAILS_HERE = os.environ.get("LOOP_FAILS_ON", os.environ.get("RANK")) == os.environ.get("RANK")
MORE = int(os.environ.get("LOOP_MORE", "0")) if os.environ.get("RANK") == "1" else 0


def train(fold: int) -> int:
    torch.manual_seed(fold)
    model = nn.Linear(4, 1)
    with Trainer.setup(model, torch.optim.SGD(model.parameters(), lr=0.01)) as trainer:
        samples = TensorDataset(torch.rand(64, 4))
        trainer.set_data_loader(DataLoader(samples, batch_size=16), forward_input="x", names=("x",))
        for epoch in trainer.epochs(2):
            for number, batch in enumerate(trainer.epoch(epoch)):
                trainer.forward_batch(batch).square().mean().backward()
                trainer.step()
                if fold == FAILS and FAILS_HERE and number == 1:
                    raise ValueError("this fold has failed")
        return trainer.num_steps


torch.set_num_threads(1)
for fold in range(3 + MORE):
    try:
        print(f"fold {fold}: {train(fold)} steps", flush=True)
    except ValueError as error:
        print(f"fold {fold}: {error}", flush=True)
if os.environ.get("LOOP_READS"):
    print(f"read {len(sys.stdin.read())} characters", flush=True)

"""A loop of the user's own in which rank 1 does something else than rank 0; LOOP_DOES says what."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from elche_worker import Trainer

DOES = os.environ["LOOP_DOES"]
IS_GIVEN = os.environ.get("LOOP_IS_GIVEN") == "1"


def main() -> None:
    torch.set_num_threads(1)
    if DOES == "break in a group of its own":
        dist.init_process_group("gloo")
    model = nn.Linear(4, 1)
    trainer = Trainer.setup(model, torch.optim.SGD(model.parameters(), lr=0.01))
    loader = DataLoader(TensorDataset(torch.rand(64, 4)), batch_size=16)
    if IS_GIVEN:
        trainer.set_data_loader(loader, forward_input="x", names=("x",))
    differs = trainer.rank == 1
    for epoch in trainer.epochs(3 if differs and DOES == "one more epoch" else 2):
        for number, batch in enumerate(trainer.epoch(epoch) if IS_GIVEN else loader):
            output = trainer.forward_batch(batch) if IS_GIVEN else trainer(*batch)
            output.square().mean().backward()
            trainer.step()
            if DOES == "other model" and epoch:
                if differs:
                    torch.nn.init.constant_(model.weight, 7.0)
                return
            if differs and number == 2:
                if DOES.startswith("break"):
                    break
                if DOES == "exit":
                    sys.exit(0)
                if DOES == "mean":
                    trainer.mean({"stop": 1.0})
                if DOES == "step":
                    trainer.step()


main()

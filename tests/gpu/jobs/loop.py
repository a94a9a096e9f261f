"""A loop of one's own on the data of `shapes.py`; ranks on one device average over gloo, unless LOOP_BACKEND says."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parent))
from shapes import BATCH_SIZE, Points, build_model, evaluate

from elche_worker import Trainer, TrainerConfig


def main() -> None:
    torch.manual_seed(0)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group(os.environ.get("LOOP_BACKEND", "gloo"))
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    config = TrainerConfig(device=os.environ["ELCHE_TEST_DEVICE"], max_anchor=int(os.environ.get("MAX_ANCHOR", "0")))
    with Trainer.setup(model, optimizer, config) as trainer:
        loader = DataLoader(Points(), batch_size=BATCH_SIZE, shuffle=True)
        trainer.set_data_loader(loader, forward_input="input", names=("input", "label"))
        trainer.set_loss_fn(lambda context: cross_entropy(context.output, context.batch["label"]))
        for epoch in trainer.epochs(2):
            for batch in trainer.epoch(epoch):
                trainer.forward_batch(batch)
                trainer.step()
        model.eval()
        digest = float(sum(one.detach().double().abs().sum() for one in model.parameters()))
        said = {"rank": trainer.rank, "digest": digest, "steps": trainer.num_steps, **evaluate(model)}
    os.write(1, (json.dumps(said) + "\n").encode())


if __name__ == "__main__":
    main()

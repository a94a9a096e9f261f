"""A loop of the user's own on made-up points; notes the samples that each rank counts. Reads what to do from LOOP_*."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from elche_worker import Trainer, TrainerConfig, record_scalar

EPOCHS = int(os.environ.get("LOOP_EPOCHS", "3"))
SLEEP_S = float(os.environ.get("LOOP_SLEEP_S", "0.002"))
FAIL_AT = int(os.environ.get("LOOP_FAIL_AT", "-1"))
EL_CHE = os.environ.get("LOOP_EL_CHE") == "1"
SHARES = os.environ.get("LOOP_EL_CHE") == "shares"
NOTES = Path(os.environ["LOOP_NOTES"])
RESTS = os.environ.get("LOOP_RESTS", "")
AWAITS = os.environ.get("LOOP_AWAITS", "")  # a file that is there once training may begin
sleep = time.sleep


def rest(seconds: float) -> None:
    """What the library waits by while the job is paused: each time is a line of a file."""
    with (NOTES / f"rests-{os.environ['RANK']}").open("a") as rests:
        print(seconds, file=rests)
    sleep(seconds)


def step_by_shares(trainer: Trainer, epoch: int, dataset: TensorDataset) -> Iterator[list[int]]:
    """Takes its part of each batch of 10 itself, in the order of the data."""
    for num_samples in trainer.shares(10, num_steps=20 * (epoch + 1)):
        start = trainer.num_steps % 20 * 10 + sum(trainer.shard_sizes[: trainer.rank])
        x, y, index = dataset[start : start + num_samples]
        loss = mse_loss(trainer(x), y)
        loss.backward()
        record_scalar("loss", loss)
        record_scalar("seven", 7.0)
        sleep(SLEEP_S * (1 + trainer.rank))
        trainer.step()
        yield index.tolist()


def main() -> None:
    if RESTS:
        time.sleep = rest
    torch.set_num_threads(1)
    torch.manual_seed(int(os.environ.get("RANK", "0")))
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    el_che = {"anchor": 3, "max_anchor": 3} if EL_CHE else {"max_anchor": 0}
    trainer = Trainer.setup(model, optimizer, TrainerConfig(**el_che, timeline=True))
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(200, 8, generator=generator)
    dataset = TensorDataset(x, x.sum(1, keepdim=True), torch.arange(200))
    shuffled = torch.Generator().manual_seed(4)
    loader = DataLoader(dataset, batch_size=10, shuffle=True, generator=shuffled)
    if not SHARES:
        trainer.set_data_loader(loader, forward_input="x", names=("x", "y", "index"))
    trainer.set_loss_fn(None if SHARES else lambda context: mse_loss(context.output, context.batch["y"]))
    while AWAITS and not Path(AWAITS).exists():
        sleep(0.01)
    with (NOTES / f"rank-{trainer.rank}").open("a") as notes:
        for epoch in trainer.epochs(EPOCHS):
            for counted in step_by_shares(trainer, epoch, dataset) if SHARES else ():
                print(epoch, *counted, file=notes, flush=True)
            for batch in () if SHARES else trainer.epoch(epoch):
                if trainer.num_steps == FAIL_AT and trainer.rank == 1:
                    raise ValueError("on purpose")
                trainer.forward_batch(batch)
                record_scalar("seven", 7.0)
                sleep(SLEEP_S * (1 + trainer.rank))
                counted = batch["index"].tolist() if batch.size else []
                trainer.step()
                print(epoch, *counted, file=notes, flush=True)
            trainer.report(mse=mse_loss(model(x), x.sum(1, keepdim=True)).item())
    digest = float(sum(one.detach().double().abs().sum() for one in model.parameters()))
    ended = json.dumps({"rank": trainer.rank, "steps": trainer.num_steps, "digest": digest})
    os.write(1, f"{ended}\n".encode())  # at once: the ranks share one pipe


if __name__ == "__main__":
    main()

"""A loop of the user's own whose model is how often each sample was trained. Reads what to do from LOOP_*."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from elche_worker import Trainer, TrainerConfig

SAMPLES = int(os.environ.get("LOOP_SAMPLES", "240"))
EPOCHS = int(os.environ.get("LOOP_EPOCHS", "3"))
SLEEP_S = float(os.environ.get("LOOP_SLEEP_S", "0.005"))
ON_LOSS = os.environ.get("LOOP_ON_LOSS", "continue")
KILL = {
    int(rank): int(step) for rank, _, step in (one.partition("=") for one in os.environ.get("LOOP_KILL", "").split())
}
"""The steps at which ranks kill themselves."""
NOTES = Path(os.environ["LOOP_NOTES"])


class Seen(nn.Module):
    """How often each sample was trained."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = nn.Parameter(torch.zeros(SAMPLES))
        self.register_buffer("batches", torch.zeros(1))

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        self.batches += 1
        picked: torch.Tensor = self.counts[index]
        return picked


class Counting(torch.optim.Optimizer):
    """Adds 1 where there is a gradient."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    one += one.grad != 0
                    self.state[one]["steps"] = self.state[one].get("steps", 0) + 1


def main() -> None:
    torch.set_num_threads(1)
    model = Seen()
    optimizer = Counting(model.parameters())
    anchor = int(os.environ.get("LOOP_EL_CHE", "0"))
    el_che = {"anchor": anchor, "max_anchor": anchor} if anchor else {"max_anchor": 0}
    trainer = Trainer.setup(model, optimizer, TrainerConfig(**el_che, on_rank_loss=ON_LOSS))
    first_rank = trainer.rank
    loader = DataLoader(
        TensorDataset(torch.arange(SAMPLES)),
        batch_size=12,
        shuffle=True,
        num_workers=int(os.environ.get("LOOP_WORKERS", "0")),
    )
    trainer.set_data_loader(loader, forward_input="index", names=("index",))
    trainer.set_loss_fn(lambda context: context.output.mean())
    sizes = []
    begun_s = time.monotonic()
    gap_s = 0.0
    for epoch in trainer.epochs(EPOCHS):
        for batch in trainer.epoch(epoch):
            trainer.forward_batch(batch)
            time.sleep(SLEEP_S * (1 + first_rank / 2))
            if KILL.get(first_rank) == trainer.num_steps:
                os.kill(os.getpid(), signal.SIGKILL)
            trainer.step()
            (NOTES / f"steps-{first_rank}").write_text(str(trainer.num_steps))
            now_s = time.monotonic()
            gap_s, begun_s = max(gap_s, now_s - begun_s), now_s
        sizes.append(trainer.mean({"size": trainer.world_size})["size"])
        trainer.report(least=model.counts.min().item())
    ended = {
        "rank": trainer.rank,
        "first": first_rank,
        "world_size": trainer.world_size,
        "sizes": sizes,
        "counts": sorted(set(model.counts.tolist())),
        "gap_s": gap_s,
    }
    os.write(1, f"{json.dumps(ended)}\n".encode())


if __name__ == "__main__":
    main()

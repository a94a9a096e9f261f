"""Like karpathy/nanoGPT train.py: batches at random offsets, a rate by iteration, `estimate_loss` now and then. The
loop takes its batch size of `trainer.shares`, and `trainer.step()` clips and steps; DDP, `ddp_world_size`,
`local_iter_num` and the checkpoints are gone. The bytes of Python's library stand for Shakespeare.
"""

import argparse
import math
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from elche_worker import Trainer, TrainerConfig

BLOCK_SIZE, WIDTH, NUM_LAYERS = 64, 64, 2
LEARNING_RATE, MIN_LR, WARMUP_ITERS = 2e-3, 2e-4, 40
EVAL_INTERVAL, EVAL_ITERS = 100, 10


class GPT(nn.Module):
    """Bytes (N, T) to logits (N, T, 256)."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(256, WIDTH)
        self.wpe = nn.Embedding(BLOCK_SIZE, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, NUM_LAYERS, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False))
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(BLOCK_SIZE), persistent=False)

    def forward(self, idx: Tensor) -> Tensor:
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        logits: Tensor = self.head(self.blocks(x, mask=self.mask, is_causal=True))
        return logits


def load_data() -> dict[str, Tensor]:
    """Bytes of some modules of Python's library; the last tenth is for validation."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = b"".join(
        (folder / f"{name}.py").read_bytes() for name in ("argparse", "ast", "inspect", "dataclasses", "typing")
    )
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return {"train": data[: len(data) * 9 // 10], "val": data[len(data) * 9 // 10 :]}


def get_batch(data: Tensor, batch_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    ix = torch.randint(len(data) - BLOCK_SIZE, (batch_size,))
    windows = torch.stack([data[i : i + BLOCK_SIZE + 1] for i in ix]).long().to(device)
    return windows[:, :-1], windows[:, 1:]


def get_lr(it: int, max_iters: int) -> float:
    if it < WARMUP_ITERS:
        return LEARNING_RATE * (it + 1) / (WARMUP_ITERS + 1)
    done = (it - WARMUP_ITERS) / max(1, max_iters - WARMUP_ITERS)
    return MIN_LR + 0.5 * (1 + math.cos(math.pi * done)) * (LEARNING_RATE - MIN_LR)


@torch.no_grad()
def estimate_loss(trainer: Trainer, data: Tensor) -> float:
    """Mean over validation batches, the same ones each time and on every rank."""
    trainer.model.eval()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        batches = [get_batch(data, 16, trainer.device) for _ in range(EVAL_ITERS)]
    losses = [cross_entropy(trainer(x).flatten(0, 1), y.flatten()).item() for x, y in batches]
    trainer.model.train()
    return sum(losses) / EVAL_ITERS


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-iters", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=16, help="shared by all ranks")
    parser.add_argument("--seed", type=int, default=1337)
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    data, model = load_data(), GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.1)
    with Trainer.setup(model, optimizer, TrainerConfig(max_grad_norm=1.0)) as trainer:
        torch.manual_seed(options.seed + trainer.rank)  # each rank draws other offsets
        for batch_size in trainer.shares(options.batch_size, num_steps=options.max_iters):
            trainer.set_lr(get_lr(trainer.num_steps, options.max_iters))
            x, y = get_batch(data["train"], batch_size, trainer.device)
            cross_entropy(trainer(x).flatten(0, 1), y.flatten()).backward()
            trainer.step()
            if trainer.num_steps % EVAL_INTERVAL == 0 or trainer.num_steps == options.max_iters:
                val_loss = estimate_loss(trainer, data["val"])
                trainer.report(val_loss=val_loss)
                if trainer.rank == 0:
                    print(f"iter {trainer.num_steps}: val_loss {val_loss:.4f}", flush=True)
        if trainer.rank == 0:
            torch.save(model.state_dict(), "ckpt.pt")


if __name__ == "__main__":
    main()

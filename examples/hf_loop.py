"""A Hugging Face model in your own loop: a tiny GPT-2 learns the bytes of Python's library, without a download.

    python examples/hf_loop.py
    torchrun --standalone --nproc-per-node 2 examples/hf_loop.py

Batches are dicts whose fields are the model's keyword arguments; the model computes the loss. It needs `pip install
transformers`. Every process prints one line of JSON at its end.
"""

import argparse
import hashlib
import json
import math
import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel, get_linear_schedule_with_warmup

from elche_worker import Trainer, TrainerConfig

MODULES = ("argparse", "ast", "contextlib", "dataclasses", "functools", "inspect", "pathlib", "random", "typing")
HELD_OUT = "statistics"
LENGTH = 64


class Blocks(Dataset[dict[str, Tensor]]):
    """Consecutive bytes of modules of Python's library, as a tokenizer and a collator would give them."""

    def __init__(self, *modules: str, limit: int | None = None) -> None:
        folder = Path(sysconfig.get_path("stdlib"))
        text = b"".join((folder / f"{module}.py").read_bytes() for module in modules)
        count = len(text) // LENGTH
        self._blocks = torch.frombuffer(bytearray(text), dtype=torch.uint8)[: count * LENGTH].view(count, LENGTH)[
            :limit
        ]

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self._blocks[index].long()
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}


def build_model() -> GPT2LMHeadModel:
    """Its output layer is its embedding: two modules with one parameter."""
    config = GPT2Config(
        vocab_size=256, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, loss_type="ForCausalLM",
    )  # fmt: skip
    return GPT2LMHeadModel(config)


@torch.no_grad()
def evaluate(trainer: Trainer, held_out: Blocks) -> float:
    """Bits per held-out byte. Every process reads all of them, so that nothing need be told."""
    trainer.model.eval()
    loader = DataLoader(held_out, batch_size=64)
    total = sum(trainer(**batch).loss.item() * len(batch["labels"]) for batch in loader)
    trainer.model.train()
    return total / len(held_out) / math.log(2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16, help="shared by all processes")
    parser.add_argument("--blocks", type=int, help="how many blocks of text to train, by default all")
    parser.add_argument("--raw", action="store_true", help="with backward in the loop itself")
    options = parser.parse_args()

    torch.manual_seed(0)
    train_set, held_out = Blocks(*MODULES, limit=options.blocks), Blocks(HELD_OUT, limit=128)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # Gradients are clipped by elche. One step for each batch, as the schedule counts them: no El Che.
    config = TrainerConfig(max_grad_norm=1.0, max_anchor=0)
    with Trainer.setup(model, optimizer, config) as trainer:
        loader = DataLoader(train_set, batch_size=options.batch_size, shuffle=True)
        trainer.set_data_loader(loader, forward_input="input_ids")
        num_steps = options.epochs * trainer.data_num_batches
        done = trainer.num_steps - 1  # -1, unless it goes on from a checkpoint
        scheduler = get_linear_schedule_with_warmup(optimizer, num_steps // 20, num_steps, last_epoch=done)
        if not options.raw:
            trainer.set_loss_fn(lambda context: context.output.loss)

        for epoch in trainer.epochs(options.epochs):
            for batch in trainer.epoch(epoch):
                output = trainer.forward_batch(batch)  # with a loss function it has called backward already
                if options.raw:
                    output.loss.backward()
                trainer.step()
                scheduler.step()
                if trainer.rank == 0 and trainer.num_steps % 50 == 0:
                    print(f"step {trainer.num_steps} of {num_steps}: loss {output.loss.item():.3f}", flush=True)
            bits = evaluate(trainer, held_out)
            trainer.report(bits_per_byte=bits)

    values = torch.cat([one.detach().cpu().reshape(-1) for one in model.parameters()])
    result = {"rank": trainer.rank, "ranks": trainer.world_size, "steps": trainer.num_steps, "bits_per_byte": bits}
    print(json.dumps({**result, "digest": hashlib.sha256(values.numpy()).hexdigest()[:16]}), flush=True)


if __name__ == "__main__":
    main()

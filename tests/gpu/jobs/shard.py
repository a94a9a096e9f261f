"""A model divided over NCCL among as many processes as there are: one, on one GPU."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from shapes import BATCH_SIZE, Points, build_model, train_step

from elche_worker.sharding import Strategy, shard


def main() -> None:
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    device = torch.device(os.environ["ELCHE_TEST_DEVICE"])
    store = dist.HashStore()
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", store=store, rank=0, world_size=1
    )
    torch.manual_seed(0)
    losses = []
    for strategy in (Strategy.FULL_SHARD, Strategy.SHARD_GRAD_OP, Strategy.NO_SHARD):
        model = build_model().requires_grad_(True)
        sharded = shard(model, strategy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        points = Points()
        of_strategy = []
        for start in range(0, 100 * BATCH_SIZE, BATCH_SIZE):
            part = slice(start, start + BATCH_SIZE)
            loss = train_step(model, [points.points[part].to(device), points.labels[part].to(device)])
            loss.backward()
            sharded.sync_gradients()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            of_strategy.append(loss.item())
        losses.append([sum(of_strategy[:10]) / 10, sum(of_strategy[-10:]) / 10])
    print(json.dumps(losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""A job that keeps what is its own in `state`: a mean of the weights, and a count of epochs."""

import os
import time

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

from elche_worker import TrainingJob, this_rank

NUM_SAMPLES = 600


def dataset() -> TensorDataset:
    source = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(NUM_SAMPLES, 8, generator=source), torch.randn(NUM_SAMPLES, 1, generator=source))


def train_step(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    time.sleep(0.004)
    return nn.functional.mse_loss(nn.functional.dropout(model(batch[0]), 0.2), batch[1])


def epoch_fn(rank, epoch: int) -> None:
    rank.state["begun"][epoch] = rank.state["begun"].get(epoch, 0) + 1


def metrics_fn(metrics) -> None:
    heard = this_rank().state["heard"]
    heard[metrics.epoch] = metrics.loss
    print(f"heard of {sorted(heard)}", flush=True)


def after_round(model: nn.Module, version: int) -> None:
    rank = this_rank()
    rank.state["ema"].update_parameters(model)
    averaged = int(rank.state["ema"].n_averaged)
    print(f"pid {os.getpid()} rank {rank.rank} version {version} averaged {averaged}", flush=True)


def evaluate(model: nn.Module) -> dict[str, float]:
    state = this_rank().state
    mean = torch.cat([one.reshape(-1) for one in state["ema"].module.parameters()])
    counts = {"averaged": float(state["ema"].n_averaged), "begun": len(state["begun"]), "heard": len(state["heard"])}
    return {"mean": float(mean.double().sum()), "losses": sum(state["heard"].values()), **counts}


job = TrainingJob(
    model=lambda: nn.Linear(8, 1),
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
    dataset=dataset,
    train_step=train_step,
    state=lambda model: {"ema": AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)), "begun": {}, "heard": {}},
    epoch_fn=epoch_fn,
    metrics_fn=metrics_fn,
    after_round=after_round,
    evaluate=evaluate,
    batch_size=4,
    epochs=3,
)

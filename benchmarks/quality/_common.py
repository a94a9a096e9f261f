"""What the tasks of this folder have in common: samples of which the last are held out, and a rate that falls to 0."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from elche_worker import Progress, TrainingJob

Samples = Sequence[Tensor]
Loss = Callable[[nn.Module, Samples], Tensor]


def fall(now: Progress) -> float:
    """From 1 to 0 in a straight line."""
    return max(0.0, 1 - now.fraction)


def job_of(
    samples: Callable[[int], Samples],
    num_held_out: int,
    *,
    model: Callable[[], nn.Module],
    optimizer: Callable[[float], Callable[[nn.Module], Any]],
    loss: Loss,
    metric: Loss | None = None,
    dataset: Callable[..., TensorDataset] = TensorDataset,
    **fields: Any,
) -> Callable[..., TrainingJob]:
    """The job by (learning rate, seed, times the usual number of samples, fields of `TrainingJob`).

    It trains on all samples of the seed but the last `num_held_out`; its metric "loss" is that of these.
    """

    def job(rate: float, seed: int, length: float, **more: Any) -> TrainingJob:
        tensors = samples(seed)
        at = len(tensors[0]) - num_held_out
        num = round(at * length)
        trained, held_out = [one[:num] for one in tensors], [one[at:] for one in tensors]

        def build() -> nn.Module:
            torch.set_num_threads(1)
            return model()

        settings: dict[str, Any] = {"schedule": fall, "epochs": 1, "train_step": loss, **fields, **more}
        return TrainingJob(
            model=build,
            optimizer=optimizer(rate),
            dataset=lambda: dataset(*trained),
            evaluate=lambda model: {"loss": (metric or loss)(model, held_out).item()},
            **settings,
        )

    return job


def sgd(rate: float, momentum: float = 0.0) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum)


def adam(rate: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.Adam(model.parameters(), lr=rate)


def momentum_sgd(rate: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return sgd(rate, momentum=0.9)

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
    samples: Samples,
    *,
    num_held_out: int,
    length: float,
    model: Callable[[], nn.Module],
    loss: Loss,
    metric: Callable[[nn.Module, Samples], Tensor] | None = None,
    dataset: Callable[..., TensorDataset] = TensorDataset,
    **fields: Any,
) -> TrainingJob:
    """A job on all samples but the last, which are held out; its metric "loss" is theirs."""
    at = len(samples[0]) - num_held_out
    num = round(at * length)
    trained, held_out = [one[:num] for one in samples], [one[at:] for one in samples]

    def build() -> nn.Module:
        torch.set_num_threads(1)
        return model()

    settings: dict[str, Any] = {"schedule": fall, "epochs": 1, "train_step": loss, **fields}
    return TrainingJob(
        model=build,
        dataset=lambda: dataset(*trained),
        evaluate=lambda model: {"loss": (metric or loss)(model, held_out).item()},
        **settings,
    )


def sgd(rate: float, momentum: float = 0.0) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum)


def adam(rate: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.Adam(model.parameters(), lr=rate)

"""One training step, and the parts that it needs, built from a user's job and checked."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from elche.errors import InvalidJob
from elche_worker.job import TrainingJob
from elche_worker.loading import describe_raised
from elche_worker.scalars import Sum, take_scalars


def build_model(job: TrainingJob, device: torch.device, file_name: str) -> tuple[nn.Module, Optimizer]:
    """The model on its device, and its optimizer. Raises `InvalidJob`, or `UserCodeRaised`."""
    torch.manual_seed(job.seed)
    try:
        model = job.model()
    except BaseException as error:
        raise describe_raised(error, file_name) from None
    if not isinstance(model, nn.Module):
        raise InvalidJob(f"{file_name}: model() must return a torch.nn.Module, not {type(model).__name__}")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InvalidJob(f"{file_name}: model() returned a model without parameters to train")
    model.to(device)
    try:
        optimizer = job.optimizer(model)
    except BaseException as error:
        raise describe_raised(error, file_name) from None
    if not isinstance(optimizer, Optimizer):
        raise InvalidJob(f"{file_name}: optimizer() must return a torch Optimizer, not {type(optimizer).__name__}")
    return model, optimizer


def train_batch(
    job: TrainingJob, model: nn.Module, optimizer: Optimizer, data: Any, file_name: str
) -> tuple[torch.Tensor, dict[str, Sum]]:
    """Forward, backward and optimizer step; returns the loss and what was recorded. Waits for no device."""
    loss, scalars = _loss_of(job.train_step(model, data), file_name)
    loss.backward()  # type: ignore[no-untyped-call]
    if job.max_grad_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), job.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss, {**take_scalars(), **scalars}


class LearningRates:
    """The optimizer's learning rates, set before each batch: base rate times schedule times scale (SPEC W4)."""

    def __init__(
        self, optimizer: Optimizer, base: list[float], schedule: Callable[[int], float] | None, scale: float
    ) -> None:
        self._groups = list(zip(optimizer.param_groups, base, strict=True))
        self._schedule = schedule
        self._scale = scale
        self.set(0)

    def set(self, position: int) -> None:
        """The rates at a position, in batches of all ranks so far."""
        if self._schedule is None and self._scale == 1:
            return
        factor = self._scale * (self._schedule(position) if self._schedule else 1.0)
        for group, base in self._groups:
            group["lr"] = base * factor


def evaluate(job: TrainingJob, model: nn.Module, file_name: str) -> dict[str, float]:
    """The user's metrics of the model, in eval mode and without gradients; leaves it in train mode."""
    assert job.evaluate is not None
    model.eval()
    with torch.no_grad():
        returned = job.evaluate(model)
    model.train()
    if not isinstance(returned, Mapping):
        raise InvalidJob(f"{file_name}: evaluate() must return a dict of numbers, not {type(returned).__name__}")
    return {str(name): float(value) for name, value in returned.items()}


def _loss_of(returned: Any, file_name: str) -> tuple[torch.Tensor, dict[str, Sum]]:
    """The loss of what the train step returned, and the scalars beside it."""
    values = dict(returned) if isinstance(returned, Mapping) else {"loss": returned}
    loss = values.pop("loss", None)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise InvalidJob(
            f"{file_name}: train_step() must return a scalar loss, or a dict with one at 'loss', not {got}"
        )
    if not loss.requires_grad:
        raise InvalidJob(f"{file_name}: train_step() returned a loss that no parameter has part in (no gradient)")
    return loss, {name: (_plain(name, value, file_name), 1) for name, value in values.items()}


def _plain(name: str, value: Any, file_name: str) -> float | torch.Tensor:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.detach().reshape(())
    if isinstance(value, int | float):
        return float(value)
    got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
    raise InvalidJob(f"{file_name}: train_step() returned {name!r}, which must be a number, not {got}")

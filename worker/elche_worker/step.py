"""One training step, and the parts that it needs, built from a user's job and checked."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from elche.errors import InvalidJob
from elche_worker.job import TrainingJob
from elche_worker.loading import describe_raised
from elche_worker.scalars import Sum, take_scalars

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


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


class TrainStep:
    """Forward, backward and optimizer step of one batch, in the job's precision and in as many parts as it says."""

    def __init__(
        self, job: TrainingJob, model: nn.Module, optimizer: Optimizer, device: torch.device, file_name: str
    ) -> None:
        self.precision = possible_precision(job.precision, device)
        """What the device can do of what the job asks for."""
        self._job = job
        self._model = model
        self._called: Any = torch.compile(model) if job.compile else model
        self._optimizer = optimizer
        self._device_type = device.type
        self._file_name = file_name
        self._scaler = torch.amp.GradScaler(device.type, enabled=self.precision == "fp16")

    def run(self, data: Any, size: int) -> tuple[torch.Tensor, dict[str, Sum]]:
        """Trains one batch of `size` samples; returns the loss and what was recorded.

        Waits for no device, but in fp16, where a step depends on whether its gradients are finite.
        """
        parts = split(data, size, self._job.accumulate) if self._job.accumulate > 1 else [(data, size)]
        total: torch.Tensor | None = None
        scalars: dict[str, Sum] = {}
        for part, part_size in parts:
            with self._autocast():
                loss, recorded = _loss_of(self._job.train_step(self._called, part), self._file_name)
            loss = loss if len(parts) == 1 else loss * (part_size / size)
            self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            total = loss if total is None else total.detach() + loss.detach()
            for name, (value, count) in recorded.items():
                old, old_count = scalars.get(name, (0.0, 0))
                scalars[name] = (old + value, old_count + count)
        assert total is not None
        self._step()
        return total, {**take_scalars(), **scalars}

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.precision == "fp32":
            return nullcontext()
        return torch.autocast(self._device_type, dtype=DTYPES[self.precision])

    def _step(self) -> None:
        if self._job.max_grad_norm is not None:
            self._scaler.unscale_(self._optimizer)
            nn.utils.clip_grad_norm_(self._model.parameters(), self._job.max_grad_norm)
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad(set_to_none=True)


def possible_precision(wanted: str, device: torch.device) -> str:
    """The wanted precision, or "fp32" where the device has no fast form of it."""
    if wanted == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return "fp32"
    if wanted == "fp16" and device.type != "cuda":
        return "fp32"
    return wanted


def split(data: Any, size: int, num_parts: int) -> list[tuple[Any, int]]:
    """A batch of `size` samples as parts of nearly equal size: what has an entry for each sample is cut, else kept."""
    bounds = [size * index // num_parts for index in range(num_parts + 1)]
    return [(_cut(data, size, start, end), end - start) for start, end in pairwise(bounds) if end > start]


def _cut(data: Any, size: int, start: int, end: int) -> Any:
    if isinstance(data, torch.Tensor):
        return data[start:end] if data.dim() and data.shape[0] == size else data
    if isinstance(data, Mapping):
        return {key: _cut(value, size, start, end) for key, value in data.items()}
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(_cut(value, size, start, end) for value in data))
    if isinstance(data, list | tuple):
        is_per_sample = len(data) == size and not any(isinstance(one, torch.Tensor) for one in data)
        return data[start:end] if is_per_sample else type(data)(_cut(value, size, start, end) for value in data)
    return data


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

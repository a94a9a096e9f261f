"""The number of samples in a batch: one for the job, or one for each kind of device."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from elche.errors import InvalidJob
from elche.settings import SETTINGS
from elche_worker.device.kinds import kind_of
from elche_worker.model.trial import unchanged
from elche_worker.user.device import Device
from elche_worker.user.job import JobDefinition

AUTO_BATCH_SIZE = 256
"""Samples with which the trial of `batch_size="auto"` begins; it is halved until a batch fits."""


def nominal_batch_size(job: JobDefinition, dataset_size: int) -> int:
    """The job's nominal batch size, equal on all ranks: that of an unnamed device, or the smallest that is given.

    Steps and `drop_last` count in it. Raises `InvalidJob`.
    """
    given = job.batch_size
    if isinstance(given, int):
        return given
    if isinstance(given, Mapping):
        sizes = [_number(size, dataset_size) for size in given.values()]
        return _number(given[""], dataset_size) if "" in given else min(sizes)
    return _of_device(given, Device(device="cpu"), dataset_size)


def rank_batch_size(job: JobDefinition, device: Device, dataset_size: int) -> int:
    """The batch size on a device before any trial. Raises `InvalidJob`, naming the device."""
    if job.manual_optimization and is_auto(job, device):
        raise InvalidJob("batch_size 'auto' has no effect with manual_optimization: give a number")
    return _of_device(_given(job, device), device, dataset_size)


def is_auto(job: JobDefinition, device: Device) -> bool:
    """True if the batch size on a device is chosen by its memory."""
    given = _given(job, device)
    return bool((_called(given, device) if callable(given) else given) == "auto")


def _given(job: JobDefinition, device: Device) -> Any:
    """The job's `batch_size` for this device: a number, "auto" or a function."""
    given = job.batch_size
    if not isinstance(given, Mapping):
        return given
    names = [name for name in given if name in device.label]
    if not names:
        known = ", ".join(map(repr, given))
        raise InvalidJob(f'batch_size names no part of "{device.label}"; give "" for all other devices: {known}')
    return given[max(names, key=len)]


def _of_device(given: Any, device: Device, dataset_size: int) -> int:
    """The batch size on a device, for a number, "auto" or a function."""
    try:
        return _number(_called(given, device) if callable(given) else given, dataset_size)
    except InvalidJob as error:
        raise InvalidJob(f"{error} (batch_size of the device {device.label})") from None


def _called(given: Callable[[Device], Any], device: Device) -> Any:
    try:
        return given(device)
    except Exception as error:
        raise InvalidJob(
            f"batch_size of the device {device.label} raised {type(error).__name__}: {error}; it must "
            "return a number for every device, and for cpu, in whose batches steps and drop_last are counted"
        ) from None


def _number(size: Any, dataset_size: int) -> int:
    SETTINGS["batch_size"].check(size)
    return min(AUTO_BATCH_SIZE, dataset_size) if size == "auto" else int(size)


def largest_that_fits(
    size: int, train: Callable[[int], None], model: nn.Module, is_full: Callable[[Exception], bool]
) -> int:
    """Halves the batch size until a batch fits into memory. `train` makes gradients without a step; afterwards the
    model's buffers, gradients and random numbers are as before.
    """
    with unchanged(model):
        while True:
            try:
                train(size)
                return size
            except Exception as error:
                if not is_full(error) or size == 1:
                    raise
            # Outside the handler: there the error's traceback still holds the tensors of the batch that did not fit.
            size = size // 2
            # PyTorch's allocator frees its cache for itself, but not for libraries such as cuBLAS.
            kind_of(next(model.parameters()).device).empty_cache()

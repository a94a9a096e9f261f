"""Batches on trial: forward and backward of which nothing stays in the model."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from elche_worker.device.rng import capture_rng_state, restore_rng_state


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Afterwards the model's buffers, its gradients (none) and random numbers are as before."""
    buffers = copy.deepcopy(dict(model.named_buffers()))
    state = capture_rng_state()
    try:
        yield
    finally:
        restore_rng_state(state)
        for parameter in model.parameters():
            parameter.grad = None
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name in buffers:  # the first forward may have made others
                    buffer.copy_(buffers[name])

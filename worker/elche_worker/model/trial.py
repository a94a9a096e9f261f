"""Trial batches: forward and backward passes after which the model is restored."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from elche_worker.device.rng import kept_random


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Context after which the model's buffers and all random generators are as before, and its gradients None."""
    buffers = copy.deepcopy(dict(model.named_buffers()))
    try:
        with kept_random():
            yield
    finally:
        for parameter in model.parameters():
            parameter.grad = None
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name in buffers:  # the first forward may have created others
                    buffer.copy_(buffers[name])

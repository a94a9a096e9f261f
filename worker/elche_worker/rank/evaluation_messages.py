"""Messages of evaluations between ranks and the coordinator: metrics, and tensors as little-endian bytes."""

from collections.abc import Mapping

import numpy as np
import torch

from elche.errors import ElcheError
from elche.v1 import rank_pb2
from elche_worker.model.evaluation import Evaluated


def evaluated_message(epoch: int, done: Evaluated, duration_ms: float, *, is_made: bool = False) -> rank_pb2.Evaluated:
    """The message with a rank's part of an evaluation or, if `is_made`, with metrics of all ranks' summed tensors."""
    return rank_pb2.Evaluated(
        epoch=epoch,
        duration_ms=duration_ms,
        sums={name: rank_pb2.ScalarSum(sum=float(total), count=count) for name, (total, count) in done.sums.items()},
        tensors={name: _message_of(tensor) for name, tensor in done.tensors.items()},
        is_made=is_made,
    )


def tensors_of(messages: Mapping[str, rank_pb2.TensorSum]) -> dict[str, torch.Tensor]:
    """The sums as tensors. Raises `ElcheError` for one whose bytes are not of its shape."""
    tensors = {}
    for name, message in messages.items():
        try:
            tensors[name] = _tensor_of(message)
        except ValueError as error:
            raise ElcheError(f"the coordinator has sent sums of {name!r} that are not a tensor: {error}") from None
    return tensors


def _message_of(tensor: torch.Tensor) -> rank_pb2.TensorSum:
    is_integer = not tensor.is_floating_point()
    data = tensor.numpy().astype("<i8" if is_integer else "<f8", copy=False).tobytes()
    return rank_pb2.TensorSum(shape=tuple(tensor.shape), is_integer=is_integer, data=data)


def _tensor_of(message: rank_pb2.TensorSum) -> torch.Tensor:
    values = np.frombuffer(message.data, "<i8" if message.is_integer else "<f8")
    native = values.astype(np.int64 if message.is_integer else np.float64)  # a copy, which may be written to
    return torch.from_numpy(native.reshape(tuple(message.shape)))

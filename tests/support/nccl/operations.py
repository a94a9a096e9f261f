"""What a collective takes, and how gloo computes it in the host's memory."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from support.nccl import words
from support.nccl.communicator import Plain
from support.simulated_cuda import OnDevice

TYPES = (
    *(torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)
"""`ncclDataType` of NCCLUtils.hpp, without the types of 8 bits."""
OPERATIONS = ("SUM", "AVG", "MIN", "MAX", "PRODUCT")
"""`ncclOp`."""


def only(tensors: Any) -> Any:
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise RuntimeError(words.SEVERAL_DEVICES)
    return tensors[0]


def check(tensor: Any) -> None:
    """`check_gpu_single_tensor`."""
    if not isinstance(tensor, OnDevice) or tensor.is_sparse:
        raise ValueError(words.NOT_ON_DEVICE)
    if not tensor.inner.is_contiguous():
        raise ValueError(words.NOT_CONTIGUOUS)


def check_type(tensor: Any) -> None:
    """`getNcclDataType`, which is called when the communicator is there."""
    if tensor.dtype not in TYPES:
        raise TypeError(words.unsupported_type(tensor.dtype))


def reduction(options: Any, size: int) -> Callable[[Any, Plain], Plain]:
    """`getNcclReduceOp`, here before there is a communicator. gloo has no average."""
    operation = options.reduceOp if options is not None else dist.ReduceOp.SUM
    name = next((name for name in dist.ReduceOp.RedOpType.__members__ if operation == getattr(dist.ReduceOp, name)), "")
    if name not in OPERATIONS:
        raise ValueError(words.unsupported_operation(name))

    def reduce(gloo: Any, own: Plain) -> Plain:
        how = dist.AllreduceOptions()
        how.reduceOp = getattr(dist.ReduceOp, "SUM" if name == "AVG" else name)
        gloo.allreduce([own], how).wait()
        return own.div_(size) if name == "AVG" else own

    return reduce


def broadcast(gloo: Any, own: Plain, root: int) -> Plain:
    how = dist.BroadcastOptions()
    how.rootRank, how.rootTensor = root, 0
    gloo.broadcast([own], how).wait()
    return own


def gather(gloo: Any, own: Plain, size: int) -> list[Plain]:
    received = [torch.empty_like(own) for _ in range(size)]
    gloo.allgather([received], [own]).wait()
    return received

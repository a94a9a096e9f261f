"""The stand-in within PyTorch's process groups: `init_process_group("cpu:gloo,cuda:nccl")`, `new_group`, `all_reduce`.

What such a group registers must be a backend in C++. So it gets PyTorch's fake one, whose collectives do nothing and
are never called: those on tensors of the device reach the dispatcher, and go from there to the stand-in.
"""

import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch._C._distributed_c10d as c10d
from torch._C._distributed_c10d import FakeProcessGroup, FakeWork
from torch.distributed.distributed_c10d import ProcessGroup

from support.nccl.group import ProcessGroupNCCL

Replace = Callable[[Any, str, Any], None]
CUDA = "cuda"

_backends: "weakref.WeakKeyDictionary[Any, ProcessGroupNCCL]" = weakref.WeakKeyDictionary()
"""By process group."""

_works: list[Any] = []
"""A box keeps the C++ half of a work alone: without the other, `wait` would wait for good."""


def put_in_place(replace: Replace) -> None:
    """From now on process groups take the stand-in."""
    register, get = ProcessGroup._register_backend, ProcessGroup._get_backend
    shutdown, abort = ProcessGroup.shutdown, ProcessGroup.abort

    def register_ours(group: Any, of: torch.device, kind: Any, backend: Any = None) -> None:
        if isinstance(backend, ProcessGroupNCCL):
            _backends[group] = backend
            backend.bound_device_id = group.bound_device_id  # `ProcessGroup::setBackend`
            backend = FakeProcessGroup._create_internal(group.rank(), group.size())
        register(group, of, kind, backend)

    def get_ours(group: Any, of: Any) -> Any:
        ours = _backends.get(group)
        return ours if ours is not None and torch.device(of).type == CUDA else get(group, of)

    def shut_down(group: Any) -> None:
        if group in _backends:
            _backends.pop(group).shutdown()
        shutdown(group)

    def abort_all(group: Any) -> None:
        if group in _backends:
            _backends[group].abort()
        abort(group)

    replace(ProcessGroup, "_register_backend", register_ours)
    replace(ProcessGroup, "_get_backend", get_ours)
    replace(ProcessGroup, "shutdown", shut_down)
    replace(ProcessGroup, "abort", abort_all)


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """A collective of the dispatcher's on tensors of the device (Ops.cpp): what it returns has the work at its end."""
    names = [one.name for one in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    group = ProcessGroup.unbox(given["process_group"])
    backend = _backends[group]
    name = func._schema.name.removeprefix("c10d::")
    outputs, work = COLLECTIVES[name](backend, given)
    if work is None:
        boxed = FakeWork().boxed()
    else:
        _works.append(work)
        boxed = work.boxed()
    return boxed if len(func._schema.returns) == 1 else (outputs, boxed)


def _options(options: Any, given: dict[str, Any]) -> Any:
    options.asyncOp = given.get("async_op", True)
    if given.get("timeout", -1) >= 0:
        options.timeout = timedelta(milliseconds=given["timeout"])
    if "reduce_op" in given:
        reduce: Any = given["reduce_op"]  # boxed
        options.reduceOp = c10d.ReduceOp(c10d.ReduceOp.RedOpType(reduce.op()))
    if "root_rank" in given:
        options.rootRank, options.rootTensor = given["root_rank"], given["root_tensor"]
    return options


def _allreduce(backend: ProcessGroupNCCL, given: dict[str, Any]) -> Any:
    return given["tensors"], backend.allreduce(given["tensors"], _options(c10d.AllreduceOptions(), given))


def _broadcast(backend: ProcessGroupNCCL, given: dict[str, Any]) -> Any:
    return given["tensors"], backend.broadcast(given["tensors"], _options(c10d.BroadcastOptions(), given))


def _allgather(backend: ProcessGroupNCCL, given: dict[str, Any]) -> Any:
    outputs, options = given["output_tensors"], _options(c10d.AllgatherOptions(), given)
    return outputs, backend.allgather(outputs, given["input_tensors"], options)


def _allgather_base(backend: ProcessGroupNCCL, given: dict[str, Any]) -> Any:
    output, options = given["output_tensor"], _options(c10d.AllgatherOptions(), given)
    return output, backend._allgather_base(output, given["input_tensor"], options)


def _reduce_scatter_base(backend: ProcessGroupNCCL, given: dict[str, Any]) -> Any:
    output, options = given["output_tensor"], _options(c10d.ReduceScatterOptions(), given)
    return output, backend._reduce_scatter_base(output, given["input_tensor"], options)


def _alltoall_base(backend: ProcessGroupNCCL, given: dict[str, Any]) -> Any:
    options = _options(c10d.AllToAllOptions(), given)
    sizes = given["output_split_sizes"], given["input_split_sizes"]
    return None, backend.alltoall_base(given["output"], given["input"], *sizes, options)


def _barrier(backend: ProcessGroupNCCL, given: dict[str, Any]) -> Any:
    return None, backend.barrier(_options(c10d.BarrierOptions(), given))


COLLECTIVES: dict[str, Callable[[ProcessGroupNCCL, dict[str, Any]], Any]] = {
    "allreduce_": _allreduce,
    "broadcast_": _broadcast,
    "allgather_": _allgather,
    "_allgather_base_": _allgather_base,
    "_reduce_scatter_base_": _reduce_scatter_base,
    "alltoall_base_": _alltoall_base,
    "barrier": _barrier,
}

"""Writes tensors to safetensors files without holding the interpreter's lock, and flattens nested state to tensors and
JSON.

The library's own writer copies every tensor and holds the lock meanwhile; this one writes from the tensors' memory, so
that a rank trains on. Files are read with the library.
"""

import functools
import hashlib
import json
import os
import sys
from collections import namedtuple
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

CHUNK_BYTES = 16 << 20
"""Bytes that are hashed and written in one call. Both release the interpreter's lock for calls of this size."""
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""Names of the safetensors format (huggingface/safetensors, README, "Format")."""


@dataclass(frozen=True, slots=True)
class Piece:
    """This process's part of a sharded tensor, copied to host memory."""

    local: torch.Tensor
    shape: torch.Size
    """Shape of the whole tensor; strides are of the whole tensor, too."""
    stride: tuple[int, ...]
    placements: tuple[Any, ...]

    @classmethod
    def of(cls, tensor: Any, local: torch.Tensor) -> "Piece":
        """A piece of a sharded tensor, from its local part."""
        return cls(local, tensor.shape, tensor.stride(), tensor.placements)


def is_divided(value: Any) -> bool:
    """True for a `DTensor`: each process of a replica group has a part of it."""
    return isinstance(value, torch.Tensor) and hasattr(value, "device_mesh")


def local_of(value: Any) -> torch.Tensor:
    """This process's part of a sharded tensor; any other tensor itself."""
    if isinstance(value, Piece):
        return value.local
    local: torch.Tensor = value.detach().to_local() if is_divided(value) else value
    return local


def placed(value: Any, target: Any) -> Any:
    """The value, sharded like the target: each process takes its part."""
    if not is_divided(target) or is_divided(value) or value.shape != target.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    # None: each process cuts its part from its own copy of the value, and nothing is sent.
    return distribute_tensor(value.to(target.device), target.device_mesh, target.placements, src_data_rank=None)


def assign(target: torch.Tensor, value: torch.Tensor) -> None:
    """Copies a value of a round into a tensor of the model; rounds have complex numbers as pairs."""
    (torch.view_as_real(target) if target.is_complex() and not value.is_complex() else target).copy_(value)


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> str:
    """Writes contiguous CPU tensors as a safetensors file and makes it durable; returns its SHA-256.

    Raises `ValueError`, naming the tensor, for a type that the format does not have.
    """
    # Files are little-endian, and values are written as they are in memory.
    assert sys.byteorder == "little"
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{name} is {tensor.dtype}, which no safetensors file can hold")
        size_bytes = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, position + size_bytes],
        }
        position += size_bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that the values are aligned to 8 bytes
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for part in (len(text).to_bytes(8, "little"), text):
            digest.update(part)
            file.write(part)
        for tensor in tensors.values():
            array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
            raw = memoryview(array)
            for start in range(0, len(raw), CHUNK_BYTES):
                chunk = raw[start : start + CHUNK_BYTES]
                digest.update(chunk)
                file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def is_plain(value: Any) -> bool:
    """True for a tensor that is neither sparse nor quantized."""
    return isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_quantized


def is_wrapper(tensor: torch.Tensor) -> bool:
    """True for a tensor that consists of others (torch's "wrapper subclass"), such as one of eight bits of torchao."""
    return hasattr(tensor, "__tensor_flatten__")


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, flat; a view if it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def can_hold(value: Any) -> bool:
    """True for a plain tensor of a dtype that the safetensors format has."""
    return is_plain(value) and value.dtype in DTYPES


def described(value: Any) -> str:
    """Describes a value in messages on values that files cannot hold."""
    if not isinstance(value, torch.Tensor):
        return f"of type {type(value).__name__}"
    return f"{value.dtype}" if value.layout == torch.strided else f"{value.layout}"


def flattened(
    value: Any,
    tensors: dict[str, torch.Tensor],
    pieces: dict[str, Piece] | None = None,
    *,
    where: str = "the state",
) -> Any:
    """Flattens a nested value to JSON: moves its tensors into `tensors` and pieces into `pieces`, and puts their names
    in their places.

    Dictionaries may have keys of any type, tuples stay tuples, named ones keep the names of their fields, NumPy's
    numbers become Python's, and a dtype of torch stays one. Raises `ValueError` for other types, saying `where` it is.
    """
    if isinstance(value, Piece) and pieces is not None:
        name = f"state {len(pieces)}"
        pieces[name] = value
        return {"piece": name}
    if can_hold(value):
        name = str(len(tensors))
        tensors[name] = value.contiguous()
        return {"tensor": name}
    if isinstance(value, Mapping):
        return {
            "pairs": [
                [flattened(key, tensors, pieces, where=f"a key of {where}"), _nested(one, tensors, pieces, where, key)]
                for key, one in value.items()
            ]
        }
    if isinstance(value, tuple):
        kind = {"kind": [type(value).__name__, *value._fields]} if hasattr(value, "_fields") else {}
        return {"tuple": [_nested(one, tensors, pieces, where, at) for at, one in enumerate(value)], **kind}
    if isinstance(value, list):
        return [_nested(one, tensors, pieces, where, at) for at, one in enumerate(value)]
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(f"{where} is {described(value)}, which a checkpoint cannot hold")


def _nested(
    value: Any, tensors: dict[str, torch.Tensor], pieces: dict[str, Piece] | None, where: str, key: object
) -> Any:
    return flattened(value, tensors, pieces, where=f"{where}[{key!r}]")


def unflattened(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The inverse of `flattened`; `tensors` includes the pieces."""
    if isinstance(value, list):
        return [unflattened(one, tensors) for one in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensors[value["tensor"]]
    if "piece" in value:
        return tensors[value["piece"]]
    if "dtype" in value:
        return getattr(torch, value["dtype"])
    if "tuple" in value:
        values = tuple(unflattened(one, tensors) for one in value["tuple"])
        return _kind_of(*value["kind"])._make(values) if "kind" in value else values
    return {unflattened(key, tensors): unflattened(one, tensors) for key, one in value["pairs"]}


@functools.cache
def _kind_of(name: str, *fields: str) -> Any:
    """A named tuple's type: the user's own may stand in a script, which cannot be imported."""
    return namedtuple(name, fields, rename=True)


def copied(value: Any, into: Any = None, *, is_queued: bool = False) -> Any:
    """The same structure with copies, on the CPU, of its tensors: in `into`, an earlier copy, where that fits.

    A sharded tensor is copied to a `Piece`. With `is_queued` the host does not wait for a CUDA device: its tensors are
    copied to pinned memory on the current stream, and may be read when the stream has come so far.
    """
    again = functools.partial(copied, is_queued=is_queued)
    if isinstance(value, Piece):
        return replace(value, local=again(value.local, into.local if isinstance(into, Piece) else None))
    if is_divided(value):
        return Piece.of(value, again(local_of(value), into.local if isinstance(into, Piece) else None))
    if isinstance(value, torch.Tensor):
        if isinstance(into, torch.Tensor) and into.shape == value.shape and into.dtype == value.dtype:
            return into.copy_(value.detach(), non_blocking=is_queued)
        # A wrapper of other tensors, such as a state of eight bits (torchao), stays what it is.
        if is_queued and value.is_cuda and is_plain(value) and not is_wrapper(value):
            return host_memory(value).copy_(value.detach(), non_blocking=True)
        # Contiguous, since `to` keeps strides, and a file has values in the order of indices.
        return value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    if isinstance(value, Mapping):
        old = into if isinstance(into, Mapping) else {}
        return {key: again(one, old.get(key)) for key, one in value.items()}
    if isinstance(value, list | tuple):
        olds = into if isinstance(into, list | tuple) and len(into) == len(value) else [None] * len(value)
        make = getattr(type(value), "_make", type(value))  # the constructor of a named tuple takes its fields
        return make(again(one, old) for one, old in zip(value, olds, strict=True))
    return value


def host_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Memory for a copy of the tensor's values on the host, pinned if they come from a CUDA device: for a copy to other
    memory the host waits.
    """
    if tensor.is_cuda:
        try:
            return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        except RuntimeError:  # the host has no more memory that can be pinned: a slow copy is better than none
            pass
    return torch.empty(tensor.shape, dtype=tensor.dtype)

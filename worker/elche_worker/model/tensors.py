"""Writes tensors to safetensors files without holding the interpreter's lock, and flattens nested state to tensors and
JSON.

The library's own writer copies every tensor and holds the lock meanwhile; this one writes from the tensors' memory, so
that a rank trains on. Files are read with the library.
"""

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

CHUNK_BYTES = 16 << 20
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
        """A copy of a divided tensor's local part."""
        return cls(local, tensor.shape, tensor.stride(), tensor.placements)


def is_divided(value: Any) -> bool:
    """Whether it is a `DTensor`, of which each process of a replica group has a part."""
    return isinstance(value, torch.Tensor) and hasattr(value, "device_mesh")


def local_of(value: Any) -> torch.Tensor:
    """This process's part of a sharded tensor; any other tensor itself."""
    if isinstance(value, Piece):
        return value.local
    local: torch.Tensor = value.detach().to_local() if is_divided(value) else value
    return local


def placed(value: Any, target: Any) -> Any:
    """The value, divided as the target is: each process takes its part."""
    if not is_divided(target) or is_divided(value) or value.shape != target.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(target.device), target.device_mesh, target.placements, src_data_rank=None)


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> str:
    """Writes contiguous CPU tensors as a safetensors file and makes it durable; returns its SHA-256.

    Raises `ValueError`, naming the tensor, for a type that the format does not have.
    """
    assert sys.byteorder == "little"
    header, position = {}, 0
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
    text += b" " * (-len(text) % 8)
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


def flattened(value: Any, tensors: dict[str, torch.Tensor], pieces: dict[str, Piece] | None = None) -> Any:
    """Flattens a nested value to JSON: its tensors go into `tensors`, pieces into `pieces`, and their names take their
    place.

    Dictionaries may have keys of any type, and tuples stay tuples. Raises `ValueError` for other types.
    """
    if isinstance(value, Piece) and pieces is not None:
        name = f"state {len(pieces)}"
        pieces[name] = value
        return {"piece": name}
    if isinstance(value, torch.Tensor):
        name = str(len(tensors))
        tensors[name] = value.contiguous()
        return {"tensor": name}
    if isinstance(value, Mapping):
        return {"pairs": [[flattened(one, tensors, pieces) for one in pair] for pair in value.items()]}
    if isinstance(value, tuple):
        return {"tuple": [flattened(one, tensors, pieces) for one in value]}
    if isinstance(value, list):
        return [flattened(one, tensors, pieces) for one in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(f"the optimizer's state has a {type(value).__name__}, which a checkpoint cannot hold")


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
    if "tuple" in value:
        return tuple(unflattened(one, tensors) for one in value["tuple"])
    return {unflattened(key, tensors): unflattened(one, tensors) for key, one in value["pairs"]}


def copied(value: Any, into: Any = None) -> Any:
    """The same structure with copies, on the CPU, of its tensors: in `into`, an earlier copy, where that fits.

    The copy of a divided tensor is a `Piece`.
    """
    if isinstance(value, Piece):
        return replace(value, local=copied(value.local, into.local if isinstance(into, Piece) else None))
    if is_divided(value):
        return Piece.of(value, copied(local_of(value), into.local if isinstance(into, Piece) else None))
    if isinstance(value, torch.Tensor):
        if isinstance(into, torch.Tensor) and into.shape == value.shape and into.dtype == value.dtype:
            return into.copy_(value.detach())
        return value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    if isinstance(value, Mapping):
        old = into if isinstance(into, Mapping) else {}
        return {key: copied(one, old.get(key)) for key, one in value.items()}
    if isinstance(value, list | tuple):
        olds = into if isinstance(into, list | tuple) and len(into) == len(value) else [None] * len(value)
        return type(value)(copied(one, old) for one, old in zip(value, olds, strict=True))
    return value

"""Which tensors of a model are averaged, which are copied from the source, and where they lie in the scratch."""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from elche.errors import InvalidJob

Kind = Literal["float32", "float64", "source"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of the model, by where it hangs: user code may put another tensor of the same form there."""

    name: str
    owner: nn.Module
    key: str
    shape: torch.Size
    dtype: torch.dtype
    kind: Kind
    is_trained: bool

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor that the model has there now. Raises `InvalidJob` when it has another form."""
        tensor = _plain(getattr(self.owner, self.key, None))
        if tensor is None or tensor.shape != self.shape or tensor.dtype != self.dtype:
            got = "is gone" if tensor is None else f"is {tensor.dtype} {tuple(tensor.shape)} now"
            raise InvalidJob(f"the model's {self.name} was {self.dtype} {tuple(self.shape)} and {got}; keep its form")
        return tensor

    @property
    def size(self) -> int:
        """Values."""
        return self.shape.numel()


class Layout:
    """All storage of a model, each tied part once, with a scratch copy of what is averaged.

    Trained parameters and floating-point buffers are averaged in float32 (float64 for float64). Frozen parameters
    and integer buffers come bytewise from the source.
    """

    def __init__(self, model: nn.Module) -> None:
        self.entries = _entries(model)
        self.hash = _hash(self.entries)
        self.scratch = {
            kind: torch.zeros(sum(entry.size for entry in self.of_kind(kind)), dtype=dtype)
            for kind, dtype in (("float32", torch.float32), ("float64", torch.float64))
        }
        """Flat, on the CPU: what is averaged, then the result until the next round."""
        self._snapshot: dict[str, torch.Tensor] = {}
        """What this rank brought into the round, kept while it may train on."""
        self._views = {kind: _views(self.scratch[kind], self.of_kind(kind)) for kind in self.scratch}

    def num_trained(self, kind: str) -> int:
        """Values of trained parameters; they come first in the scratch, buffers after them."""
        return sum(entry.size for entry in self.of_kind(kind) if entry.is_trained)

    def of_kind(self, kind: str) -> list[Entry]:
        """The tensors of a kind, in the model's order."""
        return [entry for entry in self.entries if entry.kind == kind]

    def averaged(self) -> Iterator[tuple[Entry, torch.Tensor]]:
        """Each averaged tensor with its place in the scratch."""
        for kind, views in self._views.items():
            yield from zip(self.of_kind(kind), views, strict=True)

    def _with_snapshot(self) -> Iterator[tuple[Entry, torch.Tensor, torch.Tensor]]:
        """Each averaged tensor, its place in the scratch, and what the rank brought: the model's own if not kept."""
        for kind, views in self._views.items():
            entries = self.of_kind(kind)
            kept = _views(self._snapshot[kind], entries) if self._snapshot else [entry.tensor for entry in entries]
            yield from zip(entries, views, kept, strict=True)

    @torch.no_grad()
    def gather(self) -> bool:
        """Copies the averaged tensors into the scratch; returns whether all values are finite."""
        for entry, view in self.averaged():
            view.copy_(entry.tensor)
        return all(_is_finite(flat) for flat in self.scratch.values())

    @torch.no_grad()
    def apply(self) -> None:
        """The scratch replaces the model's averaged tensors."""
        for entry, view in self.averaged():
            entry.tensor.copy_(view)

    @torch.no_grad()
    def keep_snapshot(self) -> None:
        """Keeps a copy of what was gathered, for `correct`."""
        for kind, flat in self.scratch.items():
            if kind not in self._snapshot:
                self._snapshot[kind] = torch.empty_like(flat)
            self._snapshot[kind].copy_(flat)

    @torch.no_grad()
    def correct(self) -> None:
        """Adds (result - snapshot) to trained parameters, so that newer steps stay; buffers become the result's."""
        for entry, view, before in self._with_snapshot():
            if entry.is_trained:
                entry.tensor.add_((view - before).to(entry.tensor.device))
            else:
                entry.tensor.copy_(view)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchanges the model's averaged tensors and the scratch."""
        for entry, view in self.averaged():
            held = entry.tensor.clone()
            entry.tensor.copy_(view)
            view.copy_(held)

    @torch.no_grad()
    def divergence(self) -> float:
        """L2 over trained parameters of (snapshot, or model, - result), relative to the result's; 0 if that is tiny."""
        changed, size = 0.0, 0.0
        for entry, view, before in self._with_snapshot():
            if entry.is_trained:
                after = view.to(before.device)
                changed += float(torch.linalg.vector_norm(before - after)) ** 2
                size += float(torch.linalg.vector_norm(after)) ** 2
        return (changed / size) ** 0.5 if size**0.5 > 1e-10 else 0.0

    @torch.no_grad()
    def digest(self) -> int:
        """64 bits over the bytes of all the model's tensors."""
        return _digest([_raw(entry.tensor) for entry in self.entries])

    @torch.no_grad()
    def result_digest(self) -> int:
        """64 bits over the bytes of the result in the scratch, and of the source's tensors."""
        return _digest([*(_raw(flat) for flat in self.scratch.values()), self.source_bytes()])

    @torch.no_grad()
    def source_bytes(self) -> torch.Tensor:
        """The bytes of the tensors that come from the source, in order."""
        parts = [_raw(entry.tensor) for entry in self.of_kind("source")]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)

    @torch.no_grad()
    def apply_source_bytes(self, raw: torch.Tensor) -> None:
        """Copies the source's bytes into the model."""
        offset = 0
        for entry in self.of_kind("source"):
            size = entry.size * entry.dtype.itemsize
            part = raw[offset : offset + size].clone().view(entry.dtype).reshape(entry.shape)
            entry.tensor.copy_(part)
            offset += size


def _entries(model: nn.Module) -> list[Entry]:
    seen: set[tuple[object, ...]] = set()
    entries = []
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        place = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape)
        if tensor.numel() and place not in seen:
            seen.add(place)
            path, _, key = name.rpartition(".")
            data = _plain(tensor)
            assert data is not None
            is_parameter = isinstance(tensor, nn.Parameter)
            kind = _kind(data, tensor.requires_grad or not is_parameter)
            entries.append(Entry(name, model.get_submodule(path), key, data.shape, data.dtype, kind, is_parameter))
    return entries


def _plain(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The tensor without its graph, and complex numbers as pairs."""
    if tensor is None:
        return None
    return torch.view_as_real(tensor.data) if tensor.is_complex() else tensor.data


def _kind(tensor: torch.Tensor, is_averaged: bool) -> Kind:
    if not is_averaged or not tensor.is_floating_point():
        return "source"
    return "float64" if tensor.dtype == torch.float64 else "float32"


def _views(flat: torch.Tensor, entries: list[Entry]) -> list[torch.Tensor]:
    parts = torch.split(flat, [entry.size for entry in entries]) if entries else ()
    return [part.view(entry.shape) for part, entry in zip(parts, entries, strict=True)]


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _is_finite(flat: torch.Tensor) -> bool:
    """One pass, and no other tensor: a NaN shows in both extremes."""
    return not flat.numel() or all(math.isfinite(extreme) for extreme in torch.aminmax(flat))


def _digest(parts: list[torch.Tensor]) -> int:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.numpy().tobytes())
    return int.from_bytes(digest.digest()[:8], "little")


def _hash(entries: list[Entry]) -> int:
    """63 bits, so that it fits the header's signed integers."""
    text = "\n".join(f"{e.name} {tuple(e.shape)} {e.dtype} {e.kind}" for e in entries)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1

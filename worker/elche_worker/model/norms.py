"""The L2 norm of the trained parameters, measured at every tenth batch since a round without synchronising (W12)."""

from collections.abc import Sequence
from math import sqrt
from typing import Any

import torch

from elche_worker.model.layout import Layout, LayoutEntry

EVERY = 10
"""Batches between two measurements."""


class ParameterNorm:
    """The norm of a model's trained parameters; for a sharded model of this process's part."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self._entries: list[LayoutEntry] = [one for one in layout.entries if one.is_trained and one.kind != "broadcast"]
        self._tensors: list[torch.Tensor] = []
        """The tensors as of the last round: looking them up costs as much as the norm."""
        self._wide: list[torch.Tensor] = []
        """Tensors of float64, whose norms are computed in float64."""
        self._value: float | None = None
        self._pending: tuple[torch.Tensor, Any] | None = None
        """The norm in host memory, and the event after which it is valid; None while none is on its way. One at a time,
        since there is one place in host memory.
        """
        self._is_cuda = device.type == "cuda"
        self._host = torch.zeros((), pin_memory=self._is_cuda)
        self._event: Any = torch.cuda.Event() if self._is_cuda else None  # type: ignore[no-untyped-call]

    def note_batch(self, num_since_round: int) -> None:
        """Counts a batch; `num_since_round` batches were made since the last round."""
        if num_since_round % EVERY == 0 and self._entries and not self._is_under_way:
            if num_since_round == EVERY or not (self._tensors or self._wide):
                tensors = [entry.tensor for entry in self._entries]
                self._wide = [one for one in tensors if one.dtype == torch.float64]
                self._tensors = [one for one in tensors if one.dtype != torch.float64]
            self._measure()

    @torch.no_grad()
    def _measure(self) -> None:
        norms = [*torch._foreach_norm(self._tensors, 2, dtype=torch.float32)] if self._tensors else []
        if self._wide:
            norms += [norm.float() for norm in torch._foreach_norm(self._wide, 2)]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        if self._is_cuda:
            self._host.copy_(norm, non_blocking=True)
            self._event.record()
            self._pending = self._host, self._event
        else:
            self._value = norm.item()

    @property
    def _is_under_way(self) -> bool:
        return self._pending is not None and not self._pending[1].query()

    @property
    def value(self) -> float | None:
        """The last norm that has arrived from the device; None before the first."""
        if self._pending is not None and self._pending[1].query():
            self._value, self._pending = float(self._pending[0]), None
        return self._value


def of_parts(norms: Sequence[float | None], num_copies: int) -> float | None:
    """The norm of a model from the norms of its parts. `num_copies` processes hold each part."""
    known = [norm for norm in norms if norm is not None]
    return sqrt(sum(norm**2 for norm in known) / num_copies) if len(known) == len(norms) else None

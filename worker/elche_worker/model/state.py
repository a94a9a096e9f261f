"""A trained model's parameters and buffers, in memory and as a safetensors file."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from elche_worker.model.frozen import completed, metadata_of, read_weights
from elche_worker.model.tensors import write_tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedState:
    """A trained model's tensors by name, on the CPU. Tied ones appear under each of their names."""

    params: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]

    @classmethod
    def of(cls, model: nn.Module) -> "TrainedState":
        """Copies a model's state."""
        params = model.named_parameters(remove_duplicate=False)
        buffers = model.named_buffers(remove_duplicate=False)
        return cls(
            params={name: tensor.detach().cpu().clone() for name, tensor in params},
            buffers={name: tensor.detach().cpu().clone() for name, tensor in buffers},
        )


def save_weights(weights: Mapping[str, torch.Tensor], path: Path, frozen: str = "") -> None:
    """Writes weights that `weights_of` returned; `frozen` is the digest of frozen parameters that they leave out.

    A tied tensor appears under each of its names. The file appears complete or not at all.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write_tensors(draft, weights, metadata_of(frozen))
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def load_state(model: nn.Module, path: Path | str) -> None:
    """Reads a file of `save_weights` into a model of the same architecture. Raises `RuntimeError` for another
    architecture, and `InvalidJob` if the file leaves out frozen parameters and the model's are different.
    """
    weights, frozen = read_weights(Path(path))
    model.load_state_dict(completed(model, weights, frozen, str(path)))

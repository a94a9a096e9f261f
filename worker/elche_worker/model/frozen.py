"""Frozen parameters that a job leaves out of its files (`save_frozen=False`), which have their digest instead."""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from elche.errors import InvalidJob
from elche_worker.model.layout import Layout, digest_of
from elche_worker.model.storage import place_of
from elche_worker.model.tensors import can_hold

DIGEST = "elche_frozen"
"""The digest's name in the metadata of a safetensors file that leaves frozen parameters out."""


class LeftOut:
    """The frozen parameters that a job's files leave out; none if it keeps them."""

    def __init__(self, model: nn.Module, layout: Layout, *, keeps: bool) -> None:
        saved = _saved(model).items()
        self.names = frozenset(name for name, parameter in saved if not (keeps or parameter.requires_grad))
        """Names of the parameters in a `state_dict`; a tied one has several."""
        self.digest = _digest(model, self.names) if self.names else ""
        """Digest of the parameters as `model()` has made them; empty if none are left out."""
        self._in_rounds = layout.frozen_digest() if self.names else None
        """The same parameters' digest as rows of headers have it; None if none are left out."""

    def check(self, digests: Iterable[int]) -> None:
        """Raises `InvalidJob` unless all ranks have the parameters that `model()` made here, since a resumed training
        will have these. `digests` are those of a round's header.
        """
        if self._in_rounds is not None and any(one != self._in_rounds for one in digests):
            raise InvalidJob(
                "save_frozen=False leaves frozen parameters out of checkpoints, but on some rank they are not those "
                "that model() makes here: it must make the same ones each time, and nothing may change them; else use "
                "save_frozen=True"
            )


def metadata_of(digest: str) -> dict[str, str]:
    """The metadata of a file that leaves out frozen parameters with this digest; "": of a file that has all."""
    return {DIGEST: digest} if digest else {}


def read_weights(path: Path) -> tuple[dict[str, torch.Tensor], str]:
    """The tensors of a safetensors file, and the digest of the frozen parameters that it leaves out; empty if none."""
    with safe_open(path, "pt") as file:
        metadata = file.metadata() or {}
    return load_file(path), metadata.get(DIGEST, "")


def completed(model: nn.Module, weights: Mapping[str, torch.Tensor], digest: str, what: str) -> dict[str, torch.Tensor]:
    """The weights of a file, with the parameters that it leaves out taken from the model. Raises `InvalidJob` if the
    model's have another digest; `what` names the file.
    """
    if not digest:
        return dict(weights)
    own = {name: one.detach() for name, one in _saved(model).items() if name not in weights}
    if _digest(model, own) != digest:
        raise InvalidJob(
            f"{what} is without its frozen parameters (save_frozen=False), and model() makes others than it was "
            "trained with: it must build the same base, with the same seed where that is random"
        )
    return own | dict(weights)


def _digest(model: nn.Module, names: Collection[str]) -> str:
    left_out = {one for name, one in _saved(model).items() if name in names}
    return f"{digest_of(one for one in model.parameters() if one in left_out):016x}"


def _saved(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters under their names in the model's `state_dict`, which may be others than its own: torch's
    `checkpoint_wrapper` takes its part out of them. Under their own where it has none of their memory.
    """
    state = model.state_dict()
    names: dict[object, list[str]] = {}
    for name, tensor in state.items():
        if can_hold(tensor) and tensor.numel():
            names.setdefault(place_of(tensor), []).append(name)
    saved: dict[str, nn.Parameter] = {}
    for name, one in model.named_parameters(remove_duplicate=False):
        saved |= dict.fromkeys([name] if name in state else names.get(place_of(one), [name]), one)
    return saved

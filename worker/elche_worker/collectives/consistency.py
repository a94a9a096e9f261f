"""Checks that all ranks have the same model, and still do as they train, and makes their values equal to rank 0's."""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from itertools import chain

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from elche.errors import Misuse
from elche_worker.collectives.world import World, lost_peers_named
from elche_worker.model.tensors import is_divided, is_plain, raw_bytes

MAX_DIFFERENCE = 0.01
"""Largest difference between ranks of the sums in `_figures`. It allows for devices that round differently."""


def check_alike(model: nn.Module, world: World) -> None:
    """Raises `Misuse` on every rank when models differ, and names the first rank, tensor and difference. Row G1.

    Sends 32 characters per rank, and descriptions only when they differ.
    """
    described = _description(model)
    text = json.dumps(described)
    if len(set(world.gather_texts(hashlib.sha256(text.encode()).hexdigest()[:32]))) == 1:
        return
    texts = world.gather_texts(text)
    for rank, other in enumerate(texts):
        if other != texts[0]:
            raise Misuse(f"the models differ: {_difference(json.loads(texts[0]), json.loads(other), rank)}")


def _description(model: nn.Module) -> list[list[str]]:
    described = []
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in named:
            details = f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
            frozen = kind == "parameter" and not tensor.requires_grad
            described.append([kind, name, details + (" frozen" if frozen else "")])
    return described


def _difference(first: list[list[str]], other: list[list[str]], rank: int) -> str:
    for own, theirs in zip(first, other, strict=False):
        if own[:2] != theirs[:2]:
            return f"rank 0 has {own[0]} {own[1]!r} where rank {rank} has {theirs[0]} {theirs[1]!r}"
        if own != theirs:
            return f"{own[0]} {own[1]!r} is {own[2]} on rank 0 and {theirs[2]} on rank {rank}"
    longer, names = (0, first) if len(first) > len(other) else (rank, other)
    kind, name, details = names[min(len(first), len(other))]
    return f"rank 0 has {len(first)} tensors and rank {rank} has {len(other)}; {kind} {name!r} ({details}) is only on \
rank {longer}"


def check_still_alike(model: nn.Module, rates: Sequence[float], world: World) -> None:
    """Raises `Misuse` on every rank when parameters, or the learning rates of the optimizers' groups, differ between
    ranks. Averaged gradients do not correct that: each rank would train a model of its own, and only rank 0's is saved.
    """
    if text := comparable(model, rates):
        _check_figures(model, dict(enumerate(world.gather_texts(text))))


def check_alike_at_end(model: nn.Module, text: str, world: World) -> None:
    """Like `check_still_alike`, at a loop's end: compares `text`, a result of `comparable`, with those of the ranks
    whose loops have ended, and does not wait for others. So it may raise on the last rank only.
    """
    if text:
        _check_figures(model, {rank: one for rank, one in world.publish_end(text).items() if one})


def comparable(model: nn.Module, rates: Sequence[float]) -> str:
    """Text by which ranks compare models and learning rates; "" for a model that each rank has a part of."""
    compared = _compared(model)
    if any(is_divided(one) for one in compared.values()):
        return ""
    return json.dumps([list(rates), _figures(compared.values())])


def _compared(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: one for name, one in model.named_parameters() if is_plain(one) and one.numel()}


@torch.no_grad()
def not_finite(model: nn.Module) -> str:
    """The name of the first trained parameter with a value that is NaN or infinite; "" if there is none."""
    trained = {name: one for name, one in _compared(model).items() if one.requires_grad and not is_divided(one)}
    return next((name for name, one in trained.items() if not torch.isfinite(one).all()), "")


def _check_figures(model: nn.Module, texts: Mapping[int, str]) -> None:
    """Raises `Misuse` when ranks differ from the first one; `texts` are results of `comparable`, by rank."""
    named = _compared(model)
    gathered = {rank: json.loads(text) for rank, text in sorted(texts.items())}
    first = min(gathered)
    for rank, (other_rates, other) in gathered.items():
        for at, (one, another) in enumerate(zip(gathered[first][0], other_rates, strict=False)):
            if not math.isclose(one, another, rel_tol=1e-6) and not math.isnan(one + another):
                raise Misuse(
                    f"ranks have different learning rates: group {at} has {one:g} on rank {first} and {another:g} on "
                    f"rank {rank}: let them follow what all ranks know, such as the step or "
                    "trainer.mean({'loss': loss})"
                )
        for name, ours, theirs in zip(named, gathered[first][1], other, strict=False):
            if any(abs(one - another) > MAX_DIFFERENCE for one, another in zip(ours, theirs, strict=True)):
                raise Misuse(
                    f"the ranks' models differ: {name} of rank {rank} is not that of rank {first}. All step "
                    "with the same gradients, so what else changes parameters must do the same on every rank: load "
                    "weights on all of them, or before Trainer.setup; draw random numbers for them from one seed; and "
                    "step with averaged gradients alone (average_gradients() before, finish_step() after each of them)"
                )


@torch.no_grad()
def _figures(tensors: Iterable[torch.Tensor]) -> list[list[float]]:
    """Two sums of each tensor, of all its values and of every second one, divided by its L2 norm. Values with random
    signs sum to about their norm, so the figures are about 1, whatever the tensor's size and scale.
    """
    found = []
    for tensor in tensors:
        flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).flatten()
        # MPS has no float64.
        exact = torch.float32 if flat.device.type == "mps" else torch.float64
        norm = torch.linalg.vector_norm(flat, dtype=exact).clamp(min=1e-30)
        found.append(torch.stack([flat.sum(dtype=exact), flat[::2].sum(dtype=exact)]) / norm)
    return [one.tolist() for one in found]


@torch.no_grad()
def begin_as_rank_0(model: nn.Module, world: World) -> bool:
    """Copies rank 0's parameters and buffers to every rank, bit for bit. Returns True if any rank had other parameters
    before, as where the script draws them without a seed.
    """
    text = "" if world.size == 1 else comparable(model, [])
    gathered = [json.loads(one)[1] for one in world.gather_texts(text) if one]
    broadcast([*model.parameters(), *model.buffers()], world)
    return any(_are_others(gathered[0], other) for other in gathered[1:])


def _are_others(figures: list[list[float]], others: list[list[float]]) -> bool:
    """True if two results of `_figures` are of different tensors."""
    pairs = zip(chain(*figures), chain(*others), strict=True)
    return any(abs(one - other) > MAX_DIFFERENCE for one, other in pairs)


@torch.no_grad()
def broadcast(tensors: list[torch.Tensor], world: World) -> None:
    """Copies rank 0's values into the tensors of all ranks, bit for bit, in one collective per device."""
    if world.size == 1:
        return
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in sorted(tensors, key=lambda one: -one.element_size()):  # so that each part is aligned
        by_device.setdefault(tensor.device, []).append(tensor)
    for device, alike in by_device.items():
        last = torch.full((1,), int(not world.rank), dtype=torch.uint8, device=device)
        flat = torch.cat([*map(raw_bytes, alike), last])
        with lost_peers_named():
            dist.broadcast(flat, group=world.group, group_src=0)
        if world.rank:
            if device.type == "cpu" and not flat[-1]:  # Gloo takes a shorter message without a word
                raise Misuse(
                    "a buffer of the model has another size on rank 0 than on this rank. If each rank makes it for its "
                    "own batches, as a cache, call register_buffer(..., persistent=False): then each keeps its own"
                )
            for tensor, part in zip(alike, torch.split(flat[:-1], [tensor.nbytes for tensor in alike]), strict=True):
                # What does not change is not written: a graph may need it, and autograd takes any write for a change.
                # `torch.equal` on a GPU would have the host wait for the device, at each buffer.
                if part.is_cuda or not torch.equal(part, raw_bytes(tensor)):
                    # A tensor that was made in inference mode can be written there only.
                    with torch.inference_mode() if tensor.is_inference() else nullcontext():
                        tensor.copy_(part.view(tensor.dtype).view(tensor.shape))


def buffers_beside(
    model: nn.Module, stepped: Iterable[nn.Parameter], others: Iterable[nn.Parameter]
) -> list[torch.Tensor]:
    """The buffers that may be written after an optimizer has stepped `stepped`: those of modules with such parameters.
    `others` are parameters of optimizers whose graphs may still be alive. A module without parameters counts with the
    module around it. Buffers that no `state_dict` has stay each rank's: it may make them for its own batches.

    Statistics of normalisation layers are returned as aliases, so that autograd does not see the write: no backward
    pass needs them.
    """
    now, trained = {id(one) for one in stepped}, {id(one) for one in others}
    found: dict[int, torch.Tensor] = {}

    def visit(module: nn.Module, around: bool) -> None:
        own = {id(one) for one in module.parameters()} & (now | trained)
        is_free = bool(own & now) if own else around
        for name, one in module.named_buffers(recurse=False) if is_free else ():
            if name not in module._non_persistent_buffers_set:
                found[id(one)] = one.data if isinstance(module, _NormBase) else one
        for child in module.children():
            visit(child, is_free)

    visit(model, True)
    return list(found.values())

"""Sparse gradients, as of embeddings with `sparse=True`: ranks send the rows that they have, not the whole table."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer, SparseAdam

from elche_worker.collectives.world import World

NONE, ROWS, DENSE = 0.0, 1.0, 2.0
"""Kinds of gradient that a rank has: none, rows, or dense, as where a table is also another layer's weight."""


def sparse_names(model: nn.Module, optimizers: Iterable[Optimizer] = ()) -> set[str]:
    """Names of the parameters with sparse gradients: of modules with `sparse=True`, or of `SparseAdam`."""
    says_so = [one for one in model.modules() if getattr(one, "sparse", None) is True]
    sparse = {id(getattr(one, "weight", None)) for one in says_so}
    for optimizer in optimizers:
        if isinstance(optimizer, SparseAdam):
            sparse |= {id(one) for group in optimizer.param_groups for one in group["params"]}
    return {name for name, one in model.named_parameters() if id(one) in sparse}


@torch.no_grad()
def summed(parameters: Mapping[str, nn.Parameter], fraction: float, world: World) -> dict[str, torch.Tensor | None]:
    """The sum over all ranks of each sparse gradient, each rank's times its fraction; bit for bit equal on all. Dense
    where one rank's gradient is; None where no rank has one. Every rank calls it, with the same names.
    """
    own = {name: _rows(one, fraction) for name, one in parameters.items()}
    gathered = world.gather_numbers([float(number) for kind, rows, _ in own.values() for number in (kind, len(rows))])
    sums: dict[str, torch.Tensor | None] = {}
    for at, (name, parameter) in enumerate(parameters.items()):
        kinds = [numbers[2 * at] for numbers in gathered]
        counts = [int(numbers[2 * at + 1]) for numbers in gathered]
        _, rows, values = own[name]
        if max(kinds) == NONE:
            sums[name] = None
            continue
        if sum(counts):
            rows = torch.cat(world.gather_rows(rows, counts))
            values = torch.cat(world.gather_rows(values, counts))
        total = torch.sparse_coo_tensor(rows[None], values, parameter.shape, check_invariants=False).coalesce()
        sums[name] = total.to_dense() if max(kinds) == DENSE else total
    return sums


def _rows(parameter: nn.Parameter, fraction: float) -> tuple[float, torch.Tensor, torch.Tensor]:
    """This rank's gradient as its kind, the indices of its rows, and their values times the fraction."""
    gradient = parameter.grad
    if gradient is None or not fraction:
        rows = torch.empty(0, dtype=torch.int64, device=parameter.device)
        return NONE, rows, parameter.new_empty((0, *parameter.shape[1:]))
    kind = ROWS if gradient.is_sparse else DENSE
    if not gradient.is_sparse or gradient.sparse_dim() != 1:
        gradient = gradient.to_dense().to_sparse(1)
    gradient = gradient.coalesce()
    return kind, gradient.indices()[0].contiguous(), (gradient.values() * fraction).contiguous()


def scale(gradients: Sequence[torch.Tensor], factor: float | torch.Tensor) -> None:
    """Multiplies gradients in place."""
    tensors = [one._values() if one.is_sparse else one for one in gradients]
    if tensors:
        torch._foreach_mul_(tensors, factor)


@torch.no_grad()
def clip_norm(parameters: Sequence[nn.Parameter], max_norm: float) -> None:
    """Scales gradients so that the L2 norm of all together is at most this; sparse ones too, which torch refuses."""
    gradients = [one.grad for one in parameters if one.grad is not None]
    if not any(one.is_sparse for one in gradients):
        nn.utils.clip_grad_norm_(parameters, max_norm)
        return
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()  # a repeated row counts with its sum
    gradients = [one.grad for one in parameters if one.grad is not None]
    norms = [torch.linalg.vector_norm(one._values() if one.is_sparse else one) for one in gradients]
    total = torch.linalg.vector_norm(torch.stack([one.to(norms[0].device) for one in norms]))
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)  # 1e-6 as in torch's clip_grad_norm_
    for gradient in gradients:
        (gradient._values() if gradient.is_sparse else gradient).mul_(factor.to(gradient.device, gradient.dtype))


def packed(gradient: torch.Tensor | None) -> Any:
    """A gradient as plain values and strided tensors, for another rank."""
    if gradient is None or not gradient.is_sparse:
        return gradient
    gradient = gradient.coalesce()
    return {"indices": gradient.indices(), "values": gradient.values(), "shape": list(gradient.shape)}


def unpacked(given: Any) -> torch.Tensor | None:
    """The inverse of `packed`."""
    if isinstance(given, dict):
        return torch.sparse_coo_tensor(
            given["indices"], given["values"], given["shape"], check_invariants=False
        ).coalesce()
    gradient: torch.Tensor | None = given
    return gradient

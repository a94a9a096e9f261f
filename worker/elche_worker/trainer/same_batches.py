"""Finds ranks that draw the same batches in a loop of the user's own: several devices then do the work of one."""

import math
from collections.abc import Iterable

import torch
from torch import nn

from elche.output import notice
from elche_worker.collectives.world import World
from elche_worker.model.tensors import is_divided, is_plain

STEPS = 3
"""Steps in a row with equal gradients after which it is said; fewer may be chance, if a loss has few values."""


class SameBatches:
    """Compares the ranks' gradients in a loop's first steps, and says once which ranks have the same.

    The same data loader on each rank with the same seed gives each the same batches, and averaging equal gradients
    changes nothing. Not found where gradients differ for another reason, such as dropout with different seeds.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._pairs: set[tuple[int, int]] = set()
        """Ranks that have had the same gradients in each step so far, two by two; numbers as at the loop's start."""

    def compare(self, parameters: Iterable[nn.Parameter], step: int) -> None:
        """Called with the gradients of step `step`, from 0, before they are averaged. Collective while `step` is below
        `STEPS`. It may be called again for the same step, with fewer ranks.
        """
        if step >= STEPS:
            return
        members = self._world.members
        gathered = dict(zip(members, self._world.gather_numbers(_figures(parameters)), strict=True))
        same = {
            (one, other)
            for one in members
            for other in members
            if one < other and _are_same(gathered[one], gathered[other])
        }
        self._pairs = same if step == 0 else self._pairs & same
        if step == STEPS - 1 and self._pairs and self._world.rank == 0:
            notice(_advice(sorted({number for pair in self._pairs for number in pair})))


def _advice(ranks: list[int]) -> str:
    named = f"{', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
    return (
        f"ranks {named} had the same gradients in the first {STEPS} steps: they seem to draw the same batches, "
        "so that more devices train no more samples. Let elche divide the loader with trainer.set_data_loader(), or "
        "give it a DistributedSampler, or seed each rank's data by trainer.rank"
    )


def _are_same(one: list[float], other: list[float]) -> bool:
    return one == other and 0 < one[0] < math.inf  # gradients that overflow or are zero say nothing


@torch.no_grad()
def _figures(parameters: Iterable[nn.Parameter]) -> list[float]:
    """The sum of the absolute values of all gradients, and that of the values; equal on ranks with the same gradients,
    bit for bit. Waits for the device.
    """
    gradients = [one.grad for one in parameters if one.grad is not None]
    sums = [torch.zeros(2, dtype=torch.float64)]
    for gradient in gradients:
        if is_plain(gradient) and not is_divided(gradient):
            real = torch.view_as_real(gradient) if gradient.is_complex() else gradient
            exact = torch.float32 if real.device.type == "mps" else torch.float64
            both = [torch.linalg.vector_norm(real, 1, dtype=exact), real.sum(dtype=exact)]
            sums.append(torch.stack(both).to(sums[0]))
    magnitude, total = torch.stack(sums).sum(dim=0).tolist()
    return [magnitude, total]

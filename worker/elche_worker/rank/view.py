"""A rank as its callbacks see it."""

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from elche_worker.rank.replica import Replica


class View:
    """An `elche_worker.callbacks.Rank`."""

    def __init__(self, rank: int, replica: "Replica") -> None:
        self._rank = rank
        self._replica = replica

    @property
    def model(self) -> torch.nn.Module:
        return self._replica.model

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def device(self) -> str:
        return str(self._replica.device)

    @property
    def local_step(self) -> int:
        return self._replica.local_step

    @property
    def version(self) -> int:
        return self._replica.version

    @property
    def epoch(self) -> int:
        return self._replica.epoch

    @property
    def lr(self) -> float:
        return float(self._replica.optimizers[0].param_groups[0]["lr"])

    @property
    def lr_factor(self) -> float:
        return self._replica.rates.factor

    @lr_factor.setter
    def lr_factor(self, factor: float) -> None:
        self._replica.rates.factor = factor

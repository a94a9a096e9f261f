"""Manual data parallelism, for loops with several models or their own steps: GAN, RL, progressive training."""

from collections.abc import Sequence
from typing import Self

import torch.distributed as dist
from torch import nn

from elche.errors import Misuse
from elche_worker.collectives.consistency import begin_as_rank_0, broadcast, check_alike
from elche_worker.collectives.gradients import Gradients
from elche_worker.collectives.sparse import sparse_names
from elche_worker.collectives.world import World


class Ddp:
    """A model on every rank of a process group, averaged only when a method is called. With one process the methods do
    nothing.

    `Ddp.wrap` makes one; every rank calls the same methods in the same order.
    """

    def __init__(self, model: nn.Module, world: World) -> None:
        """Use `wrap`."""
        self._model = model
        self._world = world
        self._devices = world.gather_texts(str(next(model.parameters()).device))
        self._gradients: Gradients | None = None
        if world.size > 1:
            named, sparse = dict(model.named_parameters()), sparse_names(model)
            self._gradients = Gradients(named, world, overlaps=False, sparse=sparse)

    @classmethod
    def wrap(cls, model: nn.Module, process_group: dist.ProcessGroup | None = None) -> Self:
        """Wraps a model that is on its device, on the ranks of `process_group`, by default all.

        Raises `Misuse` on every rank when models differ between ranks, naming rank, parameter and shapes.
        """
        is_model = isinstance(model, nn.Module)
        device = next((str(one.device) for one in model.parameters()), "cpu") if is_model else "cpu"
        world = World.join(process_group, device)
        world.agree("" if is_model else f"Ddp.wrap needs a torch.nn.Module, not {type(model).__name__}")
        check_alike(model, world)
        trained = any(one.requires_grad for one in model.parameters())
        world.agree("" if trained else "the model has no parameter to train: all are frozen, or it has none")
        return cls(model, world)

    @property
    def module(self) -> nn.Module:
        """The model."""
        return self._model

    @property
    def rank(self) -> int:
        """This process's number in the group."""
        return self._world.rank

    @property
    def world_size(self) -> int:
        """Processes in the group."""
        return self._world.size

    @property
    def devices(self) -> list[str]:
        """Each rank's device."""
        return list(self._devices)

    def sync_params(self) -> None:
        """Copies rank 0's parameters and buffers to every rank."""
        begin_as_rank_0(self._model, self._world)

    def sync_buffers(self) -> None:
        """Copies rank 0's buffers, such as BatchNorm's running statistics, to every rank."""
        broadcast(list(self._model.buffers()), self._world)

    def all_reduce_gradients(self) -> None:
        """Averages all ranks' gradients; call it after backward and before the optimizer's step.

        Where a rank has no gradient of a parameter, it counts as zeros; a parameter without one on any rank is left
        out.
        """
        self._average(1 / self._world.size)

    def weighted_all_reduce_gradients(self, batch_counts: Sequence[int]) -> None:
        """Averages gradients weighted by each rank's count of batches or samples; `batch_counts` is equal on every
        rank.

        Raises `Misuse`, on every rank, for another number of counts, negative ones, all zeros, or ones that differ.
        """
        counts = list(batch_counts)
        problem = ""
        if len(counts) != self._world.size:
            problem = f"batch_counts has {len(counts)} counts, and there are {self._world.size} ranks; give one each"
        elif any(count < 0 for count in counts) or not sum(counts):
            problem = f"batch_counts is {counts}; counts must be at least 0, and one of them more"
        self._world.agree(problem)
        for rank, other in enumerate(self._world.gather_numbers(counts)):
            if other != counts:
                raise Misuse(f"batch_counts differ: rank {self.rank} has {counts}, rank {rank} {list(map(int, other))}")
        self._average(counts[self.rank] / sum(counts))

    def _average(self, fraction: float) -> None:
        if self._gradients is not None:
            self._gradients.begin()
            self._gradients.finish(fraction)
            self._gradients.replace()

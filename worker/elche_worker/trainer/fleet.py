"""The devices of all ranks."""

import json
from collections.abc import Sequence

from elche_worker.collectives.world import World, memory_of, model_name
from elche_worker.device.discovery import summary
from elche_worker.user.device import Device


class RankDevices:
    """Every rank's device; equal on every rank. The constructor is collective."""

    def __init__(self, world: World) -> None:
        self.names = world.gather_texts(str(world.device))
        """Device names by rank, such as "cuda:0"."""
        described = json.dumps([model_name(world.device), memory_of(world.device)])
        self._models = [json.loads(text) for text in world.gather_texts(described)]
        self._numbers = list(world.members)

    def keep(self, members: Sequence[int]) -> None:
        """Keeps only the devices of these ranks, by number."""
        self.names = [self.names[self._numbers.index(number)] for number in members]
        self._models = [self._models[self._numbers.index(number)] for number in members]
        self._numbers = list(members)

    @property
    def is_mixed(self) -> bool:
        """True if devices are of different models."""
        return len({name for name, _ in self._models}) > 1

    @property
    def summary(self) -> str:
        """All devices in one line."""
        named = zip(self.names, self._models, strict=True)
        return summary([Device(device=one, model=model, memory_bytes=memory) for one, (model, memory) in named])

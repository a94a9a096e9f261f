"""What a loop of one's own keeps of itself: where its checkpoints go, when one is due, and which it goes on from."""

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from elche.errors import Misuse
from elche_worker.collectives.world import World
from elche_worker.trainer.attached import Attachment
from elche_worker.trainer.config import TrainerConfig
from elche_worker.trainer.optimizers import Optimizers
from elche_worker.trainer.saving import Position, Saver, is_there, restore, restore_rng_of_rank


class LoopCheckpoints:
    """The checkpoints of one loop."""

    def __init__(self, model: nn.Module, optimizers: Optimizers, config: TrainerConfig, world: World) -> None:
        self._model = model
        self._optimizers = optimizers
        self._world = world
        self._name = config.name or Path(sys.argv[0]).stem
        self._every_minutes = config.checkpoint_every_minutes
        self.place = config.checkpoint_dir or os.environ.get("ELCHE_CHECKPOINT_DIR", "")
        """Where checkpoints go; "" when nobody has said."""
        self.resumed: Position | None = None
        """Where a checkpoint was, until the loop is there."""
        self._loader: Mapping[str, Any] = {}
        """What it had of the loader, until its epoch begins."""
        self._random: dict[str, Any] | None = None
        """Its random numbers, until training begins."""
        self._saver: Saver | None = None
        self._saved_s = time.monotonic()

    def check(self) -> None:
        """Raises `Misuse` when checkpoints are wanted, and nobody has said where."""
        if self.has_rhythm and not self.place:
            raise Misuse("checkpoint_every_minutes needs a place: give checkpoint_dir, or set ELCHE_CHECKPOINT_DIR")

    @property
    def has_rhythm(self) -> bool:
        """Whether checkpoints are made by time."""
        return self._every_minutes is not None

    def take_due(self) -> bool:
        """Whether rank 0 wants one by time; it does so once."""
        if self._every_minutes is None or self._world.rank:
            return False
        is_due = time.monotonic() - self._saved_s >= self._every_minutes * 60
        if is_due:
            self._saved_s = time.monotonic()
        return is_due

    def save(self, position: Position, plan: dict[str, Any], attachment: Attachment | None, place: str = "") -> None:
        """Begins to write, on rank 0. Raises `Misuse` when nobody has said where."""
        place = place or self.place
        if not place:
            raise Misuse("save() needs a place: give TrainerConfig(checkpoint_dir=...) or set ELCHE_CHECKPOINT_DIR")
        self._saved_s = time.monotonic()
        if self._world.rank:
            return
        if self._saver is None or self._saver.place != place:
            self._saver = Saver(place, self._name)
        self._saver.save(
            self._model,
            self._optimizers,
            position,
            plan,
            self._world.size,
            attachment.tell_saved if attachment else lambda *_: None,
            attachment.tell_not_saved if attachment else lambda *_: None,
        )

    def load(self, path: str) -> tuple[Position, dict[str, Any]] | None:
        """Where the checkpoint was and its plan; None of an empty folder. Model and optimizer are as it has them."""
        wanted = "://" in path or not Path(path).is_dir() or is_there(path)
        if not any(found for (found,) in self._world.gather_numbers([float(wanted)])):
            return None
        problem, restored = "", None
        try:
            restored = restore(path, self._model, self._optimizers)
        except (Misuse, OSError) as error:
            problem = str(error)
        self._world.agree(problem)
        assert restored is not None
        self.resumed, plan, self._random = restored
        self._loader = plan.get("data", {})
        return self.resumed, plan

    def take_loader(self) -> Mapping[str, Any]:
        """What the checkpoint had of the loader; once."""
        loader, self._loader = self._loader, {}
        return loader

    def restore_rng_state(self, num_steps: int) -> None:
        """Training begins: random numbers go on as a checkpoint had them."""
        random, self._random = self._random, None
        if random is not None:
            restore_rng_of_rank(random, self._world.rank, num_steps)

    def close(self) -> None:
        """Waits until all is written."""
        if self._saver is not None:
            self._saver.close()

"""The checkpoints of a user-owned loop: where they go, when one is due, and which one it resumes from."""

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from elche.errors import Misuse
from elche_worker.collectives.world import World
from elche_worker.trainer.attachment import Attachment
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
        """Where checkpoints go; "" if that is not configured."""
        self.resumed: Position | None = None
        """Position of the loaded checkpoint, until the loop has reached it."""
        self._loader: Mapping[str, Any] = {}
        """The loader's state in the checkpoint, until its epoch begins."""
        self._random: dict[str, Any] | None = None
        """Its random number generators, until training begins."""
        self._saver: Saver | None = None
        self._saved_s = time.monotonic()

    def check(self) -> None:
        """Raises `Misuse` when checkpoints are configured without a place."""
        if self.has_interval and not self.place:
            raise Misuse("checkpoint_every_minutes needs a place: give checkpoint_dir, or set ELCHE_CHECKPOINT_DIR")

    @property
    def has_interval(self) -> bool:
        """Whether checkpoints are made at intervals."""
        return self._every_minutes is not None

    def take_due(self) -> bool:
        """True once per interval, on rank 0 only."""
        if self._every_minutes is None or self._world.rank:
            return False
        is_due = time.monotonic() - self._saved_s >= self._every_minutes * 60
        if is_due:
            self._saved_s = time.monotonic()
        return is_due

    def save(self, position: Position, plan: dict[str, Any], attachment: Attachment, place: str = "") -> None:
        """Starts writing, on rank 0. Raises `Misuse` without a place."""
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
            attachment.report_saved,
            attachment.report_not_saved,
        )

    def load(self, path: str) -> tuple[Position, dict[str, Any]] | None:
        """Restores model and optimizer; returns the checkpoint's position and plan, or None for an empty folder."""
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
        """The loader's state in the checkpoint. Returned once."""
        loader, self._loader = self._loader, {}
        return loader

    def restore_rng_state(self, num_steps: int) -> None:
        """Continues the checkpoint's random numbers, when training begins."""
        random, self._random = self._random, None
        if random is not None:
            restore_rng_of_rank(random, self._world.rank, num_steps)

    def close(self) -> None:
        """Waits until all checkpoints are written."""
        if self._saver is not None:
            self._saver.close()

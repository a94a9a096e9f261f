"""User-owned training loops: one process per device, and `step()` instead of `optimizer.step()`."""

from elche_worker.trainer.config import TrainerConfig
from elche_worker.trainer.data import Batch
from elche_worker.trainer.forward import LossContext
from elche_worker.trainer.gathering import Gathered
from elche_worker.trainer.trainer import Trainer

__all__ = ["Batch", "Gathered", "LossContext", "Trainer", "TrainerConfig"]

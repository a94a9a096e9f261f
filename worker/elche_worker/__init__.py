"""The rank's side of elche: what a user writes, and the processes that train it."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from elche.errors import InvalidJob, Misuse
from elche_worker.callbacks import EpochMetrics, Rank
from elche_worker.data import Shards
from elche_worker.job import TrainingJob
from elche_worker.loggers import Logger, MLflow, TensorBoard, WandB
from elche_worker.outer import SGD, Adam, Average, Nesterov
from elche_worker.scalars import record_scalar
from elche_worker.schedule import Progress
from elche_worker.sharding.strategy import Strategy
from elche_worker.state import TrainedState

if TYPE_CHECKING:
    from elche_worker.ddp import Ddp
    from elche_worker.sharding import Sharded, shard
    from elche_worker.trainer import LossContext, Trainer, TrainerConfig

__all__ = [
    "SGD",
    "Adam",
    "Average",
    "Ddp",
    "EpochMetrics",
    "InvalidJob",
    "Logger",
    "LossContext",
    "MLflow",
    "Misuse",
    "Nesterov",
    "Progress",
    "Rank",
    "Sharded",
    "Shards",
    "Strategy",
    "TensorBoard",
    "TrainedState",
    "Trainer",
    "TrainerConfig",
    "TrainingJob",
    "WandB",
    "record_scalar",
    "shard",
]

# What only some need is imported when it is asked for: it takes as long as torch itself.
_LATER = {
    "Ddp": "elche_worker.ddp",
    "LossContext": "elche_worker.trainer",
    "Sharded": "elche_worker.sharding",
    "Trainer": "elche_worker.trainer",
    "TrainerConfig": "elche_worker.trainer",
    "shard": "elche_worker.sharding",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LATER[name]), name)

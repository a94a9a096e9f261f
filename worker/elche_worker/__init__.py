"""The worker's side of elche: the interface of users' files, and the processes that train."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from elche.errors import InvalidJob, Misuse

if TYPE_CHECKING:
    from elche_worker import outer
    from elche_worker.data.dataset import Shards
    from elche_worker.model.state import TrainedState
    from elche_worker.replaying import Replayed, replay
    from elche_worker.run.job import TrainingJob
    from elche_worker.sharding import Sharded, shard
    from elche_worker.trainer import LossContext, Trainer, TrainerConfig
    from elche_worker.trainer.ddp import Ddp
    from elche_worker.user.callbacks import EpochMetrics, Rank, this_rank
    from elche_worker.user.events import record_event
    from elche_worker.user.loggers import Logger, MLflow, TensorBoard, WandB
    from elche_worker.user.scalars import record_scalar
    from elche_worker.user.schedule import Progress
    from elche_worker.user.strategy import Strategy

__all__ = [
    "Ddp",
    "EpochMetrics",
    "InvalidJob",
    "Logger",
    "LossContext",
    "MLflow",
    "Misuse",
    "Progress",
    "Rank",
    "Replayed",
    "Sharded",
    "Shards",
    "Strategy",
    "TensorBoard",
    "TrainedState",
    "Trainer",
    "TrainerConfig",
    "TrainingJob",
    "WandB",
    "outer",
    "record_event",
    "record_scalar",
    "replay",
    "shard",
    "this_rank",
]

# Imported on first use: an agent needs no torch, and some modules take as long to import as torch itself.
_LATER = {
    "Ddp": "elche_worker.trainer.ddp",
    "EpochMetrics": "elche_worker.user.callbacks",
    "Logger": "elche_worker.user.loggers",
    "LossContext": "elche_worker.trainer",
    "MLflow": "elche_worker.user.loggers",
    "Progress": "elche_worker.user.schedule",
    "Rank": "elche_worker.user.callbacks",
    "Replayed": "elche_worker.replaying",
    "Sharded": "elche_worker.sharding",
    "Shards": "elche_worker.data.dataset",
    "Strategy": "elche_worker.user.strategy",
    "TensorBoard": "elche_worker.user.loggers",
    "TrainedState": "elche_worker.model.state",
    "Trainer": "elche_worker.trainer",
    "TrainerConfig": "elche_worker.trainer",
    "TrainingJob": "elche_worker.run.job",
    "WandB": "elche_worker.user.loggers",
    "record_event": "elche_worker.user.events",
    "record_scalar": "elche_worker.user.scalars",
    "replay": "elche_worker.replaying",
    "shard": "elche_worker.sharding",
    "this_rank": "elche_worker.user.callbacks",
}


def __getattr__(name: str) -> Any:
    if name == "outer":  # its optimizers are not re-exported: `SGD` alone would look like the model's optimizer
        return import_module("elche_worker.outer")
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_LATER[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""The rank's side of elche: what a user writes, and the processes that train it."""

from elche.errors import InvalidJob
from elche_worker.callbacks import EpochMetrics, Rank
from elche_worker.data import Shards
from elche_worker.job import TrainingJob
from elche_worker.loggers import Logger, MLflow, TensorBoard, WandB
from elche_worker.outer import SGD, Adam, Average, Nesterov
from elche_worker.scalars import record_scalar
from elche_worker.schedule import Progress
from elche_worker.state import TrainedState

__all__ = [
    "SGD",
    "Adam",
    "Average",
    "EpochMetrics",
    "InvalidJob",
    "Logger",
    "MLflow",
    "Nesterov",
    "Progress",
    "Rank",
    "Shards",
    "TensorBoard",
    "TrainedState",
    "TrainingJob",
    "WandB",
    "record_scalar",
]

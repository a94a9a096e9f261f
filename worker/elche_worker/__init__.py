"""The rank's side of elche: what a user writes, and the processes that train it."""

from elche_worker.job import TrainingJob
from elche_worker.outer import SGD, Adam, Average, Nesterov
from elche_worker.scalars import record_scalar
from elche_worker.state import TrainedState

__all__ = ["SGD", "Adam", "Average", "Nesterov", "TrainedState", "TrainingJob", "record_scalar"]

"""The rank's side of elche: what a user writes, and the processes that train it."""

from elche_worker.job import TrainingJob
from elche_worker.scalars import record_scalar
from elche_worker.state import TrainedState

__all__ = ["TrainedState", "TrainingJob", "record_scalar"]

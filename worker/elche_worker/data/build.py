"""Builds a job's data sets and their order, and refuses those that cannot be trained.

Each of the job's functions finds the random generators seeded alike, by the job's seed, on every rank and whenever it
is called. A random split is then the same everywhere, in the data sets to train and to evaluate.
"""

from collections.abc import Sized
from typing import Any

from elche.errors import InvalidJob
from elche_worker.data.dataset import Order, as_dataset, order_of
from elche_worker.device.rng import seeded
from elche_worker.user.job import JobDefinition
from elche_worker.user.loading import refused


def build_dataset(job: JobDefinition, file_name: str) -> tuple[Any, int]:
    """Returns the data set and its length. Raises `InvalidJob` when it is empty, or cannot be leased."""
    try:
        with seeded(job.seed):
            built = job.dataset()
    except BaseException as error:
        raise refused(error, file_name) from None
    dataset = as_dataset(built, file_name)
    try:
        num_samples = len(dataset)
    except BaseException as error:  # the user's, or Python's of a length that is no whole number
        raise refused(error, file_name) from None
    if num_samples == 0:
        raise InvalidJob(f"{file_name}: dataset() returned an empty data set: there is nothing to train")
    return dataset, num_samples


def build_order(job: JobDefinition, dataset: Any, num_samples: int, file_name: str) -> Order:
    """The order of samples in an epoch. Raises `InvalidJob`, also if their number has changed, or `UserCodeRaised`."""
    try:
        with seeded(job.seed):
            weights = job.sample_weights() if job.sample_weights else None
    except BaseException as error:
        raise refused(error, file_name) from None
    if (now := len(dataset)) != num_samples:
        raise InvalidJob(
            f"{file_name}: the data set had {num_samples} samples, and has {now} now: its len() must stay the same"
        )
    return order_of(dataset, weights, job.seed, file_name)


def build_eval_dataset(job: JobDefinition, file_name: str) -> Any:
    """The data set that all ranks evaluate; None without one."""
    if job.eval_dataset is None:
        return None
    try:
        with seeded(job.seed):
            dataset = job.eval_dataset()
    except BaseException as error:
        raise refused(error, file_name) from None
    if not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__") or len(dataset) == 0:
        kind = type(dataset).__name__
        raise InvalidJob(f"{file_name}: eval_dataset() must return a map-style data set that is not empty, not {kind}")
    return dataset

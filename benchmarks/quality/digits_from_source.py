"""The digits of `digits_averaged` with `buffers="from_source"`."""

from quality import digits_averaged
from virtual_tasks import Task

from elche_worker import TrainingJob


def job(rate: float, seed: int, length: float) -> TrainingJob:
    return digits_averaged.job(rate, seed, length, buffers="from_source")


TASK = Task(title="digits, BatchNorm from source", metric="loss", rate=2e-2, job=job, grows=True)

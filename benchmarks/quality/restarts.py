"""The regression with a rate that falls three times as a cosine and is begun anew (SGDR)."""

import math
from dataclasses import replace

from quality import regression
from virtual_tasks import Task

from elche_worker import Progress, TrainingJob

NUM_CYCLES = 3


def cycles(now: Progress) -> float:
    return 0.5 * (1 + math.cos(math.pi * (min(now.fraction, 1 - 1e-9) * NUM_CYCLES % 1)))


def job(rate: float, seed: int, length: float) -> TrainingJob:
    return replace(regression.job(rate, seed, length), schedule=cycles)


TASK = Task(title="restarts (SGDR)", metric="loss", rate=3e-2, job=job, grows=True)

"""The regression with a rate that falls three times as a cosine and is begun anew (SGDR)."""

import math
from functools import partial

from quality import regression
from virtual_tasks import Task

from elche_worker import Progress

NUM_CYCLES = 3


def cycles(now: Progress) -> float:
    return 0.5 * (1 + math.cos(math.pi * (min(now.fraction, 1 - 1e-9) * NUM_CYCLES % 1)))


TASK = Task(title="restarts (SGDR)", rate=3e-2, job=partial(regression.TASK.job, schedule=cycles))

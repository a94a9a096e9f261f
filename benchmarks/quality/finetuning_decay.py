"""Fine-tuning as in `finetuning_constant`, with a rate that falls to 0."""

from quality import finetuning_constant
from quality._common import fall
from virtual_tasks import Task

from elche_worker import TrainingJob


def job(rate: float, seed: int, length: float) -> TrainingJob:
    return finetuning_constant.job(rate, seed, length, schedule=fall)


TASK = Task(title="fine-tuning, falling rate", metric="loss", rate=1e-3, job=job, grows=True)

"""The transformer of `convergence_jobs` in a sixteenth of its batches, evaluated on fewer windows."""

from dataclasses import replace

import convergence_jobs as jobs
from torch import nn
from virtual_tasks import Task

from elche_worker import TrainingJob

PART, NUM_HELD_OUT = 1 / 16, 300


def evaluate(model: nn.Module) -> dict[str, float]:
    return {"nats_per_byte": jobs.train_text(model, [jobs.load_windows(is_held_out=True)[::40][:NUM_HELD_OUT]]).item()}


def job(rate: float, seed: int, length: float) -> TrainingJob:
    return replace(jobs.transformer_job(PART * length), optimizer=jobs.build_optimizer(rate), evaluate=evaluate)


TASK = Task(title="transformer, short", metric="nats_per_byte", rate=6e-3, job=job)

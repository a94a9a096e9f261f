"""The embedding of `rare_rows`, with Adam."""

from quality._common import adam, job_of
from quality.rare_rows import NUM_HELD_OUT, Rows, loss, samples
from virtual_tasks import Task

TASK = Task(
    title="embedding, rare rows, Adam",
    rate=0.02,
    job=job_of(samples, NUM_HELD_OUT, model=Rows, optimizer=adam, loss=loss, batch_size=20),
)

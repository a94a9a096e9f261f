"""The digits of `digits_averaged` with `buffers="local"`."""

from functools import partial

from quality import digits_averaged
from virtual_tasks import Task

TASK = Task(title="digits, BatchNorm local", rate=2e-2, job=partial(digits_averaged.job, buffers="local"))

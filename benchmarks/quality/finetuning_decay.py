"""Fine-tuning as in `finetuning_constant`, with a rate that falls to 0."""

from functools import partial

from quality import finetuning_constant
from quality._common import fall
from virtual_tasks import Task

TASK = Task(title="fine-tuning, falling rate", rate=1e-3, job=partial(finetuning_constant.TASK.job, schedule=fall))

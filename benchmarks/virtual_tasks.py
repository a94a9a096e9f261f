"""Tasks that are compared in virtual time: those of `convergence_jobs`, and those in the files of `quality`."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

NUM_FOLDS = 5
IN_FILES = sorted(path.stem for path in (Path(__file__).parent / "quality").glob("[!_]*.py") if path.stem != "run")
"""Tasks of `quality`: a file of this name has it as `TASK`."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained, and how its result is judged."""

    title: str
    metric: str = "loss"
    """Of the job's `evaluate`."""
    rate: float
    """Learning rate, of which others are multiples."""
    job: Callable[..., Any]
    """The `TrainingJob` of (learning rate, seed, times the usual number of samples)."""
    rates: tuple[float, ...] = (0.5, 1.0, 2.0)
    """Multiples of `rate`, of which each way gets its best."""
    grows: bool = True
    """True if a way that does best at the greatest rate tries twice as much, and so on."""
    is_share: bool = False
    """True if the metric may be 0, such as a share, and is compared in hundredths; else it is compared in per cent."""
    more_is_better: bool = False
    ways: tuple[str, ...] = ("default", "mean", "ddp")
    """What `quality/run.py` compares."""
    parts: str = ""
    """Further words on what is compared."""

    @property
    def unit(self) -> str:
        return "points" if self.is_share else "%"

    def worse(self, value: float, than: float) -> float:
        """How much worse, in units."""
        if self.is_share:
            return 100 * (than - value if self.more_is_better else value - than)
        return 100 * (value / than - 1)


def _of_jobs(name: str, rate: float, seed: int, length: float) -> Any:
    import convergence_jobs as jobs

    jobs.FOLD = seed % NUM_FOLDS
    jobs.load_fold.cache_clear()
    build = jobs.build_muon if name == "muon" else jobs.build_optimizer
    return replace(jobs.JOBS[name](length), optimizer=build(rate))


def _task_of_jobs(name: str, rate: float) -> Task:
    is_digits = name == "digits"
    metric = "accuracy" if is_digits else "nats_per_byte"
    job = partial(_of_jobs, name)
    more = {"grows": False, "is_share": is_digits, "more_is_better": is_digits}
    return Task(title=name, metric=metric, rate=rate, job=job, **more)


OF_JOBS = {
    name: _task_of_jobs(name, rate)
    for name, rate in (("text", 1.5e-2), ("digits", 3e-3), ("transformer", 3e-3), ("muon", 3e-3))
}
NAMES = (*OF_JOBS, *IN_FILES)


def task_of(name: str) -> Task:
    """The task of a name."""
    if name in OF_JOBS:
        return OF_JOBS[name]
    task: Task = import_module(f"quality.{name}").TASK
    return task

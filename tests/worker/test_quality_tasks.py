"""The tasks of `benchmarks/quality`, on which ways to average are compared: each can be trained in each way."""

from collections.abc import Callable
from math import isfinite
from pathlib import Path
from typing import Any

import pytest

QUALITY = Path(__file__).parents[2] / "benchmarks" / "quality"
TASKS = sorted(path.stem for path in QUALITY.glob("[!_]*.py") if path.stem != "run")
SPEEDS = [1.0, 2.3]
SHORT = 0.02
"""Times the usual number of samples: a dozen batches of most tasks."""


@pytest.mark.parametrize("name", TASKS)
def test_each_task_is_trained_in_a_few_steps(from_benchmarks: Callable[[str], Any], name: str) -> None:
    virtual_ranks, virtual_peers = from_benchmarks("virtual_ranks"), from_benchmarks("virtual_peers")
    task = from_benchmarks("virtual_tasks").task_of(name)
    job = task.job(task.rate, 0, SHORT)
    total = len(job.dataset()) * job.epochs
    ways = [
        virtual_ranks.train(job, virtual_ranks.Way(), SPEEDS, seed=1, num_points=1),
        virtual_peers.train(job, "ddp", SPEEDS, seed=1, num_points=1),
    ]
    for points in ways:
        (last,) = points
        assert last.samples == total
        assert isfinite(last.metrics[task.metric])


def test_the_page_shows_tasks_that_are_there(from_benchmarks: Callable[[str], Any]) -> None:
    shown = from_benchmarks("quality.run").SHOWN
    assert set(shown) <= set(TASKS)

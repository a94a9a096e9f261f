"""`start()` runs the job's file anew on each rank: what a program has changed since, they would not have."""

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from elche.errors import InvalidJob
from elche_worker.outer import Nesterov
from elche_worker.run.same_job import check_is_of_file

FILE = """
import functools
import os
import torch
from torch import nn
from torch.utils.data import TensorDataset
from elche_worker import TrainingJob

LR = 0.1
FACTOR = float(os.environ.get("FACTOR", "2"))
CONFIG = {"hidden": 4}
SEEN = {}
CALLS = 0
FIRST, SECOND = 1, 2
UNUSED = 1
NAMES = {"first", "second"}
WEIGHTS = [1.0]
WEIGHTS.append(2.0)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(CONFIG["hidden"], 1)

    def forward(self, x):
        return self.layer(x)

def rate():
    return LR * FACTOR * FIRST * len(NAMES) * sum(WEIGHTS)

def dataset():
    SEEN["dataset"] = 1
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x[:, :1])

def train_step(model, batch):
    global CALLS
    CALLS += 1
    return (model(batch[0]) - batch[1]).square().mean()

def scaled(factor, model, batch):
    return factor * train_step(model, batch)

def job_with(lr, factor=1.0):
    return TrainingJob(
        model=Net,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=lr * rate()),
        dataset=dataset,
        train_step=train_step if factor == 1.0 else functools.partial(scaled, factor),
        batch_size=4,
        epochs=1,
    )

job = job_with(1.0)

if __name__ == "__main__":
    for FACTOR in (1.0, 2.0):
        job.start(ranks=1).join()
"""


@pytest.fixture
def script(tmp_path: Path) -> Iterator[ModuleType]:
    path = tmp_path / "several_jobs.py"
    path.write_text(FILE.replace("for FACTOR in", "for OTHER in"))
    yield from loaded(path)


def loaded(path: Path) -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[path.stem]


def test_a_job_that_is_made_alike_is_the_files(script: Any) -> None:
    check_is_of_file(script.job)
    check_is_of_file(script.job_with(1.0))
    check_is_of_file(replace(script.job, epochs=5))


@pytest.mark.parametrize(
    ("arguments", "name"), [((0.5,), "optimizer"), ((1.0, 3.0), "train_step"), ((1,), "optimizer")]
)
def test_a_job_whose_functions_have_other_values_is_refused(script: Any, arguments: Any, name: str) -> None:
    with pytest.raises(InvalidJob, match=rf"runs the `job` of its file, and this one has another {name}: "):
        check_is_of_file(script.job_with(*arguments))


@pytest.mark.parametrize(
    "changed", [{"batch_size": {"": 8}}, {"batch_size": lambda device: 8}, {"outer_optimizer": Nesterov(lr=0.3)}]
)
def test_a_setting_that_no_option_can_say_is_refused_unless_it_is_the_files(script: Any, changed: Any) -> None:
    """The ranks have it from the file: it would be lost in silence."""
    other, (name,) = replace(script.job, **changed), changed
    with pytest.raises(InvalidJob, match=f"this one has another {name}: "):
        check_is_of_file(other)
    script.job = other
    check_is_of_file(replace(other, epochs=2))


def test_partial_functions_are_compared_by_what_they_hold(script: Any) -> None:
    script.job = script.job_with(1.0, 3.0)
    check_is_of_file(script.job_with(1.0, 3.0))
    with pytest.raises(InvalidJob, match="another train_step"):
        check_is_of_file(script.job_with(1.0, 4.0))


@pytest.mark.parametrize(
    ("name", "value"), [("LR", 0.2), ("LR", None), ("CONFIG", {"hidden": 8}), ("NAMES", {"first"})]
)
def test_a_job_whose_functions_read_what_the_program_has_changed_is_refused(
    script: Any, name: str, value: object
) -> None:
    """Read by a function that the job's own call, and by a class."""
    setattr(script, name, value)
    with pytest.raises(InvalidJob, match=rf"the job's functions read {name}, which this program has set since"):
        check_is_of_file(script.job)


def test_what_is_changed_in_place_is_seen(script: Any) -> None:
    script.CONFIG["hidden"] = 8
    with pytest.raises(InvalidJob, match="the job's functions read CONFIG, "):
        check_is_of_file(script.job)


@pytest.mark.parametrize(("name", "value"), [("UNUSED", 2), ("CALLS", 7), ("SEEN", {"dataset": 1}), ("FACTOR", 2.0)])
def test_what_no_function_reads_or_its_own_functions_set_may_change(script: Any, name: str, value: object) -> None:
    setattr(script, name, value)
    check_is_of_file(script.job)


def test_a_variable_of_the_programs_own_part_is_refused(tmp_path: Path) -> None:
    """Its value at the file's top level is known only there: `for FACTOR in (1.0, 2.0): job.start()`."""
    path = tmp_path / "several_factors.py"
    path.write_text(FILE)
    for script in loaded(path):
        with pytest.raises(InvalidJob, match="the job's functions read FACTOR, "):
            check_is_of_file(script.job)  # type: ignore[attr-defined]

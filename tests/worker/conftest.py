"""Fixtures of the worker's tests: ranks whose loop a test drives in the coordinator's place."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from elche_worker.collectives.reduction import Reduction
from elche_worker.rank import connect
from support.replicas import Make, World, new_rank
from support.told import Rank

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Rank]]:
    """Makes a rank that has had its first round. Its rounds are those of one among others, whose part a test plays."""
    monkeypatch.setattr(Reduction, "follows_one", True)
    with ExitStack() as stack:

        def make(**changes: Any) -> Rank:
            rank = Rank(tmp_path, stack, **changes)
            rank.begin()
            return rank

        yield make


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes ranks of one job. Where they would meet through the coordinator's store, they do in this process's."""
    store = dist.HashStore()
    monkeypatch.setattr(connect, "CoordinatorStore", lambda channel, secret: store)
    with ExitStack() as stack:

        def make(size: int, **changes: Any) -> World:
            made = World([new_rank(tmp_path, rank, stack, **changes) for rank in range(size)])
            made.join(attempt=2 if changes.get("loaded") else 1)
            return made

        yield make


@pytest.fixture
def from_benchmarks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Imports a module of `benchmarks`, which are not package."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield import_module
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(f"{BENCHMARKS}/"):
            del sys.modules[name]

"""Fixtures of the worker's tests: ranks whose loop a test drives in the coordinator's place."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from support.told import Rank


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Rank]]:
    """Makes a rank that has had its first round."""
    with ExitStack() as stack:

        def make(**changes: Any) -> Rank:
            rank = Rank(tmp_path, stack, **changes)
            rank.begin()
            return rank

        yield make

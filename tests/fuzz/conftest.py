"""What tests that read changed messages and files have in common."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.corpus import RUN
from support.fuzzing import bounded_memory


@pytest.fixture
def bounded() -> Iterator[None]:
    """Fails a test that takes much memory."""
    with bounded_memory():
        yield


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A copy of the run's folder."""
    return shutil.copytree(RUN, tmp_path / "run")

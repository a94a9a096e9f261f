"""What `elche init` writes runs as it is."""

from collections.abc import Callable
from pathlib import Path

import pytest

from support.real_processes import Command

LIMIT_S = 120.0
LONG = pytest.mark.long(reason="a job is started in the same way, and these loops in test_own_loop_examples")


@pytest.mark.parametrize(
    ("kind", "package"),
    [
        ("job", "torch"),
        pytest.param("loop", "torch", marks=LONG),
        pytest.param("huggingface", "transformers", marks=LONG),
        pytest.param("lightning", "pytorch_lightning", marks=LONG),
    ],
)
def test_what_it_writes_trains(kind: str, package: str, elche: Callable[..., Command], tmp_path: Path) -> None:
    pytest.importorskip(package)
    assert elche("init", "--kind", kind).code == 0
    done = elche("run", "train.py", "--ranks", "2", "--device", "cpu", limit_s=LIMIT_S)
    assert done.code == 0, done.err
    assert (tmp_path / "runs").is_dir()

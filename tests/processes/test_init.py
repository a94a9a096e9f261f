"""What `elche init` writes runs as it is."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from support.real_processes import Command

LIMIT_S = 400.0
LONG = pytest.mark.long(reason="a job is started in the same way, and these loops in test_own_loop_examples")


@pytest.mark.parametrize(
    ("kind", "package", "metrics"),
    [
        ("job", "torch", None),
        pytest.param("loop", "torch", None, marks=LONG),
        pytest.param("huggingface", "transformers", [], marks=LONG),
        pytest.param("lightning", "pytorch_lightning", ["accuracy"], marks=LONG),
    ],
)
def test_what_it_writes_trains(
    kind: str, package: str, metrics: list[str] | None, elche: Callable[..., Command], tmp_path: Path
) -> None:
    pytest.importorskip(package)
    assert elche("init", "--kind", kind).code == 0
    done = elche("run", "train.py", "--ranks", "2", "--device", "cpu", "--json", "--events", limit_s=LIMIT_S)
    assert done.code == 0, done.err
    assert (tmp_path / "runs").is_dir()
    told = [json.loads(line) for line in done.out.splitlines() if line.startswith("{")]
    if metrics is not None:  # of a framework, which elche asks for them
        losses = [one["loss"] for one in told if one["event"] == "epoch"]
        assert losses[-1] < losses[0]
        (result,) = (one for one in told if one["event"] == "result")
        assert sorted(result["metrics"]) == metrics

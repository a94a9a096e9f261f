"""The wheels for a machine with a GPU are all that the tests and the benchmark import there, and no PyTorch."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_the_wheels_are_what_is_needed_beside_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec = importlib.util.spec_from_file_location("gpu_wheels", ROOT / "tools" / "gpu_wheels.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    names = {line.partition("==")[0] for line in module.wanted()}
    # what a run without them has missed
    assert {"cryptography", "grpcio", "grpcio-health-checking", "numpy", "pytest", "sqlalchemy"} <= names
    assert {"setproctitle", "starlette", "uvicorn", "anyio", "h11", "execnet", "pluggy"} <= names
    assert not names & {"torch", "sympy", "networkx", "uv", "mypy", "ruff"}
    assert all("--hash=sha256:" in line for line in module.wanted())

"""The wheels for a machine with a GPU are all that the tests and the benchmark import there, and no PyTorch."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
WITHOUT_OTHERS = """
import os, re, sys
from importlib.metadata import packages_distributions

there = {"elche", "torch", *os.environ["WHEELS"].split()}
absent = {
    module
    for module, owners in packages_distributions().items()
    if not there & {re.sub("[-_.]+", "-", one).lower() for one in owners}
}

class Others:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if path is None and name in absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Others)
"""
"""A sitecustomize.py: of what is installed here, only some packages are there."""


@pytest.fixture
def wheels(monkeypatch: pytest.MonkeyPatch) -> Any:
    """tools/gpu_wheels.py."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec = importlib.util.spec_from_file_location("gpu_wheels", ROOT / "tools" / "gpu_wheels.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def names_of(wheels: Any) -> set[str]:
    return {line.partition("==")[0] for line in wheels.wanted()}


def test_the_wheels_are_what_is_needed_beside_pytorch(wheels: Any) -> None:
    names = names_of(wheels)
    # what a run without them has missed
    assert {"cryptography", "grpcio", "grpcio-health-checking", "numpy", "pytest", "sqlalchemy"} <= names
    assert {"setproctitle", "starlette", "uvicorn", "anyio", "h11", "execnet", "pluggy"} <= names
    assert not names & {"torch", "sympy", "networkx", "uv", "mypy", "ruff"}
    assert all("--hash=sha256:" in line for line in wheels.wanted())


def test_the_tests_start_with_the_wheels_and_pytorch_alone(wheels: Any, tmp_path: Path) -> None:
    """They stopped at an import of what these did not have."""
    _, needs = wheels.locked()
    there = names_of(wheels) | wheels.closure({"torch"}, needs)
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_OTHERS)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "WHEELS": " ".join(there), "TEST_EXECUTES": "1"}
    plugins = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "-p pytest_timeout -p xdist"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "gpu", "tests/gpu"],
        cwd=ROOT,
        env=environment | plugins,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr

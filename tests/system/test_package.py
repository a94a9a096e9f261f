"""The package as others install it: built as wheel and source, in clean environments, with each part alone."""

import json
import os
import subprocess
import zipfile
from pathlib import Path

import pytest
from uv import find_uv_bin

pytestmark = pytest.mark.system
ROOT = Path(__file__).parents[2]
PACKAGES = ("elche", "elche_client", "elche_coordinator", "elche_worker")
PYTHONS = ("3.11", "3.12", "3.13")


def run(*command: str, cwd: Path | None = None) -> str:
    """What a command prints; it must succeed. It finds nothing of this checkout."""
    environment = {name: text for name, text in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"UV_PYTHON_DOWNLOADS": "never", "ELCHE_FOLDER": "none"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with wheel and source distribution."""
    folder = tmp_path_factory.mktemp("built")
    run(find_uv_bin(), "build", "--out-dir", str(folder), str(ROOT))
    return folder


def installed(where: Path, what: str, python: str = "3.11") -> Path:
    """The programs of a clean environment in which this is installed."""
    run(find_uv_bin(), "venv", "--python", python, str(where))
    run(find_uv_bin(), "pip", "install", "--python", str(where / "bin" / "python"), what)
    return where / "bin"


def found_modules(programs: Path) -> set[str]:
    """Which of the packages can be imported there."""
    code = "import importlib.util as u, json; print(json.dumps([n for n in NAMES if u.find_spec(n)]))"
    names = repr((*PACKAGES, "torch", "sqlalchemy", "pytest"))
    return set(json.loads(run(str(programs / "python"), "-c", code.replace("NAMES", names))))


def needs_python(version: str) -> None:
    """Skips a test for a Python that this machine has not."""
    command = [find_uv_bin(), "python", "find", "--no-python-downloads", version]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip(f"there is no Python {version}")


def test_every_part_is_typed_and_has_its_files(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(names)
    assert any(name.endswith(".py.txt") for name in names), "templates of elche init"
    assert "elche_coordinator/web/page/page.js" in names
    assert not [name for name in names if name.startswith(("tests", "benchmarks"))]


@pytest.mark.parametrize("python", PYTHONS)
def test_a_client_needs_neither_torch_nor_a_database(built: Path, tmp_path: Path, python: str) -> None:
    needs_python(python)
    (wheel,) = built.glob("*.whl")
    programs = installed(tmp_path / "client", str(wheel), python)
    assert found_modules(programs) == set(PACKAGES)
    assert "elche submit train.py" in run(str(programs / "elche"), "--help")
    run(str(programs / "python"), "-c", "from elche_client import AsyncClient, Client")
    run(str(programs / "elche"), "init", "train.py", cwd=tmp_path)


def test_a_coordinator_needs_no_torch(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    programs = installed(tmp_path / "coordinator", f"{wheel}[coordinator]")
    assert found_modules(programs) == {*PACKAGES, "sqlalchemy"}
    assert "--quota" in run(str(programs / "elche-coordinator"), "--help")


@pytest.mark.long(reason="installs PyTorch once more")
def test_all_of_it_trains_from_its_source_distribution(built: Path, tmp_path: Path) -> None:
    (source,) = built.glob("*.tar.gz")
    programs = installed(tmp_path / "all", f"{source}[all]")
    assert found_modules(programs) == {*PACKAGES, "sqlalchemy", "torch"}
    run(str(programs / "elche"), "init", "train.py", cwd=tmp_path)
    result = json.loads(run(str(programs / "elche"), "run", "train.py", "--ranks", "2", "--json", cwd=tmp_path))
    assert result["state"] == "succeeded"

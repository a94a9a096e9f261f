"""Files that import from their own package."""

import sys
from pathlib import Path

import pytest

from elche.package import package_of
from elche_worker.session.script import run_script
from elche_worker.user.loading import load_job

JOB = """
from elche_worker import TrainingJob
from .nets import model

job = TrainingJob(model=model, optimizer=print, dataset=print, train_step=print, batch_size=1, epochs=1)
"""
LOOP = "from ..common.nets import model\nprint(__name__, __package__, model.__module__)\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a package `proj` with a package `train`; `common` has no __init__.py."""
    for name in ("proj/train", "proj/common"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("proj/__init__.py", "proj/train/__init__.py"):
        (tmp_path / name).touch()
    for name in ("proj/train/nets.py", "proj/common/nets.py"):
        (tmp_path / name).write_text("def model(): ...\n")
    for name in ("path", "argv"):
        monkeypatch.setattr(sys, name, list(getattr(sys, name)))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return tmp_path


def install(folder: Path) -> None:
    """Makes another package `proj` that can be imported."""
    (folder / "installed/proj").mkdir(parents=True)
    (folder / "installed/proj/__init__.py").touch()
    sys.path.append(str(folder / "installed"))


@pytest.mark.parametrize(
    ("source", "package"),
    [
        ("from .nets import model", "proj.train"),
        ("def main():\n    from . import nets", "proj.train"),
        ("from ..common import nets", "proj.train"),
        ("from proj.train.nets import model", "proj.train"),
        ("import proj.common.nets", "proj.train"),
        ("from proj import common", "proj.train"),
        ("from nets import model", ""),
        ("import proj", ""),
        ("from proj import __version__", ""),
        ("from proj.data.utils import shard", ""),  # of an installed package that has the folder's name
        ("try:\n    from proj.common.nets import model\nexcept ImportError:\n    from nets import model", ""),
        ("try:\n    from .nets import model\nexcept ImportError:\n    from nets import model", ""),
        ("from . import (", ""),
        ("from . import nets\0", ""),
    ],
)
def test_its_package_is_that_of_its_folders(folder: Path, source: str, package: str) -> None:
    expected = (package, str(folder)) if package else ("", "")
    assert package_of(source, str(folder / "proj/train/main.py")) == expected


def test_what_is_found_beside_a_file_is_not_of_its_package(folder: Path) -> None:
    """A repository that has the name of its package, and an `__init__.py` as well."""
    (folder / "proj/train/proj/common").mkdir(parents=True)
    assert package_of("import proj.common", str(folder / "proj/train/main.py")) == ("", "")


def test_a_script_in_a_folder_that_is_no_package_imports_what_is_installed(folder: Path) -> None:
    """As one in a folder `torch`, with folders of its own there."""
    (folder / "proj/train/__init__.py").unlink()
    install(folder)
    assert package_of("import proj.common", str(folder / "proj/train/main.py")) == ("", "")


def test_a_package_around_a_file_comes_before_an_installed_one(folder: Path) -> None:
    """As with `python -m` in the folder that has the package: an older copy may be installed."""
    install(folder)
    assert package_of("import proj.common", str(folder / "proj/train/main.py")) == ("proj.train", str(folder))


@pytest.mark.parametrize(
    ("place", "source", "package"),
    [
        ("src", "from src.nets import model", "src"),
        ("src/train", "from src.nets import model", "src.train"),
        ("src", "from src.others import model", ""),
        ("src", "import src", ""),
        ("src", "from nets import model", ""),
    ],
)
def test_a_package_without_init_is_found_by_its_name(folder: Path, place: str, source: str, package: str) -> None:
    """`python -m src.train` ran, and here it ended with "No module named 'src'"."""
    (folder / "src/train").mkdir(parents=True)
    (folder / "src/nets.py").write_text("def model(): ...\n")
    expected = (package, str(folder)) if package else ("", "")
    assert package_of(source, str(folder / place / "main.py")) == expected


def test_folders_without_init_are_as_many_as_imports_climb(folder: Path) -> None:
    file = str(folder / "proj/common/deep/main.py")
    assert package_of("from . import nets", file) == ("deep", str(folder / "proj/common"))
    assert package_of("from .. import nets", file) == ("proj.common.deep", str(folder))


def test_the_root_is_no_package_though_it_has_an_init(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter(range(100))  # an endless search ends with StopIteration
    monkeypatch.setattr(Path, "is_file", lambda path: next(looks) >= 0)
    assert package_of("from .nets import model", "/app/train/main.py") == ("app.train", "/")
    assert package_of("from .nets import model", "/main.py") == ("", "")


def test_a_job_imports_from_its_package(folder: Path) -> None:
    assert load_job(JOB, str(folder / "proj/train/job.py")).model.__module__ == "proj.train.nets"


def test_a_loop_runs_as_with_m(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It ended with "attempted relative import with no known parent package"."""
    (folder / "proj/train/loop.py").write_text(LOOP)
    run_script(str(folder / "proj/train/loop.py"), [], left_alone_code=1)
    assert capsys.readouterr().out == "__main__ proj.train proj.common.nets\n"


def test_a_loop_finds_its_package_by_name(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`python -m proj.train.loop` ran, and here it ended with "No module named 'proj'"."""
    (folder / "proj/train/loop.py").write_text(
        "from proj.common.nets import model\nprint(__package__, model.__module__)"
    )
    run_script(str(folder / "proj/train/loop.py"), [], left_alone_code=1)
    assert capsys.readouterr().out == "proj.train proj.common.nets\n"

"""Modules of the user's own that are edited while a job trains."""

import importlib
import json
import py_compile
import sys
import traceback
from pathlib import Path
from types import ModuleType

import pytest

from elche.own_modules import path_of
from elche_worker.user import as_begun
from elche_worker.user.as_begun import import_as_begun, keep_modules, read_own_modules


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a module, and a package with one."""
    (tmp_path / "nets").mkdir()
    (tmp_path / "nets/__init__.py").write_text("from .deep import NAME\n")
    (tmp_path / "nets/deep.py").write_text("NAME = 'as begun'\n")
    (tmp_path / "losses.py").write_bytes("# -*- coding: latin-1 -*-\nSIGN = '\u00b1'\n".encode("latin-1"))
    for name in ("path", "meta_path"):
        monkeypatch.setattr(sys, name, list(getattr(sys, name)))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    monkeypatch.setattr(as_begun, "_read", {})
    sys.path.insert(0, str(tmp_path))
    return tmp_path


def start_anew() -> None:
    """As a process that is started later: it has imported nothing of the user's."""
    for name in ("nets", "nets.deep", "losses"):
        sys.modules.pop(name, None)
    importlib.invalidate_caches()


def test_a_rank_that_starts_later_imports_what_the_others_have(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = path_of(folder, "job")
    import_as_begun(path)  # nothing is kept yet
    for name in ("nets", "losses"):
        importlib.import_module(name)
    keep_modules(path, "")
    (folder / "nets/deep.py").write_text("NAME = 'edited'\n")
    py_compile.compile(str(folder / "nets/deep.py"))
    (folder / "losses.py").unlink()
    start_anew()
    import_as_begun(path)
    assert importlib.import_module("nets").NAME == "as begun"
    assert importlib.import_module("losses").SIGN == "\u00b1"
    said = capfd.readouterr().err
    assert f"{folder}/losses.py and 1 more has changed since the job began" in said
    keep_modules(path, "")
    start_anew()
    sys.meta_path[:] = sys.meta_path[1:]
    assert importlib.import_module("nets").NAME == "edited", "another job begins with the present files"
    keep_modules(path, "")
    assert json.loads(path.read_text())["nets.deep"] == [f"{folder}/nets/deep.py", "NAME = 'as begun'\n"]
    assert not list(folder.glob(".modules-*.*[0-9]")), "no draft is left"


def test_only_modules_of_the_users_own_are_kept(folder: Path) -> None:
    importlib.import_module("losses")
    keep_modules(path_of(folder, "job"), "")
    kept = json.loads(path_of(folder, "job").read_text())
    assert "losses" in kept
    assert not [name for name in kept if name.partition(".")[0] in ("torch", "json", "elche_worker", "pytest")]


def test_a_module_that_is_edited_before_the_rank_is_ready_is_kept_as_it_was(folder: Path) -> None:
    """A rank may be long in compiling its model. What was kept then was not what it ran, and nothing said so."""
    path = path_of(folder, "job")
    importlib.import_module("losses")
    read_own_modules("")
    (folder / "losses.py").write_text("SIGN = 'edited'\n")
    importlib.import_module("nets")
    keep_modules(path, "")
    start_anew()
    import_as_begun(path)
    assert importlib.import_module("losses").SIGN == "\u00b1"
    assert "nets.deep" in json.loads(path.read_text())


def test_installed_modules_are_not_kept_wherever_they_are(folder: Path) -> None:
    """All of a library was kept, and compiled anew by each rank that was started again: those that --requirements
    installs, and those of Debian's Python. A user's package may be named as ours begin.
    """
    for place in ("packages/0123", "lib/python3/dist-packages", "."):
        name = {"packages/0123": "asked_for", ".": "elche_nets"}.get(place, "of_the_system")
        (folder / place).mkdir(parents=True, exist_ok=True)
        (folder / place / f"{name}.py").touch()
        sys.path.insert(0, str(folder / place))
        importlib.import_module(name)
    keep_modules(path_of(folder, "job"), str(folder / "packages"))
    kept = json.loads(path_of(folder, "job").read_text())
    assert {"asked_for", "elche_nets", "of_the_system"} & set(kept) == {"elche_nets"}


def test_modules_of_the_process_that_a_rank_was_forked_from_are_not_looked_at(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some 3,000, which took 20 ms and copied the memory that they share."""
    looked_at = []
    monkeypatch.setattr(as_begun, "_loader_of", looked_at.append)
    import_as_begun(folder / "none")
    importlib.import_module("nets")
    read_own_modules("")
    assert {one.__name__ for one in looked_at} == {"nets", "nets.deep"}


def test_a_lazy_module_is_not_loaded_by_a_look_at_it(folder: Path) -> None:
    class Lazy(ModuleType):
        def __getattribute__(self, name: str) -> object:
            raise ImportError(f"{name} needs a library that is not installed")

    class Bare:
        """As cffi's libraries, which claim to be modules."""

        __slots__ = ()
        __class__ = ModuleType  # type: ignore[assignment]

    sys.modules["lazy"] = Lazy("lazy")
    sys.modules["bare"] = Bare()  # type: ignore[assignment]
    keep_modules(path_of(folder, "job"), "")
    assert path_of(folder, "job").is_file()


def test_tracebacks_show_the_lines_that_run(folder: Path) -> None:
    path = path_of(folder, "job")
    (folder / "losses.py").write_text("def loss():\n    raise ValueError  # as begun\n")
    importlib.import_module("losses")
    keep_modules(path, "")
    (folder / "losses.py").write_text("\n\n# edited\n")
    start_anew()
    import_as_begun(path)
    with pytest.raises(ValueError) as raised:
        importlib.import_module("losses").loss()
    assert "raise ValueError  # as begun" in "".join(traceback.format_exception(raised.value))


@pytest.mark.parametrize("text", ["", "[]", '{"losses": 1}', '{"losses": ["losses.py", 1]}', '{"losses"'])
def test_what_is_damaged_or_cannot_be_written_fails_no_rank(folder: Path, text: str) -> None:
    path = path_of(folder, "job")
    path.write_text(text)
    import_as_begun(path)
    assert importlib.import_module("nets").NAME == "as begun"
    keep_modules(folder / "missing" / "file", "")

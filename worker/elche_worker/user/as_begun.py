"""Modules of the user's own, as they were when the job began: a rank that starts later must train as the others do.

Files are edited, and branches changed, while a job trains. Without this a rank that is started again would run the
job's file as it was sent, and import what it needs as it is now.
"""

import json
import linecache
import os
import sys
import sysconfig
from collections.abc import Mapping
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import decode_source, spec_from_file_location
from itertools import takewhile
from pathlib import Path
from types import ModuleType

from elche.output import notice
from elche.own_modules import EXACT, Modules, edited, read_modules

INSTALLED = ("site-packages", "dist-packages")
"""Names of folders of installed modules: Python's, and on Debian the system's."""
NOT_USERS = ("elche", "elche_worker", "elche_job")
"""Packages that may be installed in place of which none is the user's."""
BEGINS = "elche_job.begins"
"""An empty module before what the job imports. A rank has some 3,000 modules of the process that it was forked from: to
look at each took 20 ms, a tenth of a short rank's time, and copied the memory that they share.
"""
_read: dict[str, tuple[str, str]] = {}
"""Path and text of each module of the user's own, as they were read first."""


def keep_modules(path: Path, packages: str) -> None:
    """Keeps the modules that this process has imported from source files of the user's own, unless a rank has before.
    Where they cannot be written, ranks that start later import what is there then. Those below the folder `packages`
    are installed.
    """
    read_own_modules(packages)
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    with suppress(OSError):
        try:
            with draft.open("x", encoding="ascii") as file:
                json.dump(_read, file)
            os.link(draft, path)  # `link`, not `rename`: the first one's stay
        finally:
            draft.unlink(missing_ok=True)


def import_as_begun(path: Path) -> None:
    """Lets this process import the modules that a rank of the job has kept as they were then. Modules that it
    has imported before this call are none of the user's.
    """
    sys.modules.pop(BEGINS, None)
    sys.modules[BEGINS] = ModuleType(BEGINS)
    kept = read_modules(path)
    sys.meta_path.insert(0, _Finder(kept))
    if files := edited(kept):
        notice(f"{files} has changed since the job began: this rank runs what the others run")


def read_own_modules(packages: str) -> None:
    """Reads each module that is neither installed nor elche's and that has not been read: soon after its import, since
    a rank may be long in building and compiling a model, and the file be edited meanwhile.
    """
    installed = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")] + [packages] * bool(packages)
    below = tuple(os.path.join(folder, "") for folder in installed)
    for name in list(takewhile(BEGINS.__ne__, reversed(sys.modules))):
        if name in _read or name.partition(".")[0] in NOT_USERS:
            continue
        loader = _loader_of(sys.modules.get(name))
        if not isinstance(loader, SourceFileLoader) or loader.name != name:
            continue
        if not loader.path.startswith(below) and not any(folder in loader.path for folder in INSTALLED):
            with suppress(OSError):
                _read[name] = (loader.path, loader.get_data(loader.path).decode(EXACT))


def _loader_of(module: object) -> object:
    """The module's loader, asked for in a way at which a lazy module does not load itself; None if it has none, as what
    libraries put in a module's place (cffi's has no `__dict__`).
    """
    try:
        return getattr(object.__getattribute__(module, "__dict__").get("__spec__"), "loader", None)
    except AttributeError:
        return None


class _Loader(SourceFileLoader):
    """Loads a module from its earlier text."""

    def __init__(self, name: str, path: str, text: bytes) -> None:
        super().__init__(name, path)
        self._text = text

    def get_data(self, path: str) -> bytes:
        return self._text if path == self.path else super().get_data(path)

    def path_stats(self, path: str) -> Mapping[str, float]:
        """Raises, so that no compiled file is used: it may be of the present text."""
        raise OSError(f"{path} is not read")

    def exec_module(self, module: ModuleType) -> None:
        lines = decode_source(self._text).splitlines(keepends=True)
        linecache.cache[self.path] = (len(self._text), None, lines, self.path)  # for tracebacks
        super().exec_module(module)


class _Finder(MetaPathFinder):
    def __init__(self, kept: Modules) -> None:
        self._kept = kept

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name not in self._kept:
            return None
        file, text = self._kept[name]
        folders = [os.path.dirname(file)] if os.path.basename(file) == "__init__.py" else None
        loader = _Loader(name, file, text)
        return spec_from_file_location(name, file, loader=loader, submodule_search_locations=folders)

"""Bundles in a store that several coordinators share; each copies them to its own folder, too."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from elche.bundle import CHUNK_BYTES
from elche_coordinator.storage.sql.store import SqlStore
from elche_coordinator.storage.store import StoreFailed

log = logging.getLogger(__name__)

SUFFIX = ".tar.gz"


class SharedBundles:
    """Copies bundles between a folder and the store."""

    def __init__(self, store: SqlStore, folder: Path) -> None:
        self._store = store
        self._folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def save(self, name: str, path: Path) -> None:
        """Copies the file to the store. Raises `OSError` if it cannot be written."""
        with _writing(), path.open("rb") as file:
            self._store.save_bundle(name, iter(lambda: file.read(CHUNK_BYTES), b""))

    def remove(self, name: str) -> None:
        """Removes a bundle from the store. Raises `OSError`."""
        with _writing():
            self._store.remove_bundle(name)

    def restore(self) -> None:
        """Copies bundles that are only in the store to the folder. Raises `StoreFailed` and `OSError`."""
        for name in self._store.bundle_names():
            path = self._folder / f"{name}{SUFFIX}"
            if not path.exists():
                self._restore(name, path)

    def _restore(self, name: str, path: Path) -> None:
        part = path.with_suffix(".copy")
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.writelines(self._store.load_bundle(name))
        part.rename(path)
        log.info("bundle=%s copied from the database", name[:12])


@contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except StoreFailed as error:
        raise OSError(0, "the database cannot be written") from error

"""Bundles in the database that several coordinators share: each has all of them in its folder, too."""

import logging
import os
from pathlib import Path

import sqlalchemy as sa

from elche.bundle import CHUNK_BYTES
from elche_coordinator.database import Database
from elche_coordinator.schema import bundles as _bundles

log = logging.getLogger(__name__)

SUFFIX = ".tar.gz"


class SharedBundles:
    """Copies bundles between a folder and the database."""

    def __init__(self, database: Database, folder: Path) -> None:
        self._database = database
        self._folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def save(self, name: str, path: Path) -> None:
        """Copies the file to the database. Raises `OSError` when that cannot be written."""
        try:
            with self._database.writing() as connection, path.open("rb") as file:
                connection.execute(_bundles.delete().where(_bundles.c.name == name))
                for part, data in enumerate(iter(lambda: file.read(CHUNK_BYTES), b"")):
                    connection.execute(_bundles.insert().values(name=name, part=part, data=data))
        except sa.exc.DBAPIError as error:
            raise OSError(0, "the database cannot be written") from error

    def remove(self, name: str) -> None:
        """Removes it from the database. Raises `OSError`."""
        try:
            with self._database.writing() as connection:
                connection.execute(_bundles.delete().where(_bundles.c.name == name))
        except sa.exc.DBAPIError as error:
            raise OSError(0, "the database cannot be written") from error

    def restore(self) -> None:
        """Copies to the folder what is in the database only. Raises `SQLAlchemyError` and `OSError`."""
        with self._database.connect() as connection:
            for name in connection.execute(sa.select(_bundles.c.name).distinct()).scalars().all():
                path = self._folder / f"{name}{SUFFIX}"
                if not path.exists():
                    self._restore(connection, name, path)

    def _restore(self, connection: sa.Connection, name: str, path: Path) -> None:
        part = path.with_suffix(".copy")
        query = sa.select(_bundles.c.part).where(_bundles.c.name == name).order_by(_bundles.c.part)
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            for number in connection.execute(query).scalars().all():
                here = (_bundles.c.name == name) & (_bundles.c.part == number)
                file.write(connection.execute(sa.select(_bundles.c.data).where(here)).scalar_one())
        part.rename(path)
        log.info("bundle=%s copied from the database", name[:12])

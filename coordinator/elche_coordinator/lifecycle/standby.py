"""Startup of a coordinator: it opens its store and, if that is shared, waits until it leads."""

import asyncio
import fcntl
import logging
import os
import socket
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from elche.folders import keep_out
from elche.network import split_address
from elche_coordinator.config import CannotStart, Config
from elche_coordinator.lifecycle.leadership import Leadership
from elche_coordinator.storage.bundles import SharedBundles
from elche_coordinator.storage.sql.database import is_of_the_disk
from elche_coordinator.storage.sql.store import SqlStore
from elche_coordinator.storage.store import BadStore, DamagedStore, StoreFailed, reason_of

log = logging.getLogger(__name__)

DATABASE = "elche.sqlite"
LOCK = "lock"
"""File of the folder that the coordinator on it keeps locked."""
COPY_EVERY_S = 5.0
LOOK_EVERY_S = 1.0
"""Seconds between two looks whether the database is still where it was."""


def open_store(config: Config) -> SqlStore:
    """Opens the store, which is exclusive or shared. Raises `CannotStart` and `BadStore`."""
    data = config.data
    with using(data):
        data.mkdir(parents=True, exist_ok=True)
        keep_out(data)
        take_folder(data)
        if data.stat().st_mode & stat.S_IWOTH:
            log.warning("every user may write to %s, and replace the database, with its tokens", data)
    try:
        if config.store:
            return SqlStore.at(config.store)
        return SqlStore.in_file(data / DATABASE)
    except BadStore:
        raise
    except Exception as error:
        raise CannotStart(f"the database in {data} cannot be opened: {reason_of(error)}") from error


@contextmanager
def using(folder: Path) -> Iterator[None]:
    """Converts errors of the folder to `CannotStart`."""
    try:
        yield
    except OSError as error:
        why = "it is not a folder" if isinstance(error, FileExistsError) else error.strerror
        raise CannotStart(f"{error.filename or folder} cannot be used: {why}") from error


@contextmanager
def loading(store: SqlStore) -> Iterator[None]:
    """Converts errors of reading at startup to `CannotStart`, or `DamagedStore` for a file that is damaged."""
    try:
        yield
    except StoreFailed as error:
        if store.is_shared or is_of_the_disk(error.__cause__):
            raise CannotStart(f"the database {store.name} cannot be used: {error.reason}") from error
        raise DamagedStore(store.name, error.reason) from error


async def lead(
    leadership: Leadership, store: SqlStore, shared: SharedBundles, config: Config, stop: asyncio.Event
) -> bool:
    """Waits until this coordinator leads, and prepares the database; returns False if it is stopped before."""
    # Checked while the operator looks on, not when it takes over.
    _check_free(config.listen)
    if not await _await_turn(leadership, shared, stop):
        return False
    try:
        store.prepare()
        shared.restore()
    except (StoreFailed, OSError) as error:
        raise CannotStart(f"the database {store.name} cannot be used: {reason_of(error)}") from error
    return True


async def _await_turn(leadership: Leadership, shared: SharedBundles, stop: asyncio.Event) -> bool:
    stopped = threading.Event()
    asked = asyncio.create_task(stop.wait())
    waiting = asyncio.create_task(asyncio.to_thread(leadership.await_turn, stopped))
    copying = asyncio.create_task(_copy(shared))
    await asyncio.wait([asked, waiting], return_when=asyncio.FIRST_COMPLETED)
    stopped.set()
    asked.cancel()
    copying.cancel()
    await asyncio.wait([copying])
    return await waiting


async def _copy(shared: SharedBundles) -> None:
    """Copies bundles from the database to the folder while it waits, so that it need not when it takes over."""
    while True:
        with suppress(StoreFailed, OSError):  # it may not answer now, or have no tables yet
            await asyncio.to_thread(shared.restore)
        await asyncio.sleep(COPY_EVERY_S)


def start_over(reason: str) -> None:
    """Re-executes this process as a standby, which ends every connection at once, since another coordinator leads."""
    log.warning("leads no more: %s; starts over", reason)
    os.execv(sys.executable, sys.orig_argv)


async def end_if_moved(database: Path) -> None:
    """Ends this process at once, as a kill would, when the file is not the one that was opened: what SQLite writes into
    a file that was removed or replaced is lost, and nothing may be visible that is not durable.
    """
    opened = _inode(database)
    while await asyncio.to_thread(_inode, database) in (opened, None):  # noqa: ASYNC110 - no event tells of a removed file
        await asyncio.sleep(LOOK_EVERY_S)
    log.critical(
        "%s was removed or replaced while in use: this coordinator ends, since it can keep nothing more. Put the "
        "folder, or a backup of it, back, and start it again",
        database,
    )
    os._exit(1)


def _inode(path: Path) -> int | None:
    """The file's number; 0 if there is no file, None if the disk does not say."""
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return 0
    except OSError:
        return None


def _check_free(address: str) -> None:
    """Raises `CannotStart` if an address is not available."""
    host, port = split_address(address)
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        raise CannotStart(f"the coordinator cannot listen on {address}: {error.strerror}") from None


def take_folder(data: Path) -> None:
    """Locks the folder against a second coordinator until this process exits. Raises `CannotStart`."""
    # Never closed, since the lock would end with it.
    lock = os.open(data / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise CannotStart(f"another coordinator uses {data}; name another folder with --data") from None

"""A real PostgreSQL of a test's own, which can be killed and started again."""

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa

from elche.torchrun import free_port
from elche_coordinator.storage.sql.database import Database
from support.real_processes import eventually

USER = "postgres"
SETTINGS = ("fsync=on", "unix_socket_directories=")


@dataclass(slots=True)
class Server:
    """One cluster of databases, on loopback or at an address of this host's."""

    data: Path
    port: int
    host: str = "127.0.0.1"
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return self.url_of(USER)

    @property
    def own_url(self) -> str:
        """From this host."""
        return f"postgresql://{USER}@127.0.0.1:{self.port}/{USER}"

    def url_of(self, database: str) -> str:
        return f"postgresql://{USER}@{self.host}:{self.port}/{database}"

    def start(self) -> None:
        where = (f"listen_addresses={'127.0.0.1' if self.host == '127.0.0.1' else '*'}", f"port={self.port}")
        settings = [text for one in (*SETTINGS, *where) for text in ("-c", one)]
        with (self.data.parent / "log").open("ab") as log:
            self.process = subprocess.Popen(as_user(binary("postgres"), "-D", str(self.data), *settings), stderr=log)
        eventually(self.answers, "PostgreSQL answers")

    def answers(self) -> bool:
        if self.process is not None and self.process.poll() is not None:  # children of a killed one still lived
            self.process = None
            self.start()
        with suppress(sa.exc.OperationalError):
            self.ask("SELECT 1")
            return True
        return False

    def ask(self, statement: str) -> object:
        """The first value of the answer, if it has one."""
        database = Database.at(self.own_url)
        with database.connect() as connection:
            found = connection.execution_options(isolation_level="AUTOCOMMIT").execute(sa.text(statement))
            return found.scalar() if found.returns_rows else None

    def new_database(self, name: str) -> str:
        """The URL of an empty database."""
        self.ask(f"CREATE DATABASE {name}")
        return self.url_of(name)

    def kill(self) -> None:
        """Ends it as a crash of the machine would, but for its disk."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        """Ends it at once, if it runs."""
        if self.process is not None:
            self.process.send_signal(signal.SIGQUIT)
            self.process.wait()

    @contextmanager
    def standby(self) -> Iterator["Server"]:
        """A copy that has each transaction before it counts as committed here, and may be promoted."""
        other = Server(self.data.parent / "standby", free_port())
        copied = as_user(binary("pg_basebackup"), "-D", str(other.data), "-R", "-c", "fast", "-d", self.own_url)
        subprocess.run(copied, check=True)
        other.start()
        try:
            self.ask("ALTER SYSTEM SET synchronous_standby_names = '*'")
            self.ask("SELECT pg_reload_conf()")
            is_copying = "SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync'"
            eventually(lambda: self.ask(is_copying) == 1, "it copies")
            yield other
        finally:
            other.stop()

    def promote(self) -> None:
        """It takes the place of the one that it is a copy of."""
        self.ask("SELECT pg_promote()")


@contextmanager
def postgresql(host: str = "127.0.0.1", clients: str = "") -> Iterator[Server]:
    """A server on loopback; or at an address that this host will have, for clients of a network (A.B.C.D/BITS) too.
    Nobody needs a password.
    """
    folder = Path(tempfile.mkdtemp(prefix="elche-postgresql-", dir="/tmp"))
    if os.geteuid() == 0:
        shutil.chown(folder, USER, USER)
    server = Server(folder / "data", free_port(), host)
    initdb = as_user(binary("initdb"), "-D", str(server.data), "-U", USER, "--auth=trust", "--no-instructions", "-N")
    subprocess.run(initdb, check=True, stdout=subprocess.DEVNULL)
    if clients:
        with (server.data / "pg_hba.conf").open("a") as rules:
            rules.write(f"host all all {clients} trust\n")
    try:
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder)


def as_user(*command: str) -> list[str]:
    """The command, not as root, which PostgreSQL refuses."""
    if os.geteuid() != 0:
        return list(command)
    return ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", *command]


def binary(name: str) -> str:
    """The program of the newest version that is installed."""
    found = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), key=lambda path: int(path.parts[4]))
    return str(found[-1]) if found else shutil.which(name) or name

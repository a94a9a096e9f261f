"""Does to coordinator and workers what an operator does now and then, while a job trains, and measures what it costs.

Backups and restores, moves, new tokens and certificates, programs that have to be killed; with --store also two
coordinators that share a PostgreSQL server's database, of which --store is the URL of one that is always there. The
job and the columns are those of outage.py.

    python benchmarks/upkeep.py --times 3 --store postgresql://postgres@db1/postgres --write    # 40 minutes
"""

import argparse
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path

import standby
from outage import HOSTS, ActOf, Site, measure_acts, write
from programs import end, free_port, start_agent, start_coordinator

from elche.token import Role
from elche_client.commands.certificates import Authority
from elche_client.commands.tokens import Tokens

STOP_S = 5.0
"""Seconds after which a supervisor kills what it has told to stop (`TimeoutStopSec`)."""
SINCE_S = 3.0
"""Age of a backup that is restored."""
DAY = timedelta(days=1)


def hung_coordinator(site: Site) -> None:
    site.coordinator.send_signal(signal.SIGSTOP)
    site.coordinator.terminate()
    time.sleep(STOP_S)
    site.kill_coordinator()
    site.start_coordinator()


def impatient_worker(site: Site) -> None:
    site.workers[1].terminate()
    time.sleep(0.1)
    site.signal_all_of(1, signal.SIGKILL)
    site.start_workers(1)


def move_data(site: Site) -> None:
    site.stop_coordinator()
    (site.folder / "data").rename(site.folder / "moved")
    (site.folder / "data").symlink_to(site.folder / "moved")
    site.start_coordinator()


def move_worker(site: Site) -> None:
    site.stop_workers(1)
    shutil.copytree(site.folder / "work-1", site.folder / "copy")
    shutil.rmtree(site.folder / "work-1")
    (site.folder / "copy").rename(site.folder / "work-1")
    site.start_workers(1)


def back_up(site: Site) -> None:
    _coordinator("backup", site.folder / "copy", "--data", site.folder / "data")


def restore(site: Site) -> None:
    back_up(site)
    time.sleep(SINCE_S)
    site.stop_coordinator()
    shutil.rmtree(site.folder / "data")
    _coordinator("restore", site.folder / "copy", "--data", site.folder / "data")
    site.start_coordinator()


def _coordinator(*words: object) -> None:
    subprocess.run([sys.executable, "-m", "elche_coordinator", *map(str, words)], check=True, stdout=subprocess.DEVNULL)


class SecuredSite(Site):
    """With tokens and TLS: the workers have a token of their own."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder / "certs")
        self.authority.server(["127.0.0.1"], expires=DAY)
        self.own = _secret_file(folder / "own.token", secrets.token_hex(32))
        self.pool = folder / "pool.token"
        self.environment = {"ELCHE_TOKEN_FILE": str(self.own), "ELCHE_TLS": str(self.authority.folder)}
        super().__init__(folder)

    def start_coordinator(self, listen: str = "") -> None:
        more = {"ELCHE_TLS": str(self.authority.folder / "127.0.0.1")}
        self.coordinator, self.address = start_coordinator(
            self.folder, listen=listen or self.address, environment=self.environment | more
        )

    def start_workers(self, *hosts: int) -> None:
        if not self.pool.exists():
            self.new_token()
        more = {"ELCHE_TOKEN_FILE": str(self.pool)}
        for host in hosts:
            self.workers[host] = start_agent(
                self.folder, self.address, "cpu", name=f"work-{host}", environment=self.environment | more
            )

    def new_token(self) -> None:
        """Makes the workers' token; the ones before are revoked."""
        with self.tokens() as tokens:
            _secret_file(self.pool, tokens.make("pool", Role.AGENT, expires=DAY)[1])

    def tokens(self) -> Tokens:
        return Tokens(self.address, token=self.own.read_text(), tls=str(self.authority.folder))


def new_token_of_workers(site: Site) -> None:
    assert isinstance(site, SecuredSite)
    with site.tokens() as tokens:
        before = [one.id for one in tokens.all()]
        site.new_token()
        for host in HOSTS:
            site.stop_workers(host)
            site.start_workers(host)
        while len([one for one in site.client().hosts() if one.slots]) < len(HOSTS):
            time.sleep(0.1)
        for one in before:
            tokens.revoke(one)


def new_token_of_coordinator(site: Site) -> None:
    assert isinstance(site, SecuredSite)
    _secret_file(site.own, secrets.token_hex(32))
    site.stop_coordinator()
    site.start_coordinator()


def new_certificate(site: Site) -> None:
    assert isinstance(site, SecuredSite)
    site.authority.server(["127.0.0.1"], expires=2 * DAY)


def _secret_file(path: Path, text: str) -> Path:
    path.touch(mode=0o600)
    path.write_text(text)
    return path


class SharedSite(Site):
    """Two coordinators on one database: "a" leads at first."""

    def __init__(self, folder: Path, *, server: str) -> None:
        self.server = server
        self.store = self.new_database()
        self.ports = {"a": free_port(), "b": free_port()}
        self.both: dict[str, subprocess.Popen[bytes]] = {}
        super().__init__(folder)

    def start_coordinator(self, listen: str = "") -> None:
        self.start("a", standby.SERVES)
        self.start("b", "waiting to take over")
        self.address = ",".join(f"127.0.0.1:{port}" for port in self.ports.values())

    def start(self, name: str, until: str) -> None:
        log = self.folder / f"{name}.log"
        log.unlink(missing_ok=True)
        self.both[name] = standby.start(self.folder, name, self.ports[name], self.store)
        standby.await_text(log, until)

    def stop_coordinator(self) -> None:
        for process in self.both.values():
            process.terminate()
        for process in self.both.values():
            process.wait()

    def kill_coordinator(self) -> None:
        end(*self.both.values())

    def new_database(self) -> str:
        name = f"elche_{secrets.token_hex(6)}"
        subprocess.run(["psql", "--quiet", "--command", f"CREATE DATABASE {name}", self.server], check=True)
        return f"{self.server.rpartition('/')[0]}/{name}"


def dump(site: Site) -> None:
    assert isinstance(site, SharedSite)
    subprocess.run(["pg_dump", "--file", str(site.folder / "dump.sql"), site.store], check=True)


def load_dump(site: Site) -> None:
    assert isinstance(site, SharedSite)
    dump(site)
    time.sleep(SINCE_S)
    site.stop_coordinator()
    site.stop_workers(*HOSTS)
    site.store = site.new_database()
    load = ["psql", "--quiet", "--set", "ON_ERROR_STOP=1", "--file", str(site.folder / "dump.sql"), site.store]
    subprocess.run(load, check=True, stdout=subprocess.DEVNULL)
    site.start_coordinator()
    site.start_workers(*HOSTS)


def kill_leader(site: Site) -> None:
    assert isinstance(site, SharedSite)
    end(site.both["a"])
    site.start("a", "waiting to take over")


def upgrade_both(site: Site) -> None:
    assert isinstance(site, SharedSite)
    for name in ("b", "a"):
        site.both[name].terminate()
        site.both[name].wait()
        site.start(name, "waiting to take over")


OF_ONE: Mapping[str, Callable[[Site], None]] = {
    "`elche-coordinator backup`": back_up,
    "`restore` of a backup of 3 s before, on an empty disk": restore,
    "the coordinator's folder is moved": move_data,
    "a work folder is moved": move_worker,
    "the coordinator hangs when it is told to stop, and is killed after 5 s": hung_coordinator,
    "a worker is killed 0.1 s after it is told to stop": impatient_worker,
}
SECURED: Mapping[str, Callable[[Site], None]] = {
    "a new certificate": new_certificate,
    "a new token of the workers, one after the other; the old one revoked": new_token_of_workers,
    "a new token of the coordinator": new_token_of_coordinator,
}
SHARED: Mapping[str, Callable[[Site], None]] = {
    "`pg_dump`": dump,
    "the dump of 3 s before in a new database; all stopped and started": load_dump,
    "SIGKILL to the coordinator that leads": kill_leader,
    "both coordinators are upgraded, the one that leads last": upgrade_both,
}


def acts(store: str) -> dict[str, ActOf]:
    made: dict[str, ActOf] = {name: (Site, act) for name, act in OF_ONE.items()}
    made |= {name: (SecuredSite, act) for name, act in SECURED.items()}
    return made | ({name: (partial(SharedSite, server=store), act) for name, act in SHARED.items()} if store else {})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--only", default="", help="acts that have this in their name")
    parser.add_argument("--store", default="", help="URL of a database of a PostgreSQL server, where others are made")
    parser.add_argument("--write", action="store_true", help="into docs/reliability.md")
    options = parser.parse_args(arguments)
    if options.write and (options.only or not options.store):
        parser.error("--write takes the whole table, with --store")
    table = measure_acts(options.times, options.only, acts(options.store))
    if options.write:
        write(table, "upkeep")


if __name__ == "__main__":
    os.environ.pop("ELCHE_TOKEN", None)
    main()

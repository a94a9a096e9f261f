"""Two coordinators with one PostgreSQL: one leads, the other takes over, and one that wakes late writes nothing."""

import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import sqlalchemy as sa

from elche.errors import Unreachable
from elche.torchrun import free_port
from elche_client import Client
from elche_client.client import JobHandle
from elche_coordinator.lifecycle.leadership import Leadership
from elche_coordinator.storage.sql.election import Election
from elche_coordinator.storage.sql.store import SqlStore
from elche_coordinator.storage.store import JobRow, Replaced, Standing
from support.postgresql import Server, binary, postgresql
from support.real_processes import Agent, Mark, agent, command, eventually
from support.scraped import Scraped

pytestmark = [pytest.mark.system, pytest.mark.timeout(1800)]

JOB = Path(__file__).parents[1] / "processes" / "jobs" / "linear.py"
NUM_SAMPLES = 500
EPOCHS = 60
LISTENS = "elche-coordinator listening on"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with postgresql() as one:
        yield one


@pytest.fixture
def store(server: Server, request: pytest.FixtureRequest) -> str:
    """The URL of an empty database."""
    return server.new_database("t_" + re.sub(r"\W", "_", request.node.name.lower())[:50])


@dataclass(slots=True)
class Lab:
    """Coordinators with one database, by name; agents and clients know all of their addresses."""

    store: str
    folder: Path
    mark: Mark
    stack: ExitStack
    ports: dict[str, int] = field(default_factory=dict)
    pages: dict[str, int] = field(default_factory=dict)
    """Ports of their pages, /metrics and probes."""
    processes: dict[str, "subprocess.Popen[str]"] = field(default_factory=dict)
    host: Agent | None = None

    @property
    def addresses(self) -> str:
        return ",".join(f"127.0.0.1:{port}" for port in self.ports.values())

    def start(self, name: str, store: str = "") -> None:
        for ports in (self.ports, self.pages):
            if name not in ports:
                ports[name] = free_port()
        listen = ["--listen", f"127.0.0.1:{self.ports[name]}", "--http", f"127.0.0.1:{self.pages[name]}"]
        listen += ["--data", str(self.folder / name)]
        with self.log(name).open("a") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "elche_coordinator", *listen],
                stdout=log,
                stderr=log,
                text=True,
                env=self.mark.environment({"ELCHE_STORE": store or self.store}),
            )
        self.processes[name] = process
        self.stack.callback(process.wait)
        self.stack.callback(process.kill)

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def said(self, name: str, text: str) -> int:
        return self.log(name).read_text().count(text) if self.log(name).exists() else 0

    def until_said(self, name: str, text: str, times: int = 1) -> None:
        try:
            eventually(lambda: self.said(name, text) >= times, f"{name} says {text!r}")
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.log(name).read_text()}") from None

    def ask(self, name: str, path: str) -> tuple[int, str]:
        """Status and text of what it answers over HTTP; 0 when it does not."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.pages[name]}{path}", timeout=400) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def signal(self, name: str, number: int) -> None:
        self.processes[name].send_signal(number)

    @property
    def may_end(self) -> Path:
        """While this file is not there a batch takes 0.05 s or more."""
        return self.folder / "may-end"

    def train(self) -> tuple[JobHandle, dict[int, str]]:
        """A job that trains, of two ranks, and their processes. It lasts a while unless it `may_end`."""
        client = self.stack.enter_context(Client(self.addresses, reconnect_s=60))
        text, quick = JOB.read_text(encoding="utf-8"), "time.sleep(0.002)"
        assert quick in text
        path = self.folder / "linear.py"
        path.write_text(text.replace(quick, f"time.sleep(0.002 if Path('{self.may_end}').exists() else 0.05)"))
        job = client.submit(path, num_ranks=2, epochs=EPOCHS)
        eventually(lambda: epoch_of(job) >= 2, "it trains")
        return job, self.mark.living("elche rank")


@contextmanager
def two_coordinators(store: str, folder: Path, mark: Mark) -> Iterator[Lab]:
    with ExitStack() as stack:
        lab = Lab(store, folder, mark, stack)
        lab.start("a")
        lab.until_said("a", LISTENS)
        lab.start("b")
        lab.until_said("b", "leads; waiting to take over")
        lab.host = stack.enter_context(agent(mark, folder, lab.addresses))
        yield lab
    mark.assert_none_left()


@pytest.fixture
def lab(store: str, tmp_path: Path, mark: Mark) -> Iterator[Lab]:
    with two_coordinators(store, tmp_path, mark) as lab:
        yield lab


def test_who_stands_by_is_ready_and_says_what_it_is(lab: Lab) -> None:
    """So that both may be drained and upgraded, one after the other; and a scraper knows which one leads."""
    assert lab.ask("a", "/readyz") == (200, "leads\n")
    assert lab.ask("b", "/readyz") == (200, "stands by\n")
    assert lab.ask("b", "/healthz") == (200, "ok\n")
    assert lab.ask("b", "/api/jobs")[0] == 503
    for name, leads in (("a", 1.0), ("b", 0.0)):
        assert f"\nelche_coordinator_leads {leads}\n" in lab.ask(name, "/metrics")[1], name
    lab.signal("a", signal.SIGKILL)
    eventually(lambda: lab.ask("b", "/readyz") == (200, "leads\n"), "it leads")
    assert "\nelche_coordinator_leads 1.0\n" in lab.ask("b", "/metrics")[1]


def test_a_failover_is_no_outage_to_a_scraper(lab: Lab, tmp_path: Path) -> None:
    """That no coordinator leads was told for a day."""
    scraped = Scraped()

    def passes(minutes: int) -> None:
        for _ in range(minutes):
            scraped.scrape(**{name: f"http://127.0.0.1:{port}" for name, port in lab.pages.items()})

    passes(5)
    lab.signal("a", signal.SIGKILL)
    passes(1)
    eventually(lambda: lab.ask("b", "/readyz") == (200, "leads\n"), "it leads")
    passes(8)
    scraped.fires(tmp_path, ())
    passes(30)
    scraped.fires(tmp_path, {"ElcheStandbyDown"})


def test_who_cannot_reach_the_database_is_not_ready(lab: Lab, tmp_path: Path) -> None:
    lab.start("c", re.sub(r"@[^/]*/", f"@127.0.0.1:{free_port()}/", lab.store))
    lab.until_said("c", "does not answer")
    assert lab.ask("c", "/readyz") == (503, "the database does not answer\n")
    assert lab.ask("c", "/healthz") == (200, "ok\n")


def epoch_of(job: JobHandle) -> int:
    """The epoch that it trains; -1 while nobody answers."""
    with suppress(Unreachable):
        return job.client.get(job.id).epoch
    return -1


def ends_exactly(job: JobHandle, lab: Lab, ranks: dict[int, str]) -> None:
    """No rank was started again, and each sample was committed once in each epoch."""
    assert lab.mark.living("elche rank") == ranks
    lab.may_end.touch()
    assert job.result().committed_samples == (NUM_SAMPLES,) * EPOCHS


def test_the_leader_is_killed(lab: Lab) -> None:
    """The other one serves at once: the lock of a process that is gone is free."""
    job, ranks = lab.train()
    lab.processes["a"].kill()
    killed_s = time.monotonic()
    lab.until_said("b", LISTENS)
    took_s = time.monotonic() - killed_s
    print(f"takeover in {took_s:.2f} s")
    assert "whose connection has ended" in lab.log("b").read_text()
    ends_exactly(job, lab, ranks)
    assert lab.said("b", "; the job goes back") == 0


def test_a_leader_that_is_stopped_and_wakes(lab: Lab) -> None:
    """It is waited for as long as its lease lasts. When it wakes it waits in its turn, and takes over again later."""
    job, ranks = lab.train()
    lab.signal("a", signal.SIGSTOP)
    lab.until_said("b", LISTENS)
    assert "which has said nothing for 5 s" in lab.log("b").read_text()
    lab.signal("a", signal.SIGCONT)
    lab.until_said("a", "leads no more")
    lab.until_said("a", "leads; waiting to take over")
    assert lab.mark.living("elche rank") == ranks
    lab.processes["b"].kill()
    lab.until_said("a", LISTENS, times=2)
    ends_exactly(job, lab, ranks)


def test_the_database_is_killed_and_comes_back(lab: Lab, server: Server) -> None:
    """Nothing is lost, whoever leads then; ranks go on meanwhile."""
    job, ranks = lab.train()
    for _ in range(2):
        epoch = epoch_of(job)
        server.kill()
        server.start()
        eventually(lambda before=epoch: epoch_of(job) > before + 2, "it goes on")  # type: ignore[misc]
    ends_exactly(job, lab, ranks)


def test_another_database_server_is_promoted(tmp_path: Path, mark: Mark) -> None:
    """The one that was written to is gone for good. Both coordinators know the addresses of both."""
    with postgresql() as first, first.standby() as second:
        places = f"host=127.0.0.1:{first.port}&host=127.0.0.1:{second.port}"
        store = f"postgresql://postgres@/postgres?{places}&target_session_attrs=read-write"
        with two_coordinators(store, tmp_path, mark) as lab:
            job, ranks = lab.train()
            epoch = epoch_of(job)
            first.kill()
            second.promote()
            eventually(lambda: epoch_of(job) > epoch + 2, "it goes on")
            ends_exactly(job, lab, ranks)


def test_a_leader_in_order(lab: Lab) -> None:
    """One that is told to end gives its place up when all is written."""
    job, ranks = lab.train()
    lab.signal("a", signal.SIGTERM)
    lab.until_said("b", LISTENS)
    assert lab.processes["a"].wait(400) == 0
    ends_exactly(job, lab, ranks)


def test_a_dump_that_is_made_while_a_job_trains_is_restored(lab: Lab, server: Server) -> None:
    """As docs/operating.md says. `elche-coordinator backup` names `pg_dump`: it took a file that was not used."""
    job, _ = lab.train()
    refused = command(
        lab.mark, "elche_coordinator", "backup", "copy", "--data", "a", cwd=lab.folder, env={"ELCHE_STORE": lab.store}
    )
    assert (refused.code, "pg_dump" in refused.complaint) == (2, True), refused
    dump = lab.folder / "dump.sql"
    subprocess.run([binary("pg_dump"), "--file", str(dump), lab.store], check=True)
    epoch = epoch_of(job)
    eventually(lambda: epoch_of(job) > epoch, "it trains on")
    assert lab.host is not None
    for process in (*lab.processes.values(), lab.host.process):
        process.terminate()
    for process in (*lab.processes.values(), lab.host.process):
        assert process.wait(400) == 0
    restored = server.new_database("restored")
    load = [binary("psql"), "--quiet", "--set", "ON_ERROR_STOP=1", "--file", str(dump), restored]
    subprocess.run(load, check=True, stdout=subprocess.DEVNULL)
    for name in ("a", "b"):
        lab.start(name, restored)
    lab.stack.enter_context(agent(lab.mark, lab.folder, lab.addresses))
    lab.may_end.touch()
    assert job.result().committed_samples == (NUM_SAMPLES,) * EPOCHS


def test_a_leader_without_the_database(store: str, server: Server, tmp_path: Path, mark: Mark) -> None:
    """It is cut off from the database, and not from the ranks: the other takes over, and they find it."""
    with ExitStack() as stack:
        way = stack.enter_context(Way(server.port))
        lab = Lab(store, tmp_path, mark, stack)
        lab.start("a", store.replace(f":{server.port}/", f":{way.port}/"))
        lab.until_said("a", LISTENS)
        lab.start("b")
        lab.until_said("b", "leads; waiting")
        stack.enter_context(agent(mark, tmp_path, lab.addresses))
        job, ranks = lab.train()
        way.is_open.clear()
        lab.until_said("b", LISTENS)
        lab.until_said("a", "leads no more")
        ends_exactly(job, lab, ranks)


class Way:
    """A way to a port on which nothing comes through, both ways and without an end, while it is not open."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.is_open = threading.Event()
        self.is_open.set()

    def __enter__(self) -> "Way":
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self.is_open.set()

    def _accept(self) -> None:
        while True:
            try:
                here, _ = self._listener.accept()
            except OSError:
                return
            there = socket.create_connection(("127.0.0.1", self._to))
            for source, sink in ((here, there), (there, here)):
                threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                self.is_open.wait()
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            source.close()
            sink.close()


# The lease by itself


@pytest.fixture
def candidate(store: str) -> Iterator[Callable[[str], tuple[Leadership, SqlStore, list[str]]]]:
    """A coordinator's part in leadership, its store, and why it was replaced."""
    made = []

    def new(name: str, lease_s: float = 5.0) -> tuple[Leadership, SqlStore, list[str]]:
        own, reasons = SqlStore.at(store), list[str]()
        made.append(Leadership(own, name, reasons.append, lease_s=lease_s))
        return made[-1], own, reasons

    yield new
    for one in made:
        one.resign()


Candidate = Callable[..., tuple[Leadership, SqlStore, list[str]]]


def test_what_a_former_leader_writes_is_refused(
    candidate: Candidate, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease of one that does not renew it runs out; each of its transactions then fails, whatever it believes."""
    monkeypatch.setattr("elche_coordinator.lifecycle.leadership.RENEW_S", 1e9)
    one, records, reasons = candidate("one")
    assert one.await_turn(threading.Event())
    SqlStore.at(store).prepare()
    records.write([JobRow(id="job", record="{}")], last=1, entries=b"first")
    other, others, _ = candidate("other", 0.2)
    assert other.await_turn(threading.Event())
    assert (one.term, other.term) == (1, 2)
    with pytest.raises(Replaced, match="other leads, since term 2; this one was term 1"):
        records.write([JobRow(id="job", record="{}")], last=2, entries=b"late")
    assert len(reasons) == 1
    assert others.load_state().pieces == [b"first"]
    others.write([], last=2, entries=b"second")
    others.write([], last=2, entries=b"second")  # again, since the answer might have been lost
    assert others.load_state().pieces == [b"first", b"second"]


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each candidate has looked who leads, by name."""
    counted, look = Counter[str](), Election.try_to_lead

    def counting(one: Election, name: str, lease_s: float) -> Standing:
        standing = look(one, name, lease_s)
        counted[name] += 1
        return standing

    monkeypatch.setattr(Election, "try_to_lead", counting)
    return counted


def test_one_of_many_leads(candidate: Candidate, looks: Counter[str]) -> None:
    """However many begin at once, and each time that the leader ends."""
    stop, candidates = threading.Event(), [candidate(f"c{number}")[0] for number in range(6)]
    for one in candidates:
        threading.Thread(target=one.await_turn, args=(stop,)).start()
    try:
        for term in range(1, 5):
            eventually(lambda term=term: any(one.term == term for one in candidates), "one leads")  # type: ignore[misc]
            leading = [one for one in candidates if one.term == term]
            assert len(leading) == 1
            before, others = looks.copy(), [one._name for one in candidates if not one.term]
            eventually(lambda: all(looks[one] > before[one] + 1 for one in others), "the others have looked")  # noqa: B023
            assert max(one.term for one in candidates) == term
            leading[0].resign()
    finally:
        stop.set()


WAITING = "SELECT count(*) FROM pg_locks WHERE NOT granted"


def test_a_transaction_keeps_the_next_leader_waiting(candidate: Candidate, store: str) -> None:
    """What the leader before has begun to write is there, or not, when the next one reads."""
    one, _, _ = candidate("one")
    assert one.await_turn(threading.Event())
    database = SqlStore.at(store)
    database.prepare()
    database.fence(one.term, lambda reason: None)
    other, others, _ = candidate("other", 0.0)
    leads = threading.Thread(target=other.await_turn, args=(threading.Event(),))
    with database.writing() as connection:
        leads.start()
        with SqlStore.at(store).connect() as looking:
            waiting = sa.text(WAITING)
            eventually(lambda: looking.execute(waiting).scalar(), "it waits for the transaction")
        assert other.term == 0
        connection.exec_driver_sql("INSERT INTO tape VALUES (1, 'x', 0)")
    leads.join(400)
    assert other.term == 2
    assert others.load_state().pieces == [b"x"]


def test_a_leader_stopped_in_a_transaction(lab: Lab) -> None:
    """The database ends a transaction in which nothing comes, and with it the lock that keeps the other waiting."""
    database = SqlStore.at(lab.store)
    connection = database.connect()  # as that of a leader which is stopped
    connection.exec_driver_sql("SELECT term FROM leader FOR SHARE")
    lab.processes["a"].kill()
    lab.until_said("b", LISTENS)
    with pytest.raises(sa.exc.DBAPIError, match="idle-in-transaction timeout"):
        connection.exec_driver_sql("SELECT 1")
    connection.invalidate()
    connection.close()


def test_bad_stores(server: Server, tmp_path: Path, mark: Mark) -> None:
    """One line says what is wrong; the password is not in it."""
    for url, message in (
        (server.url_of("nowhere").replace("postgres@", "postgres:hunter2@"), 'database "nowhere" does not exist'),
        ("mysql://db/elche", "--store names mysql"),
    ):
        ended = subprocess.run(
            [sys.executable, "-m", "elche_coordinator", "--listen", "127.0.0.1:0", "--data", str(tmp_path)],
            env=mark.environment({"ELCHE_STORE": url}),
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        assert ended.returncode == 2
        assert message in ended.stderr
        assert "hunter2" not in ended.stderr
        assert "Traceback" not in ended.stderr

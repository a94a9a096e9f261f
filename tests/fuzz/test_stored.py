"""What is read at a start, a database, a saved state in it and certificates; and what an agent is told to do."""

import asyncio
import errno
import json
import os
import pickle
import shutil
import socket
import sqlite3
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elche.errors import ElcheError
from elche.tls import AUTHORITY, CERTIFICATE, KEY, BadCertificate, Folder
from elche.token import Role
from elche.v1 import agent_pb2, job_pb2
from elche_client.commands.certificates import Authority, read_certificate
from elche_coordinator.access.encryption import caller_of
from elche_coordinator.access.tokens import IssuedTokens
from elche_coordinator.archive.history import History
from elche_coordinator.core.coordinator import Coordinator
from elche_coordinator.core.messages.events import JobSubmitted
from elche_coordinator.core.messages.ids import JobId
from elche_coordinator.core.messages.spec import JobSpec
from elche_coordinator.driver import Driver
from elche_coordinator.roles import Caller
from elche_coordinator.services.sessions import attend
from elche_coordinator.storage import tape
from elche_coordinator.storage.sql.store import SqlStore
from elche_coordinator.storage.store import BadStore, SavedState, StoreFailed
from elche_coordinator.storage.unpickling import OWN, loads, sealed, unsealed
from elche_worker.agent import agent, link_speed
from elche_worker.agent.agent import CHUNK_BYTES, Agent
from elche_worker.agent.processes import Exit
from support.corpus import file_of_run, messages
from support.fuzzing import changed_bytes, changed_message, fuzzed, tried

pytestmark = pytest.mark.usefixtures("bounded")


# The database


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That of a coordinator with a host, a job that starts, one that waits and a token."""
    path = tmp_path_factory.mktemp("stored") / "elche.sqlite"

    async def work() -> None:
        store = SqlStore.in_file(path)
        IssuedTokens(store).make("anna", Role.USER, expires_s=0.0, made_by="")
        driver = Driver(Coordinator(), store)
        attend(driver, agent_pb2.AgentHello(host="host", slots=[agent_pb2.Slot(device="cpu")], identity="one"))
        for name in ("starts", "waits"):
            spec = JobSpec(name=name, source_hash=driver.sources.add("job = 1"), file_name="job.py", num_ranks=1)
            driver.handle(JobSubmitted(job_id=JobId(name), spec=spec, submitted_at=1.0))
        await driver.durable()
        driver.stop()
        driver.writer._thread.join(400)
        store.close()

    asyncio.run(work())
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return path


def begin(path: Path) -> None:
    """Reads all that a coordinator reads as it starts."""
    store = SqlStore.in_file(path)
    try:
        store.identity()
        tape.read(store)
        History(store)
        IssuedTokens(store)
        store.load_artifacts()
    finally:
        store.close()


@fuzzed(30)
@given(places=st.lists(st.tuples(st.integers(0, 2**20), st.binary(min_size=1, max_size=300)), min_size=1, max_size=3))
def test_a_database_of_any_bytes_is_read_or_refused(
    database: Path, tmp_path: Path, places: list[tuple[int, bytes]]
) -> None:
    data = bytearray(database.read_bytes())
    for at, new in places:
        data[at % len(data) : at % len(data) + len(new)] = new
    path = tmp_path / "elche.sqlite"
    for old in tmp_path.glob("elche.sqlite*"):
        old.unlink()
    path.write_bytes(data)
    tried(lambda: begin(path), BadStore, StoreFailed)


@cache
def pickles(path: Path) -> tuple[bytes, ...]:
    """What is pickled in a database: the saved state, the jobs in it and the tape."""
    with closing(sqlite3.connect(path)) as connection:
        found = [connection.execute(f"SELECT {what}").fetchall() for what in ("state FROM states", "entries FROM tape")]
    return tuple(unsealed(bytes(one)) for rows in found for (one,) in rows)


@fuzzed(60)
@given(data=st.data())
def test_a_saved_state_with_a_right_checksum_is_restored_or_set_aside(database: Path, data: st.DataObject) -> None:
    """The checksum finds accidents; who can write to the database can make a right one, and runs no code by it."""
    changed = data.draw(changed_bytes(pickles(database)))
    saved = SavedState(last=3, code=tape.code_version(), state=sealed(changed), parts={}, gone=set())
    store: Any = SimpleNamespace(load_state=lambda: (saved, [sealed(changed)], 1.0, [4]))
    assert isinstance(tried(lambda: tape.read(store)), tape.Recorded | None)


@pytest.mark.parametrize("name", ["os.system", "builtins.eval", "elche_coordinator.storage.tape.Path"])
def test_a_saved_state_names_no_class_of_others(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    assert OWN
    with pytest.raises(pickle.UnpicklingError):
        loads(f"c{module}\n{attribute}\n(S'true'\ntR.".encode())


# Certificates


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A server's folder."""
    folder = tmp_path_factory.mktemp("certificates")
    Authority(folder).server(["server", "10.0.0.5"], expires=timedelta(days=1))
    return folder / "server"


@fuzzed(50)
@given(data=st.data(), name=st.sampled_from([AUTHORITY, CERTIFICATE, KEY]))
def test_certificates_of_any_bytes_are_used_or_refused(
    certificates: Path, tmp_path: Path, data: st.DataObject, name: str
) -> None:
    folder = shutil.copytree(certificates, tmp_path / "tls", dirs_exist_ok=True)
    (folder / name).write_bytes(data.draw(changed_bytes([(certificates / name).read_bytes()])))
    tried(lambda: Folder(folder, needs=(CERTIFICATE, KEY)), BadCertificate)
    tried(lambda: read_certificate(folder / name), BadCertificate)
    tried(lambda: Authority(folder.parent).all(), BadCertificate)


@fuzzed(80)
@given(uris=st.lists(changed_bytes([b"elche://user/anna", b"elche://operator/%2e%2e/x", b"elche://[::1/"]), max_size=3))
def test_a_certificate_of_any_names_is_somebodys_or_nobodys(uris: list[bytes]) -> None:
    caller = tried(lambda: caller_of(uris))
    assert caller is None or isinstance(caller, Caller)


# Orders to an agent


class AtOnce:
    """`threading` for an agent whose orders are carried out in this thread, in which errors come through."""

    Event, Semaphore, TIMEOUT_MAX = threading.Event, threading.Semaphore, threading.TIMEOUT_MAX

    class Thread:
        """Runs when it is started."""

        def __init__(self, target: Callable[..., object], args: tuple[Any, ...] = (), **_: object) -> None:
            self.start = partial(target, *args)

    class Timer(Thread):
        """Does not wait, but refuses what a real one cannot wait for."""

        def __init__(self, seconds: float, call: Callable[..., object], args: tuple[Any, ...]) -> None:
            assert 0 <= seconds <= threading.TIMEOUT_MAX, seconds
            super().__init__(call, args)


class ToldAgent(Agent):
    """Starts no process, and calls nobody: what it would start or send is only looked at."""

    def __init__(self, folder: Path) -> None:
        super().__init__("127.0.0.1:1", [agent_pb2.Slot(device="cpu")] * 2, folder)
        self.exits: list[Exit] = []
        processes: Any = self._processes
        processes.start = self._check
        processes.stop = processes._end

    def _check(self, _: object, processes: list[Any]) -> None:
        """The spawner gets a line of JSON for each process."""
        for process in processes:
            json.loads(process.launch_line)

    def _report_exit(self, key: object, ended: Exit) -> None:
        self.exits.append(ended)

    def _deliver_parts(self, what: object, parts: Iterable[agent_pb2.DeliverRequest]) -> None:
        for part in parts:
            assert len(part.SerializeToString()) < 2 * CHUNK_BYTES


def connect(address: tuple[str, int], _: float) -> None:
    """Nobody listens at any address that can be looked up."""
    address[0].encode("idna")
    raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")


A = agent_pb2
SCRIPT = job_pb2.JobSpec(source="a", file_name="a.py", is_loop=True)
ORDERS = (
    *messages("AgentService/Attend", "response"),
    A.AttendResponse(start_rank=A.StartRank(job_id="job", slot=1, loop_slots=[0, 1], spec=SCRIPT)),
    A.AttendResponse(send_model=A.SendModel(job_id="job", transfer="t")),
    A.AttendResponse(send_model=A.SendModel(job_id="job", transfer="t", checkpoint="job/checkpoint")),
    A.AttendResponse(send_log=A.SendLog(job_id="job", transfer="t", max_bytes=100, with_times=True, follow=True)),
    A.AttendResponse(
        store_artifacts=A.StoreArtifacts(
            job_id="job", transfer="t", root="store", folder="host", ranks=[0], has_model=True, record="{}",
            checkpoints=["job/checkpoint"],
        )
    ),
    A.AttendResponse(send_stacks=A.SendStacks(job_id="job")),
    A.AttendResponse(open_link=A.OpenLink(transfer="t", secret=b"s")),
    A.AttendResponse(try_link=A.TryLink(transfer="t", address="127.0.0.1:1", secret=b"s")),
    A.AttendResponse(inject_fault=A.InjectFault(job_id="job", fault=job_pb2.Fault.FAULT_STOP_RANK, seconds=1.0)),
)  # fmt: skip


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an agent in which a job has run; what it would do elsewhere is not done."""
    folder = tmp_path / "a" / "b" / "c"
    shutil.copytree(file_of_run("checkpoints/*/*"), folder / "job" / "checkpoint")
    (folder / "job" / "rank-0.log").write_text("one\ntwo\n")
    (folder / "job" / "model.safetensors").write_bytes(b"model")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(agent, "threading", AtOnce)
    monkeypatch.setattr(agent, "listen", lambda host, secret: f"{host}:1")
    monkeypatch.setattr(agent, "os", SimpleNamespace(**{**vars(os), "kill": lambda *_: None}))
    monkeypatch.setattr(link_speed, "socket", SimpleNamespace(**{**vars(socket), "create_connection": connect}))
    return folder


@fuzzed(60)
@given(orders=st.lists(changed_message(ORDERS), min_size=1, max_size=4))
def test_an_agent_carries_out_or_refuses_whatever_a_coordinator_orders(told: Path, orders: Sequence[Any]) -> None:
    one = ToldAgent(told)
    one._folders.remember("job", told / "job")
    for order in orders:
        tried(partial(one._do, order), ElcheError)
    assert all(len(exit.log_tail) < 8192 for exit in one.exits)
    assert [path.name for path in told.iterdir() if path.name.startswith("job")] == ["job"]

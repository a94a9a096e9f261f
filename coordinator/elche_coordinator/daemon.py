"""The coordinator process: its database, gRPC server and page, from start to a clean shutdown."""

import asyncio
import fcntl
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from elche.errors import ElcheError
from elche.folders import keep_out
from elche.network import MAX_MESSAGE_BYTES, SERVER_KEEPALIVE, is_loopback, join_address, split_address
from elche.token import HOW, MIN_CHARACTERS
from elche.v1 import (
    access_pb2_grpc,
    agent_pb2_grpc,
    averaging_pb2_grpc,
    bundle_pb2_grpc,
    job_pb2_grpc,
    rank_pb2_grpc,
    store_pb2_grpc,
)
from elche_coordinator import tape
from elche_coordinator.access import AccessInterceptor, Credentials
from elche_coordinator.access_service import AccessServicer
from elche_coordinator.agent_service import AgentServicer
from elche_coordinator.audit import Audit
from elche_coordinator.averaging_service import AveragingServicer
from elche_coordinator.bundle_service import BundleServicer
from elche_coordinator.bundles import Bundles
from elche_coordinator.catalogue import JobCatalogue
from elche_coordinator.core.coordinator import Coordinator
from elche_coordinator.core.messages.events import QuotasSet
from elche_coordinator.driver import Driver
from elche_coordinator.encryption import Encryption
from elche_coordinator.history import History
from elche_coordinator.job_service import JobServicer
from elche_coordinator.job_states import DECIDED
from elche_coordinator.journal_files import JournalFiles
from elche_coordinator.leadership import Leadership
from elche_coordinator.rank_service import RankServicer
from elche_coordinator.retention import forget_old
from elche_coordinator.shared_bundles import SharedBundles
from elche_coordinator.sql.store import SqlStore
from elche_coordinator.store import BadStore, Store, StoreFailed, reason_of
from elche_coordinator.store_service import StoreServicer
from elche_coordinator.timelines import Timelines
from elche_coordinator.tokens import Tokens
from elche_coordinator.transfers import Transfers
from elche_coordinator.validation import ValidationInterceptor
from elche_coordinator.web.app import Web
from elche_coordinator.web.recordings import Recordings
from elche_coordinator.web.server import WebServer

log = logging.getLogger(__name__)

DATABASE = "elche.sqlite"
COPY_EVERY_S = 5.0
GRACE_S = 1.0
"""How long open calls may take to end at shutdown."""


class CannotStart(ElcheError):
    """The daemon cannot start with this configuration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Configuration of the daemon. Raises `CannotStart` when it would not be safe."""

    listen: str
    """HOST:PORT of the gRPC server; port 0: any free one."""
    http: str | None
    """HOST:PORT of the page and /metrics; None: neither is served."""
    data: Path
    """Folder of the database."""
    store: str = ""
    """URL of a PostgreSQL database that several coordinators share; empty: a file in `data`."""
    keep_jobs: int
    """How many jobs that have ended are remembered."""
    token: str = ""
    """The coordinator's own token, whose bearer may do everything; empty: none is required of anybody."""
    tls: Path | None = None
    """Folder with a certificate and its key; None: nothing is encrypted."""
    asks_certificates: bool = False
    """Whether clients and agents must present certificates of the authority in that folder."""
    quotas: Mapping[str, int] = field(default_factory=dict)
    """How many slots a project may have; "*": each that is not named."""
    exit_with_stdin: bool = False
    """Exit when standard input closes, that is when the parent process is gone."""

    def __post_init__(self) -> None:
        if self.token and len(self.token) < MIN_CHARACTERS:
            raise CannotStart(
                f"a token of {len(self.token)} characters can be guessed: it must have at least {MIN_CHARACTERS}, "
                "such as the output of `openssl rand -hex 32`"
            )
        if self.asks_certificates and self.tls is None:
            raise CannotStart("--client-certificates needs --tls: a folder with the authority that has signed them")
        for address in filter(None, (self.listen, self.http)):
            host, _ = split_address(address)
            if not is_loopback(host) and not self.token and not self.asks_certificates:
                raise CannotStart(
                    f"listening on {host} needs a token: {HOW}, a secret that clients and agents share, "
                    "or listen on 127.0.0.1"
                )


async def serve(config: Config) -> None:
    """Runs the daemon until SIGTERM, SIGINT or, with `exit_with_stdin`, the end of standard input."""
    stop = _stop_asked(config.exit_with_stdin)
    store = _open_store(config)
    shared = SharedBundles(store, config.data / "bundles") if store.is_shared else None
    leadership = Leadership(store, f"{socket.gethostname()} {config.listen}", _start_over)
    if shared is not None and not await _lead(leadership, store, shared, config, stop):
        return
    try:
        await _serve(config, stop, store, shared, leadership)
    finally:
        leadership.resign()


async def _serve(
    config: Config, stop: asyncio.Event, store: Store, shared: SharedBundles | None, leadership: Leadership
) -> None:
    tokens = Tokens(store)
    credentials = Credentials(config.token, tokens, asks_certificates=config.asks_certificates)
    audit = Audit(config.data / "audit.jsonl")
    encryption = Encryption(config.tls, asks_clients=config.asks_certificates) if config.tls is not None else None
    server, port = _new_server(config, AccessInterceptor(credentials, audit), encryption)
    transfers = Transfers()
    driver = Driver(Coordinator(), store, recorded=tape.read(store))
    history = History(store, living=driver.core.job_ids())
    catalogue = JobCatalogue(driver, history)
    driver.begin_incarnations_at(history.last_incarnation + 1)
    timelines = Timelines(config.data / "timelines", driver)
    journals = JournalFiles(config.data / "journals", driver)
    bundles = Bundles(config.data / "bundles", lambda: _bundles_in_use(catalogue), shared=shared)
    job_servicer = JobServicer(driver, catalogue, transfers, timelines, journals, bundles)
    access_pb2_grpc.add_AccessServiceServicer_to_server(AccessServicer(credentials, tokens), server)
    job_pb2_grpc.add_JobServiceServicer_to_server(job_servicer, server)
    bundle_pb2_grpc.add_BundleServiceServicer_to_server(BundleServicer(driver, bundles), server)
    agent_pb2_grpc.add_AgentServiceServicer_to_server(AgentServicer(driver, transfers), server)
    rank_pb2_grpc.add_RankServiceServicer_to_server(RankServicer(driver, timelines), server)
    averaging_pb2_grpc.add_AveragingServiceServicer_to_server(AveragingServicer(driver), server)
    store_pb2_grpc.add_StoreServiceServicer_to_server(StoreServicer(driver), server)
    await _add_health(server)
    driver.handle(QuotasSet(quotas=config.quotas))
    for unfinished in history.unfinished:
        driver.handle(unfinished)
    async with (
        _running(driver.health.measure()),
        _running(timelines.write()),
        _running(forget_old(catalogue, config.keep_jobs)),
        _page(config, driver, catalogue, transfers, journals, credentials, audit, encryption),
    ):
        await server.start()
        host, _ = split_address(config.listen)
        print(f"elche-coordinator listening on {join_address(host, port)}", flush=True)
        await stop.wait()
        log.info("stopping")
        stopping = asyncio.create_task(server.stop(GRACE_S))
        driver.stop()
        leadership.resign()
    await stopping


def _bundles_in_use(catalogue: JobCatalogue) -> set[str]:
    """Names of the bundles of jobs that have not ended."""
    found = (catalogue.spec(view.job_id) for view in catalogue.present_views() if view.state not in DECIDED)
    return {spec.bundle for spec in found if spec is not None}


@asynccontextmanager
async def _running(work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Runs the coroutine as a task inside the context, and cancels it at the end."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


@asynccontextmanager
async def _page(
    config: Config,
    driver: Driver,
    catalogue: JobCatalogue,
    transfers: Transfers,
    journals: JournalFiles,
    credentials: Credentials,
    audit: Audit,
    encryption: Encryption | None,
) -> AsyncIterator[None]:
    """Serves the page and the metrics inside the context, if they are configured."""
    if config.http is None:
        yield
        return
    server, host = _bind_http(config.http), split_address(config.http)[0]
    web = Web(driver, catalogue, transfers, credentials, audit, Recordings(config.data / "recordings"), journals)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(_running(web.record()))
        presented = server.start(web.app, encryption.page_files if encryption is not None else None)
        if encryption is not None and presented is not None:
            await stack.enter_async_context(_running(encryption.renew(presented)))
        scheme = "http" if encryption is None else "https"
        log.info("page and metrics on %s://%s", scheme, join_address(host, server.port))
        yield
    web.stop()
    await server.stop()


def _open_store(config: Config) -> Store:
    data = config.data
    try:
        data.mkdir(parents=True, exist_ok=True)
        keep_out(data)
        _lock(data)
        if config.store:
            return SqlStore.at(config.store)
        store = SqlStore.in_file(data / DATABASE)
        (data / DATABASE).chmod(0o600)  # a file of an older version may be readable by others
        return store
    except (BadStore, CannotStart):
        raise
    except Exception as error:
        raise CannotStart(f"the database in {data} cannot be opened: {reason_of(error)}") from error


async def _lead(
    leadership: Leadership, store: Store, shared: SharedBundles, config: Config, stop: asyncio.Event
) -> bool:
    """Waits until this coordinator leads, and prepares the database; False when it is to stop before."""
    _check_free(config.listen)
    stopped = threading.Event()
    asked = asyncio.create_task(stop.wait())
    waiting = asyncio.create_task(asyncio.to_thread(leadership.await_turn, stopped))
    async with _running(_copy(shared)):
        await asyncio.wait([asked, waiting], return_when=asyncio.FIRST_COMPLETED)
    stopped.set()
    asked.cancel()
    if not await waiting:
        return False
    try:
        store.prepare()
        shared.restore()
    except (StoreFailed, OSError) as error:
        raise CannotStart(f"the database {store.name} cannot be used: {reason_of(error)}") from error
    return True


async def _copy(shared: SharedBundles) -> None:
    """Keeps the folder of bundles like the database, so that taking over takes no longer for large ones."""
    while True:
        with suppress(StoreFailed, OSError):  # it may not answer now, or have no tables yet
            await asyncio.to_thread(shared.restore)
        await asyncio.sleep(COPY_EVERY_S)


def _start_over(reason: str) -> None:
    """Another coordinator leads: this process ends every connection at once, and becomes one that waits."""
    log.warning("leads no more: %s; starts over", reason)
    os.execv(sys.executable, sys.orig_argv)


def _check_free(address: str) -> None:
    """Raises `CannotStart` when an address could not be listened on later."""
    host, port = split_address(address)
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        raise CannotStart(f"{address} cannot be listened on: {error.strerror}") from None


def _lock(data: Path) -> None:
    """Locks the folder against a second coordinator until this process exits. Raises `CannotStart`."""
    lock = os.open(data / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise CannotStart(f"another coordinator uses {data}; name another folder with --data") from None


def _new_server(
    config: Config, access: AccessInterceptor, encryption: Encryption | None
) -> tuple[grpc.aio.Server, int]:
    options = [
        *SERVER_KEEPALIVE,
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.so_reuseport", 0),
    ]
    server = grpc.aio.server(interceptors=[access, ValidationInterceptor()], options=options)
    try:
        if encryption is None:
            port = server.add_insecure_port(config.listen)
        else:
            port = server.add_secure_port(config.listen, encryption.server_credentials())
    except RuntimeError:
        port = 0
    if port == 0:
        raise CannotStart(f"{config.listen} cannot be listened on: the port is in use, or the host is not this machine")
    return server, port


async def _add_health(server: grpc.aio.Server) -> None:
    servicer = HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    await servicer.set("", health_pb2.HealthCheckResponse.SERVING)


def _bind_http(address: str) -> WebServer:
    try:
        return WebServer(*split_address(address))
    except OSError as error:
        raise CannotStart(f"the page and /metrics cannot be served on {address}: {error.strerror}") from error


def _stop_asked(exit_with_stdin: bool) -> asyncio.Event:
    """Set by a signal or by the end of standard input. Before anything listens: who finds it listening may stop it."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    if exit_with_stdin:
        threading.Thread(target=_read_to_end, args=(lambda: loop.call_soon_threadsafe(stop.set),), daemon=True).start()
    return stop


def _read_to_end(then: Callable[[], object]) -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    then()

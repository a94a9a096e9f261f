"""The coordinator process: its database, gRPC server and page, from start to a clean shutdown."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, nullcontext
from functools import partial

import grpc

from elche.network import MAX_MESSAGE_BYTES, SERVER_CONNECTIONS, SERVER_KEEPALIVE, join_address, split_address
from elche.v1 import (
    access_pb2_grpc,
    agent_pb2_grpc,
    averaging_pb2_grpc,
    bundle_pb2_grpc,
    job_pb2_grpc,
    rank_pb2_grpc,
    store_pb2_grpc,
)
from elche_coordinator import collector
from elche_coordinator.access.audit import Audit
from elche_coordinator.access.credentials import Credentials
from elche_coordinator.access.encryption import Encryption
from elche_coordinator.access.tokens import IssuedTokens
from elche_coordinator.access.upkeep import Upkeep
from elche_coordinator.archive.artifacts import Artifacts
from elche_coordinator.archive.catalogue import JobCatalogue
from elche_coordinator.archive.history import History
from elche_coordinator.config import CannotStart, Config
from elche_coordinator.core.coordinator import Coordinator
from elche_coordinator.core.messages.events import QuotasSet
from elche_coordinator.driver import Driver
from elche_coordinator.heap import Heap
from elche_coordinator.lifecycle.leadership import Leadership
from elche_coordinator.lifecycle.standby import DATABASE, end_if_moved, lead, loading, open_store, start_over, using
from elche_coordinator.lifecycle.stopping import Stop, save_jobs
from elche_coordinator.lifecycle.waiting_page import waiting_page
from elche_coordinator.limits.budgets import MAX_CALLS, MAX_HEADER_BYTES, MAX_STREAMS_OF_CONNECTION
from elche_coordinator.limits.open_files import max_connections, raise_limit
from elche_coordinator.limits.releasing import ReleasingInterceptor
from elche_coordinator.services.access_service import AccessServicer
from elche_coordinator.services.agent_service import AgentServicer
from elche_coordinator.services.averaging_service import AveragingServicer
from elche_coordinator.services.bundle_service import BundleServicer
from elche_coordinator.services.faults import Faults
from elche_coordinator.services.health_service import health_handler
from elche_coordinator.services.interceptor import AccessInterceptor, rank_caller
from elche_coordinator.services.job_service import JobServicer
from elche_coordinator.services.rank_service import RankServicer
from elche_coordinator.services.store_service import StoreServicer
from elche_coordinator.services.validation import ValidationInterceptor
from elche_coordinator.storage import tape
from elche_coordinator.storage.bundles import Bundles, SharedBundles
from elche_coordinator.storage.sql.store import SqlStore
from elche_coordinator.streams.transfers import Transfers
from elche_coordinator.telemetry.journal_files import JournalFiles
from elche_coordinator.telemetry.timelines import Timelines
from elche_coordinator.web.app import Web
from elche_coordinator.web.recordings import Recordings
from elche_coordinator.web.server import serving

log = logging.getLogger(__name__)

GRACE_S = 1.0
"""Seconds for which open calls may take to end at shutdown."""
FORGET_EVERY_S = 20.0
"""Seconds between two looks for ended jobs to forget."""


async def serve(config: Config) -> None:
    """Runs the daemon until SIGTERM, SIGINT or, with `exit_with_stdin`, the end of standard input."""
    stop = Stop(exit_with_stdin=config.exit_with_stdin)
    store = open_store(config)
    with using(config.data):
        shared = SharedBundles(store, config.data / "bundles") if store.is_shared else None
    leadership = Leadership(store, f"{socket.gethostname()} {config.listen}", start_over)
    if shared is not None:
        encryption = Encryption(config.tls, asks_clients=False) if config.tls is not None else None
        page = waiting_page(lambda: leadership.problem)
        async with serving(config.http, page, encryption) if config.http is not None else nullcontext():
            if not await lead(leadership, store, shared, config, stop.asked):
                return
    try:
        await _serve(config, stop, store, shared, leadership)
    finally:
        leadership.resign()


async def _serve(
    config: Config, stop: Stop, store: SqlStore, shared: SharedBundles | None, leadership: Leadership
) -> None:
    collector.settle()
    with loading(store):
        tokens, recorded = IssuedTokens(store), tape.read(store)
        driver = Driver(Coordinator(), store, recorded=recorded)
        history = History(store, living=driver.core.job_ids())
        catalogue, transfers = JobCatalogue(driver, history), Transfers()
        artifacts = Artifacts(config.artifacts, store, driver, catalogue, transfers)
        if recorded is None:
            store.drop_tape()  # last: all else could be read
    credentials = Credentials(config.token, tokens, asks_certificates=config.asks_certificates)
    audit = Audit(config.data / "audit.jsonl")
    encryption = Encryption(config.tls, asks_clients=config.asks_certificates) if config.tls is not None else None
    access = AccessInterceptor(credentials, audit, partial(rank_caller, driver))
    server, port = _new_server(config, access, encryption)
    # Before the first event that starts a rank: its incarnation must not have been another process's (protocol P1.1).
    driver.core.begin_incarnations_at(history.last_incarnation + 1)
    timelines = Timelines(config.data / "timelines", driver, catalogue.owner)
    journals = JournalFiles(config.data / "journals", driver, catalogue.owner)
    with using(config.data):
        bundles = Bundles(config.data / "bundles", catalogue.bundles_in_use, shared=shared)
    faults = Faults(driver, are_allowed=config.allows_chaos)
    job_servicer = JobServicer(driver, catalogue, transfers, artifacts, timelines, journals, bundles, faults)
    access_pb2_grpc.add_AccessServiceServicer_to_server(AccessServicer(credentials, tokens), server)
    job_pb2_grpc.add_JobServiceServicer_to_server(job_servicer, server)
    bundle_pb2_grpc.add_BundleServiceServicer_to_server(BundleServicer(driver, bundles), server)
    agent_pb2_grpc.add_AgentServiceServicer_to_server(AgentServicer(driver, transfers), server)
    rank_pb2_grpc.add_RankServiceServicer_to_server(RankServicer(driver, timelines), server)
    averaging_pb2_grpc.add_AveragingServiceServicer_to_server(AveragingServicer(driver), server)
    store_pb2_grpc.add_StoreServiceServicer_to_server(StoreServicer(driver), server)
    server.add_generic_rpc_handlers((health_handler(),))
    # Before the jobs that go on, which are placed by them.
    driver.handle(QuotasSet(quotas=config.quotas))
    for unfinished in history.unfinished:
        driver.handle(unfinished)
    async with (
        _running(driver.health.measure()),
        _running(Heap().keep_small()),
        _running(timelines.write()),
        _running(_forget_old(catalogue, config.keep_jobs)),
        _running(artifacts.run()),
        _running(end_if_moved(config.data / DATABASE)) if not store.is_shared else nullcontext(),
        _page(config, driver, catalogue, artifacts, journals, bundles, credentials, audit, encryption, tokens),
    ):
        await server.start()
        host, _ = split_address(config.listen)
        print(f"elche-coordinator listening on {join_address(host, port)}", flush=True)
        await stop.asked.wait()
        await save_jobs(driver, stop, config.grace_s)
        log.info("stopping")
        # Begun before the driver stops, so that no new calls come; open ones end as their streams are closed.
        stopping = asyncio.create_task(server.stop(GRACE_S))
        driver.stop()
        leadership.resign()
    await stopping


@asynccontextmanager
async def _running(work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Runs the coroutine as a task inside the context, and cancels it at the end."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def _forget_old(catalogue: JobCatalogue, keep_jobs: int) -> None:
    while True:
        catalogue.forget_oldest(keep_jobs)
        await asyncio.sleep(FORGET_EVERY_S)


@asynccontextmanager
async def _page(
    config: Config,
    driver: Driver,
    catalogue: JobCatalogue,
    artifacts: Artifacts,
    journals: JournalFiles,
    bundles: Bundles,
    credentials: Credentials,
    audit: Audit,
    encryption: Encryption | None,
    tokens: IssuedTokens,
) -> AsyncIterator[None]:
    """Serves the page and the metrics inside the context, if they are configured."""
    if config.http is None:
        yield
        return
    recordings = Recordings(config.data / "recordings", catalogue.owner)
    upkeep = Upkeep(config.data, tokens, encryption)
    web = Web(driver, catalogue, credentials, audit, artifacts, recordings, journals, bundles, upkeep)
    async with serving(config.http, web.app, encryption) as port, _running(web.record()):
        host, scheme = split_address(config.http)[0], "http" if encryption is None else "https"
        log.info("page and metrics on %s://%s", scheme, join_address(host, port))
        yield
        web.stop()


def _new_server(
    config: Config, access: AccessInterceptor, encryption: Encryption | None
) -> tuple[grpc.aio.Server, int]:
    options = server_options(raise_limit())
    server = grpc.aio.server(interceptors=[ReleasingInterceptor(), access, ValidationInterceptor()], options=options)
    try:
        if encryption is None:
            port = server.add_insecure_port(config.listen)
        else:
            port = server.add_secure_port(config.listen, encryption.server_credentials())
    except RuntimeError:
        port = 0
    if port == 0:
        raise CannotStart(
            f"the coordinator cannot listen on {config.listen}: the port is in use, or the host is not this machine"
        )
    return server, port


def server_options(num_files: int) -> list[tuple[str, int]]:
    """Options of a gRPC server in a process that may have `num_files` open files."""
    return [
        *SERVER_KEEPALIVE,
        *SERVER_CONNECTIONS,
        ("grpc.max_allowed_incoming_connections", max_connections(num_files)),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_HEADER_BYTES),
        ("grpc.max_concurrent_streams", MAX_STREAMS_OF_CONNECTION),
        ("grpc.server.max_pending_requests", MAX_CALLS),  # with more that wait to be looked at, it resets new ones
        ("grpc.server.max_pending_requests_hard_limit", MAX_CALLS),
        # Otherwise a second coordinator on this port would start, too, and get a part of the connections.
        ("grpc.so_reuseport", 0),
    ]

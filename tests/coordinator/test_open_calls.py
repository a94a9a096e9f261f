"""How many calls a caller may have open, and what becomes of those whose callers read nothing."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from elche.errors import NotAllowed
from elche.protocol import call_metadata
from elche.token import Role
from elche.v1 import bundle_pb2, bundle_pb2_grpc, job_pb2, job_pb2_grpc, store_pb2, store_pb2_grpc
from elche_coordinator.access.audit import Audit
from elche_coordinator.access.credentials import Credentials
from elche_coordinator.roles import Caller
from elche_coordinator.services import interceptor as module
from elche_coordinator.services.interceptor import SECRET, AccessInterceptor, RankCaller

MOST = 3
LARGE = "x" * (1 << 20)


class Files(job_pb2_grpc.JobServiceServicer):
    """Timelines without end; says which calls have begun and ended."""

    def __init__(self) -> None:
        self.begun: asyncio.Queue[str] = asyncio.Queue()
        self.ended: asyncio.Queue[str] = asyncio.Queue()

    async def FetchTimeline(  # noqa: N802
        self, request: job_pb2.FetchTimelineRequest, context: Any
    ) -> AsyncIterator[job_pb2.FetchTimelineResponse]:
        self.begun.put_nowait(request.job_id)
        try:
            while True:
                yield job_pb2.FetchTimelineResponse(data=bytes(1 << 16))
        finally:
            self.ended.put_nowait(request.job_id)


@asynccontextmanager
async def served(folder: Path, **more: float) -> AsyncIterator[tuple[Files, Callable[[str, str], Any]]]:
    """The service, and what begins a call of somebody for a job."""
    tokens: Any = SimpleNamespace(
        find=lambda name: SimpleNamespace(
            token=SimpleNamespace(caller=Caller(name, Role.VIEWER)), revoked=asyncio.Event()
        ),
        left_s=lambda grant: 1e6,
    )
    nobody: Any = None
    access = AccessInterceptor(Credentials("the own one", tokens), Audit(folder / "audit.jsonl"), nobody, **more)
    server, files = grpc.aio.server(interceptors=[access]), Files()  # type: ignore[abstract]  # the rest is not called
    job_pb2_grpc.add_JobServiceServicer_to_server(files, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = job_pb2_grpc.JobServiceStub(channel)

        def fetch(name: str, job_id: str) -> Any:
            return stub.FetchTimeline(job_pb2.FetchTimelineRequest(job_id=job_id), metadata=call_metadata(name))

        yield files, fetch
    await server.stop(None)


async def rest_of(call: Any) -> None:
    while await call.read():
        pass


def run(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(story(), 60))


def test_a_caller_has_so_many_calls_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1,000 timelines that a viewer did not read: 101 -> 4,828 MB, and no files for new connections."""
    monkeypatch.setattr(module, "MAX_FILE_CALLS_OF_CALLER", MOST)

    async def story() -> None:
        async with served(tmp_path) as (files, fetch):
            unread = [fetch("eve", str(number)) for number in range(MOST)]
            for _ in unread:
                await files.begun.get()
            with pytest.raises(grpc.aio.AioRpcError, match=r"you have 4 calls .* files at once, and 3") as refused:
                await fetch("eve", "one too many").read()
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            of_bob = fetch("bob", "of another")
            assert (await of_bob.read()).data
            unread[1].cancel()
            assert await files.ended.get() == "1"
            assert (await fetch("eve", "again").read()).data

    run(story)


def test_what_the_requests_of_open_calls_have_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A viewer's 100 watches of 4 MiB each, in fields that nobody knows, took 405 MB, and 512 may be open."""
    monkeypatch.setattr(module, "MAX_REQUEST_BYTES_OF_CALLER", MOST * len(LARGE))

    async def story() -> None:
        async with served(tmp_path) as (files, fetch):
            held = [fetch("eve", LARGE) for _ in range(MOST - 1)]
            for _ in held:
                await files.begun.get()
            with pytest.raises(grpc.aio.AioRpcError, match="bytes of requests of open calls at once, and 3145728 is"):
                await fetch("eve", LARGE).read()
            assert (await fetch("bob", LARGE).read()).data
            held[0].cancel()
            await files.ended.get()
            assert (await fetch("eve", LARGE).read()).data

    run(story)


def test_what_the_requests_of_waiting_ranks_have_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_REQUEST_BYTES_OF_RANKS", MOST * len(LARGE))

    async def story() -> None:
        async with served_to_ranks(tmp_path) as (keys, channel):
            store: Any = store_pb2_grpc.StoreServiceStub(channel)

            def get(who: str, key: str) -> Any:
                return store.Get(store_pb2.GetRequest(key=key), metadata=((SECRET, who),))

            held = [get(f"job {rank}/ada", LARGE) for rank in range(MOST - 1)]
            for _ in held:
                await keys.begun.get()
            with pytest.raises(grpc.aio.AioRpcError, match="bytes of requests of open calls at once, and 3145728 is"):
                await get("job 9/ada", LARGE)
            others = [get("job 9/ada", "small"), get("another 0/bob", LARGE)]
            assert {len(await keys.begun.get()) for _ in others} == {len("small"), len(LARGE)}
            for one in (*held, *others):
                one.cancel()

    run(story)


def test_who_reads_nothing_for_too_long_is_ended(tmp_path: Path) -> None:
    async def story() -> None:
        async with served(tmp_path, take_s=0.05) as (files, fetch):
            call = fetch("eve", "unread")
            assert await files.ended.get() == "unread"
            with pytest.raises(grpc.aio.AioRpcError, match=r"nothing of the stream was taken for 0\.05 s"):
                await rest_of(call)

    run(story)


async def endless(messages: list[bytes]) -> AsyncIterator[bytes]:
    """The messages, and then nothing more, without an end."""
    for one in messages:
        yield one
    await asyncio.Event().wait()


@pytest.mark.parametrize("messages", [[], [bytes(1 << 20)]], ids=["nothing", "a message without an end"])
@pytest.mark.parametrize("method", ["JobService/ScaleJob", "JobService/WatchJob", "StoreService/Set"])
def test_a_strangers_call_that_never_sends_its_message_is_refused_at_once(
    tmp_path: Path, method: str, messages: list[bytes]
) -> None:
    """gRPC called the handlers of such methods only with the message: 30 connections of 1,000 calls took 114 MB."""

    async def story() -> None:
        async with served_to_ranks(tmp_path) as (_, channel):
            call = channel.stream_stream(f"/elche.v1.{method}")(endless(messages))
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await rest_of(call)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED

    run(story)


def test_calls_that_never_send_their_message_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CALLS_OF_RANK", MOST)

    async def story() -> None:
        async with served_to_ranks(tmp_path) as (keys, channel):
            get = channel.stream_unary("/elche.v1.StoreService/Get")
            silent = [get(endless([]), metadata=((SECRET, "job 0/ada"),)) for _ in range(MOST + 1)]
            over, _ = await asyncio.wait(map(asyncio.ensure_future, silent), return_when=asyncio.FIRST_COMPLETED)
            with pytest.raises(grpc.aio.AioRpcError, match="you have 4 calls of a rank at once, and 3"):
                await over.pop()
            assert keys.begun.empty()
            for one in silent:
                one.cancel()

    run(story)


def test_requests_that_never_end_keep_only_others_of_their_caller_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC holds what has come of each: a user's 500 requests of which the last byte was lacking took 2 GB."""
    monkeypatch.setattr(module, "MAX_RECEIVED_OF_RANKS", MOST)

    async def story() -> None:
        async with served_to_ranks(tmp_path, receive_s=1.0) as (keys, channel):
            get = channel.stream_unary("/elche.v1.StoreService/Get")
            silent = [get(endless([]), metadata=((SECRET, f"job {n}/ada"),)) for n in range(MOST)]
            await asyncio.sleep(0.3)
            store: Any = store_pb2_grpc.StoreServiceStub(channel)
            calls = [
                store.Get(store_pb2.GetRequest(key=who), metadata=((SECRET, f"job 9/{who}"),)) for who in ("ada", "bob")
            ]
            assert await keys.begun.get() == "bob"
            await asyncio.sleep(0.2)
            assert keys.begun.empty()
            assert await keys.begun.get() == "ada", "once the others have had their time"
            for one in silent:
                with pytest.raises(grpc.aio.AioRpcError, match="the request has not come within 1 s") as ended:
                    await one
                assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
            for one in calls:
                one.cancel()

    run(story)


class Folders(bundle_pb2_grpc.BundleServiceServicer):
    """Folders without end."""

    async def FetchBundle(  # noqa: N802
        self, request: bundle_pb2.FetchBundleRequest, context: Any
    ) -> AsyncIterator[bundle_pb2.FetchBundleResponse]:
        while True:
            yield bundle_pb2.FetchBundleResponse(data=bytes(1 << 16))


class Keys(store_pb2_grpc.StoreServiceServicer):
    """Keys that are never set."""

    def __init__(self) -> None:
        self.begun: asyncio.Queue[str] = asyncio.Queue()
        self.ended: asyncio.Queue[str] = asyncio.Queue()

    async def Get(self, request: store_pb2.GetRequest, context: Any) -> store_pb2.GetResponse:  # noqa: N802
        self.begun.put_nowait(request.key)
        try:
            await asyncio.Event().wait()
            return store_pb2.GetResponse()
        finally:
            self.ended.put_nowait(request.key)


@asynccontextmanager
async def served_to_ranks(folder: Path, **more: float) -> AsyncIterator[tuple[Keys, Any]]:
    """Services of ranks, whose secrets are RANK/USER: what keys are asked for, and a channel."""

    def rank_of(context: Any) -> RankCaller:
        if SECRET not in (given := dict(context.invocation_metadata())):
            raise NotAllowed("no secret")
        return RankCaller(*given[SECRET].split("/"))

    nobody: Any = SimpleNamespace(find=lambda text: None)
    access = AccessInterceptor(Credentials("the own one", nobody), Audit(folder / "audit.jsonl"), rank_of, **more)
    server, keys = grpc.aio.server(interceptors=[access]), Keys()  # type: ignore[abstract]  # the rest is not called
    bundle_pb2_grpc.add_BundleServiceServicer_to_server(Folders(), server)
    store_pb2_grpc.add_StoreServiceServicer_to_server(keys, server)
    job_pb2_grpc.add_JobServiceServicer_to_server(Files(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield keys, channel
    await server.stop(None)


@pytest.mark.parametrize(
    ("bound", "others", "why"),
    [
        ("MAX_CALLS_OF_RANK", ("job 1/ada", "another 0/bob"), "you have 4 calls of a rank at once, and 3"),
        ("MAX_RANK_CALLS_OF_USER", ("another 0/bob",), "you have 4 calls of your jobs' ranks at once, and 3"),
    ],
)
def test_a_rank_and_a_user_have_so_many_calls_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str, others: tuple[str, ...], why: str
) -> None:
    """20,000 calls that wait for one key: +443 MB, and no end to it."""
    monkeypatch.setattr(module, bound, MOST)

    async def story() -> None:
        async with served_to_ranks(tmp_path) as (keys, channel):
            store: Any = store_pb2_grpc.StoreServiceStub(channel)

            def get(who: str, key: str) -> Any:
                return store.Get(store_pb2.GetRequest(key=key), metadata=((SECRET, who),))

            waiting = [get("job 0/ada", str(number)) for number in range(MOST)]
            for _ in waiting:
                await keys.begun.get()
            with pytest.raises(grpc.aio.AioRpcError, match=why) as refused:
                await get("job 0/ada", "one too many")
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            for who in others:
                waiting.append(get(who, who))
                assert await keys.begun.get() == who
            waiting[1].cancel()
            assert await keys.ended.get() == "1"
            waiting.append(get("job 0/ada", "again"))
            assert await keys.begun.get() == "again"

    run(story)


def test_a_rank_fetches_its_folder_so_many_times_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1,500 fetches that were not read: +630 MB, and 526 open files."""
    monkeypatch.setattr(module, "MAX_FOLDER_CALLS_OF_RANK", MOST)

    async def story() -> None:
        async with served_to_ranks(tmp_path) as (_, channel):
            bundles: Any = bundle_pb2_grpc.BundleServiceStub(channel)

            def fetch(who: str) -> Any:
                return bundles.FetchBundle(bundle_pb2.FetchBundleRequest(), metadata=((SECRET, who),))

            unread = [fetch("job 0/ada") for _ in range(MOST)]
            for one in unread:
                assert (await one.read()).data
            with pytest.raises(grpc.aio.AioRpcError, match="you have 4 fetches of a rank's folder at once, and 3"):
                await fetch("job 0/ada").read()
            assert (await fetch("job 1/ada").read()).data

    run(story)

"""Who may not call is told so before what they have sent is looked at, and whose token ends is not waited for."""

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from elche.errors import InvalidJob, NotAllowed
from elche.status import answering
from elche.token import Role
from elche_coordinator.access.audit import UNCHANGED, Audit
from elche_coordinator.access.credentials import Credentials
from elche_coordinator.limits.backlog import Turns
from elche_coordinator.roles import CHANGES, HAS_CHANGED, NEEDED, Caller
from elche_coordinator.services import interceptor as module
from elche_coordinator.services.interceptor import SESSION, AccessInterceptor, RankCaller
from elche_coordinator.services.validation import NUM_RANKS

OWN = "correct horse battery"


class Context:
    """A call with this token."""

    def __init__(self, token: str) -> None:
        self._token = token
        self.answer: grpc.StatusCode | None = None
        self.said = ""
        self.written: list[Any] = []

    def invocation_metadata(self) -> Any:
        return (("authorization", f"Bearer {self._token}"),)

    def auth_context(self) -> dict[str, Any]:
        return {}

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def details(self) -> str:
        return self.said

    async def write(self, message: Any) -> None:
        self.written.append(message)

    async def abort(self, code: grpc.StatusCode, details: str, trailing_metadata: Any = ()) -> None:
        self.answer, self.said = code, details
        raise grpc.aio.AbortError(details)


async def stream(*messages: bytes) -> AsyncIterator[bytes]:
    for one in messages:
        yield one


def no_rank(context: Any) -> RankCaller:
    raise NotAllowed("unknown rank")


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("call", ["JobService/ScaleJob", "AgentService/Deliver", "AccessService/MakeToken"])
def test_a_strangers_message_is_not_read(tmp_path: Path, call: str, is_stream: bool) -> None:
    read: list[bytes] = []

    async def behave(request: Any, context: Any) -> Any:
        return [one async for one in request] if is_stream else request

    make = grpc.stream_unary_rpc_method_handler if is_stream else grpc.unary_unary_rpc_method_handler

    async def scenario() -> None:
        tokens: Any = SimpleNamespace(find=lambda text: None)
        access = AccessInterceptor(Credentials(OWN, tokens), Audit(tmp_path / "audit.jsonl"), no_rank)

        async def continuation(details: Any) -> Any:
            return make(behave, lambda data: read.append(data) or data, None)  # type: ignore[func-returns-value]

        details: Any = SimpleNamespace(method=f"/elche.v1.{call}")
        handler = await access.intercept_service(continuation, details)
        assert handler.request_deserializer is None
        sent = (b"1", b"2") if is_stream else (b"1",)
        stranger: Any = Context("a guess, and a wrong one")
        with pytest.raises(grpc.aio.AbortError):
            await handler.stream_stream(stream(*sent), stranger)
        assert (stranger.answer, read) == (grpc.StatusCode.UNAUTHENTICATED, [])
        known: Any = Context(OWN)
        await handler.stream_stream(stream(*sent), known)
        assert known.written == ([[b"1", b"2"]] if is_stream else [b"1"])
        assert read

    asyncio.run(scenario())


def test_nothing_holds_a_message_once_it_is_read(tmp_path: Path) -> None:
    """1,600 messages of 4 MiB from one viewer: +391 MB, as long as gRPC's stream of each call had the last one."""
    closed: list[bool] = []

    async def sent() -> AsyncIterator[bytes]:
        try:
            yield b"1"
        finally:
            closed.append(True)

    async def behave(request: Any, context: Any) -> Any:
        return list(closed)

    async def scenario() -> None:
        access = AccessInterceptor(Credentials(OWN, SimpleNamespace()), Audit(tmp_path / "audit.jsonl"), no_rank)  # type: ignore[arg-type]

        async def continuation(details: Any) -> Any:
            return grpc.unary_unary_rpc_method_handler(behave, lambda data: data)

        details: Any = SimpleNamespace(method="/elche.v1.JobService/ListJobs")
        handler = await access.intercept_service(continuation, details)
        messages, context = sent(), Context(OWN)
        await handler.stream_stream(messages, context)
        assert context.written == [[True]]

    asyncio.run(scenario())


def test_an_upload_ends_with_its_token(tmp_path: Path) -> None:
    async def behave(request: Any, context: Any) -> None:
        await asyncio.Event().wait()

    async def scenario() -> None:
        revoked = asyncio.Event()
        caller = SimpleNamespace(name="a worker", require=lambda *what: None)
        grant = SimpleNamespace(token=SimpleNamespace(caller=caller))
        grant.revoked = revoked
        tokens: Any = SimpleNamespace(find=lambda text: grant, left_s=lambda grant: timedelta(days=1).total_seconds())
        access = AccessInterceptor(Credentials(OWN, tokens), Audit(tmp_path / "audit.jsonl"), no_rank)

        async def continuation(details: Any) -> Any:
            return grpc.stream_unary_rpc_method_handler(behave)

        details: Any = SimpleNamespace(method="/elche.v1.AgentService/Deliver")
        handler = await access.intercept_service(continuation, details)
        context: Any = Context("of somebody")
        uploading = asyncio.ensure_future(handler.stream_stream(stream(b""), context))
        await asyncio.sleep(0)
        revoked.set()
        with pytest.raises(grpc.aio.AbortError):
            await asyncio.wait_for(uploading, 5)
        assert context.answer is grpc.StatusCode.UNAUTHENTICATED

    asyncio.run(scenario())


@pytest.mark.parametrize("is_stream", [False, True])
def test_the_message_of_who_has_no_secret_of_a_rank_is_not_read(tmp_path: Path, is_stream: bool) -> None:
    """4 KB of a stranger, which unpacked to 4 MiB for `Store.Wait`, took 36 to 71 ms of processor."""
    read: list[bytes] = []
    secrets: list[str] = []

    def authenticate(context: Any) -> RankCaller:
        return RankCaller("a job 0", "its user") if secrets else no_rank(context)

    async def answer(request: Any, context: Any) -> Any:
        return request

    async def answers(request: Any, context: Any) -> Any:
        yield request

    async def scenario() -> None:
        tokens: Any = SimpleNamespace()
        access = AccessInterceptor(Credentials(OWN, tokens), Audit(tmp_path / "audit.jsonl"), authenticate)

        def parse(data: bytes) -> bytes:
            read.append(data)
            return data

        async def continuation(details: Any) -> Any:
            if is_stream:
                return grpc.unary_stream_rpc_method_handler(answers, parse)
            return grpc.unary_unary_rpc_method_handler(answer, parse)

        details: Any = SimpleNamespace(method="/elche.v1.StoreService/Wait")
        handler = await access.intercept_service(continuation, details)
        assert handler.request_deserializer is None

        async def call(context: Any) -> Any:
            await handler.stream_stream(stream(b"1"), context)
            return context.written

        stranger: Any = Context("a guess")
        with pytest.raises(grpc.aio.AbortError):
            await call(stranger)
        assert (stranger.answer, read) == (grpc.StatusCode.UNAUTHENTICATED, [])
        secrets.append("it has one")
        assert await call(stranger) == [b"1"]
        health: Any = SimpleNamespace(method="/grpc.health.v1.Health/Check")
        assert (await access.intercept_service(continuation, health)).request_deserializer is parse

    asyncio.run(scenario())


async def told_by(folder: Path, method: str, behave: Any, role: Role) -> tuple[Context, list[dict[str, Any]]]:
    """A call of somebody with this role, about "x", and the lines that it leaves in the audit log."""
    grant = SimpleNamespace(token=SimpleNamespace(caller=Caller("anna", role, "t1")), revoked=asyncio.Event())
    tokens: Any = SimpleNamespace(find=lambda text: grant, left_s=lambda grant: timedelta(days=1).total_seconds())
    path = folder / "audit.jsonl"
    access = AccessInterceptor(Credentials(OWN, tokens), Audit(path), no_rank)

    async def behave_in_stream(request: Any, context: Any) -> Any:
        yield await behave(request, context)

    async def continuation(details: Any) -> Any:
        is_stream = method.endswith("MeasureLinks")
        make = grpc.unary_stream_rpc_method_handler if is_stream else grpc.unary_unary_rpc_method_handler
        return make(behave_in_stream if is_stream else behave, lambda data: SimpleNamespace(id="x"))

    details: Any = SimpleNamespace(method=method)
    handler = await access.intercept_service(continuation, details)
    context: Any = Context("of anna")
    try:
        await handler.stream_stream(stream(b""), context)
    except grpc.aio.AbortError:
        pass
    return context, [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.parametrize("method", sorted(method for method in NEEDED if method.rpartition("/")[2] in CHANGES))
def test_what_is_changed_is_in_the_audit_log(tmp_path: Path, method: str) -> None:
    """Who revoked a token could not have been found."""

    async def behave(request: Any, context: Any) -> Any:
        return b""

    _, lines = asyncio.run(told_by(tmp_path, method, behave, Role.OPERATOR))
    call = method.rpartition("/")[2]
    told = [(line["who"], line["token"], line["call"], line["outcome"]) for line in lines]
    assert told == [("anna (operator)", "t1", call, "begun" if call == "MeasureLinks" else "done")]
    assert lines[0]["what"] == ("" if call == "MeasureLinks" else "x")


def test_a_call_that_finds_nothing_to_change_is_told_from_a_change(tmp_path: Path) -> None:
    async def behave(request: Any, context: Any) -> Any:
        HAS_CHANGED.set(False)
        return b""

    _, (line,) = asyncio.run(told_by(tmp_path, "/elche.v1.JobService/CancelJob", behave, Role.USER))
    assert (line["what"], line["outcome"]) == ("x", UNCHANGED)


class Unread(Context):
    """A call whose caller takes no answer."""

    async def write(self, message: Any) -> None:
        await asyncio.Event().wait()


@pytest.mark.parametrize("method", ["JobService/ListHosts", "StoreService/Get"])
def test_answers_that_are_not_taken_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """gRPC held each answer of 1.5 MB that a viewer did not take, twice, for as long as the connection stayed."""
    monkeypatch.setattr(module, "MAX_UNREAD_BYTES_OF_CALLER", 100)

    async def behave(request: Any, context: Any) -> bytes:
        return bytes(60)

    async def scenario() -> None:
        grant = SimpleNamespace(token=SimpleNamespace(caller=Caller("eve", Role.VIEWER)), revoked=asyncio.Event())
        tokens: Any = SimpleNamespace(find=lambda text: grant, left_s=lambda grant: 1e6)
        credentials, audit = Credentials(OWN, tokens), Audit(tmp_path / "audit.jsonl")
        access = AccessInterceptor(credentials, audit, lambda _: RankCaller("job 0", "eve"), take_s=0.2)

        async def continuation(details: Any) -> Any:
            return grpc.unary_unary_rpc_method_handler(behave, lambda data: data)

        details: Any = SimpleNamespace(method=f"/elche.v1.{method}")
        handler = await access.intercept_service(continuation, details)
        unread, more, later = Unread("of eve"), Context("of eve"), Context("of eve")
        first = asyncio.ensure_future(handler.stream_stream(stream(b""), unread))
        await asyncio.sleep(0.05)
        with pytest.raises(grpc.aio.AbortError, match="you have 120 bytes of answers not read at once, and 100"):
            await handler.stream_stream(stream(b""), more)
        assert more.answer is grpc.StatusCode.RESOURCE_EXHAUSTED
        with pytest.raises(grpc.aio.AbortError, match="nothing of the stream was taken"):
            await first
        await handler.stream_stream(stream(b""), later)
        assert later.written == [bytes(60)]

    asyncio.run(scenario())


@pytest.mark.parametrize("method", sorted(method for method, needed in NEEDED.items() if needed is not Role.VIEWER))
def test_what_a_viewer_is_refused_is_in_the_audit_log(tmp_path: Path, method: str) -> None:
    async def behave(request: Any, context: Any) -> Any:
        raise AssertionError("it is refused")

    context, lines = asyncio.run(told_by(tmp_path, method, behave, Role.VIEWER))
    call = method.rpartition("/")[2]
    assert context.answer is grpc.StatusCode.PERMISSION_DENIED
    assert [(line["who"], line["call"]) for line in lines] == [("anna (viewer)", call)]
    assert lines[0]["outcome"].startswith(f"refused: {call} needs the role ")


@pytest.mark.parametrize(
    ("error", "outcome"), [(InvalidJob("it has ended"), "refused: it has ended"), (OSError("disk"), "failed")]
)
def test_a_change_that_is_not_made_is_in_the_audit_log_with_its_reason(
    tmp_path: Path, error: Exception, outcome: str
) -> None:
    async def behave(request: Any, context: Any) -> Any:
        async with answering(context):
            raise error

    async def story() -> list[dict[str, Any]]:
        try:
            return (await told_by(tmp_path, "/elche.v1.JobService/CancelJob", behave, Role.USER))[1]
        except OSError:
            return [json.loads((tmp_path / "audit.jsonl").read_text())]

    assert [line["outcome"] for line in asyncio.run(story())] == [outcome]


def test_a_session_is_read_at_its_users_turn_and_bounded_by_the_jobs_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[object] = []

    async def take(turns: Turns, user: str, num_bytes: int) -> None:
        seen.append((user, num_bytes))

    def parse(data: bytes) -> bytes:
        seen.append((data, NUM_RANKS.get()))
        return data

    async def converse(requests: Any, context: Any) -> Any:
        async for one in requests:
            yield one

    async def continuation(details: Any) -> Any:
        return grpc.stream_stream_rpc_method_handler(converse, parse)

    async def scenario() -> None:
        def authenticate(context: Any) -> RankCaller:
            return RankCaller("a job 0", "eve", lambda: 3)

        access = AccessInterceptor(Credentials(OWN, SimpleNamespace()), Audit(tmp_path / "audit.jsonl"), authenticate)  # type: ignore[arg-type]
        handler = await access.intercept_service(continuation, SimpleNamespace(method=SESSION))  # type: ignore[arg-type]
        context: Any = Context("a secret")
        assert [one async for one in handler.stream_stream(stream(b"12"), context)] == [b"12"]

    monkeypatch.setattr(Turns, "take", take)
    asyncio.run(scenario())
    assert seen == [("eve", 2), (b"12", 3)]

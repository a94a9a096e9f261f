"""Who takes nothing, and who asks for more than their share, does not shut the page for others."""

import asyncio
import gc
import socket
import ssl
from asyncio.sslproto import SSLProtocol
from collections import Counter
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h11
import pytest

from elche.errors import TooMuch
from elche.token import Role
from elche_client.commands.certificates import Authority
from elche_coordinator.access.audit import Audit
from elche_coordinator.access.credentials import Credentials
from elche_coordinator.limits import listener
from elche_coordinator.limits.budgets import MAX_REQUESTS, MAX_REQUESTS_OF_CALLER, Budget
from elche_coordinator.limits.listener import Listener
from elche_coordinator.roles import Caller
from elche_coordinator.web import server
from elche_coordinator.web.access import LET_IN, AccessControl
from elche_coordinator.web.server import WebServer

MOST = 4
"""Connections in these stories."""


class Page:
    """Answers `/healthz` at once; sends without end from `/static/` to strangers, and from `/api/` to who is let in."""

    def __init__(self) -> None:
        self.ended: asyncio.Queue[str] = asyncio.Queue()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope["path"]
        await send({"type": "http.response.start", "status": 200, "headers": [(b"transfer-encoding", b"chunked")]})
        if path == "/healthz":
            await send({"type": "http.response.body", "body": b"ok"})
            return
        if path.startswith("/api/"):
            scope[LET_IN] = True
        watching = asyncio.ensure_future(watch_end(receive))
        while not watching.done():
            quiet = path == "/api/quiet"
            await send({"type": "http.response.body", "body": b"." if quiet else bytes(1 << 16), "more_body": True})
            await asyncio.wait({watching}, timeout=60 if quiet else 0)
        self.ended.put_nowait(path)


async def watch_end(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def connected(port: int, **more: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    while True:
        try:
            return await asyncio.open_connection("127.0.0.1", port, limit=1024, **more)
        except ConnectionRefusedError:  # it does not listen yet
            await asyncio.sleep(0)


async def ask(port: int, path: str, **more: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection whose request is being answered, and which reads no more."""
    reader, writer = await connected(port, **more)
    writer.write(f"GET {path} HTTP/1.1\r\nhost: here\r\n\r\n".encode())
    assert b" 200 " in await reader.readline()
    return reader, writer


def test_who_is_told_the_address_connects_at_once() -> None:
    """Before the loop has run once more: who read the line with the address was refused now and then."""

    async def story() -> None:
        web = WebServer("127.0.0.1", 0)
        web.start(Page())
        with socket.create_connection(("127.0.0.1", web.port), timeout=100):
            pass
        await web.stop()

    asyncio.run(story())


async def of_connections(*paths: str) -> Counter[str]:
    """Who was ended when one more had come, and was answered, than there may be connections."""
    page, web = Page(), WebServer("127.0.0.1", 0)
    web.start(page)
    open_ones = [await ask(web.port, path) for path in paths]
    _, newest = await ask(web.port, "/healthz")
    ended = Counter([await asyncio.wait_for(page.ended.get(), 100)])
    for _, writer in (*open_ones, (None, newest)):
        writer.close()
    await web.stop()
    return ended


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", MOST)


def test_strangers_that_read_nothing_make_room_for_a_new_connection() -> None:
    """140 that pipelined requests for static files shut the page, /metrics and /healthz: the new one was closed."""
    assert asyncio.run(of_connections(*["/static/x"] * MOST)) == {"/static/x": 1}


def test_who_is_let_in_stays_while_strangers_can_go() -> None:
    assert asyncio.run(of_connections(*["/api/quiet"] * (MOST - 1), "/static/x")) == {"/static/x": 1}


def test_who_takes_nothing_for_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "TAKE_S", 0.05)

    async def story() -> None:
        page, web = Page(), WebServer("127.0.0.1", 0)
        web.start(page)
        _, writer = await ask(web.port, "/api/all")
        assert await asyncio.wait_for(page.ended.get(), 100) == "/api/all"
        writer.close()
        await web.stop()

    asyncio.run(story())


@pytest.mark.parametrize(
    ("header", "body", "status"),
    [
        ("transfer-encoding: chunked", "1\r\na\r\n" * 1000, b"400"),
        ("content-length: 1000000", "a" * 1000, b"400"),
        ("content-length: 2", "{}", b"200"),
        ("a: b\r\n" * 150 + "c: d", "", b"200"),
        ("a: b\r\n" * 10_000 + "c: d", "", b"400"),
    ],
)
def test_a_long_body_one_in_chunks_and_many_headers_end_the_connection_before_they_are_parsed(
    monkeypatch: pytest.MonkeyPatch, header: str, body: str, status: bytes
) -> None:
    """16 strangers who sent chunks of a byte kept everybody waiting for 20 s; other bodies were read without end. 8 who
    sent 12,000 headers in each request kept submissions waiting for 3 s.
    """
    parts = []
    parse = h11.Connection.next_event
    monkeypatch.setattr(h11.Connection, "next_event", lambda parser: parts.append(parse(parser)) or parts[-1])

    async def story() -> None:
        web = WebServer("127.0.0.1", 0)
        web.start(Page())
        reader, writer = await connected(web.port)
        writer.write(f"POST /healthz HTTP/1.1\r\nhost: here\r\nconnection: close\r\n{header}\r\n\r\n{body}".encode())
        assert status in await reader.readline()
        await reader.read()
        writer.close()
        await web.stop()

    asyncio.run(story())
    assert len(parts) < 10
    assert len(header) < 1000 or not parts


def test_handshakes_that_are_not_ended_are_so_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger who connected and said nothing took all files of a coordinator with TLS, of its database, too."""
    monkeypatch.setattr(listener, "max_handshakes", lambda num_files: MOST)
    folder = Authority(tmp_path).server(["127.0.0.1"], expires=timedelta(days=1)).folder

    async def story() -> None:
        page, web = Page(), WebServer("127.0.0.1", 0)
        web.start(page, (folder / "tls.crt", folder / "tls.key"))
        silent = [await connected(web.port) for _ in range(3 * MOST)]
        ended = [asyncio.ensure_future(reader.read()) for reader, _ in silent]
        await asyncio.wait(ended[: 2 * MOST], timeout=400)
        assert [one.done() for one in ended] == [True] * 2 * MOST + [False] * MOST  # the oldest
        buffers = [len(vars(one)["_ssl_buffer"]) for one in gc.get_objects() if isinstance(one, SSLProtocol)]
        assert len(buffers) >= MOST
        assert set(buffers) == {16 << 10}  # of failed handshakes, too, which the garbage collector finds late
        trust = ssl.create_default_context(cafile=str(folder / "ca.crt"))
        told = [await ask(web.port, "/healthz", ssl=trust) for _ in range(MOST - 1)]
        silent += [await connected(web.port) for _ in range(MOST)]
        told.append(await ask(web.port, "/healthz", ssl=trust))
        assert not any(writer.transport.is_closing() for _, writer in told)  # who ends it is counted otherwise
        for _, writer in (*silent, *told):
            writer.close()
        await web.stop()

    asyncio.run(story())


def test_of_handshakes_that_are_not_ended_those_of_who_has_most_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger who began 290 a second ended each other's within half a second: half of all visits failed."""
    monkeypatch.setattr(listener, "max_handshakes", lambda num_files: MOST)
    with ExitStack() as stack:
        page = stack.enter_context(Listener("127.0.0.1", 0))
        page.listen()

        def begin(host: str) -> socket.socket:
            one = stack.enter_context(socket.create_connection(page.getsockname(), source_address=(host, 0)))
            stack.enter_context(page.accept()[0])
            return one

        other = begin("127.0.0.2")
        many = [begin("127.0.0.1") for _ in range(3 * MOST)]
        for one in (other, *many):
            one.settimeout(0.05)
        assert [is_open(one) for one in (other, *many)] == [True] + [False] * (2 * MOST + 1) + [True] * (MOST - 1)


def is_open(one: socket.socket) -> bool:
    """True if the other side says nothing, and has not ended the connection."""
    try:
        return bool(one.recv(1))
    except TimeoutError:
        return True


def test_a_caller_has_so_many_requests_at_once(tmp_path: Path) -> None:
    """A viewer's 130 open streams shut the page."""

    async def story() -> None:
        may_end, begun = asyncio.Event(), asyncio.Queue[None]()
        callers = {name: Caller(name, Role.VIEWER) for name in ("eve", "bob")}

        async def app(scope: Any, receive: Any, send: Any) -> None:
            begun.put_nowait(None)
            await may_end.wait()

        tokens: Any = SimpleNamespace(
            find=lambda name: SimpleNamespace(token=SimpleNamespace(caller=callers[name]), revoked=asyncio.Event()),
            left_s=lambda grant: 1e6,
        )
        control = AccessControl(app, Credentials("the own one", tokens), Audit(tmp_path / "audit.jsonl"))
        told: list[Any] = []

        async def send(message: Any) -> None:
            told.append(message)

        def request(name: str, path: str = "/api/stream") -> asyncio.Task[None]:
            headers = [(b"authorization", f"Bearer {name}".encode())]
            scope = {"type": "http", "method": "GET", "path": path, "headers": headers}
            return asyncio.create_task(control(scope, None, send))  # type: ignore[arg-type]

        held = [request("eve") for _ in range(MAX_REQUESTS_OF_CALLER)]
        for _ in held:
            await begun.get()
        await asyncio.wait_for(request("eve"), 30)
        assert (told[0]["status"], b"32 is the limit" in told[1]["body"]) == (429, True)
        held += [request("bob"), request("eve", "/healthz")]
        for _ in range(2):
            await begun.get()
        may_end.set()
        await asyncio.gather(*held)
        await request("eve")
        assert len(told) == 2, "what has ended counts no more"

    asyncio.run(story())


def test_a_budget_is_of_each_caller_and_of_all() -> None:
    budget = Budget("eggs", 2, 3)
    with budget.taking("a", 2), pytest.raises(TooMuch, match=r"you have 3 eggs at once, and 2 is the limit"):
        budget.taking("a").__enter__()
    with budget.taking("a"), budget.taking("", 2), pytest.raises(TooMuch, match=r"all have 4 eggs at once, and 3"):
        budget.taking("b").__enter__()
    with budget.taking("", 3):
        pass
    assert MAX_REQUESTS < 128, "connections are left for those who have no token"

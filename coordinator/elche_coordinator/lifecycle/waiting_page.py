"""HTTP answers of a standby coordinator: that it is alive and ready, and that another one leads.

It needs neither tokens nor a database: it serves three paths only, and frees the address for the page as soon as it
leads.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from elche.network import split_address
from elche_coordinator.access.encryption import Encryption
from elche_coordinator.config import CannotStart
from elche_coordinator.limits.listener import BACKLOG, Listener

ANSWER_S = 5.0
"""Limit of a connection in seconds."""
MAX_CONNECTIONS = 64
STANDS_BY = "stands by\n"
METRICS = """\
# HELP elche_coordinator_leads Whether this coordinator leads; 0: it stands by.
# TYPE elche_coordinator_leads gauge
elche_coordinator_leads 0.0
"""
TEXT, EXPOSITION = "text/plain; charset=utf-8", "text/plain; version=0.0.4; charset=utf-8"


class WaitingPage:
    """Answers while another coordinator leads."""

    def __init__(self, problem: Callable[[], str], listener: Listener) -> None:
        """`problem` returns the reason why this one could not take over now; empty if it could."""
        self._problem = problem
        self._listener = listener
        self._num_connections = 0

    def answer(self, path: str) -> tuple[str, str, str]:
        """Status, kind and text of an answer."""
        match path:
            case "/healthz":
                return "200 OK", TEXT, "ok\n"
            case "/readyz":
                problem = self._problem()
                return ("503 Service Unavailable", TEXT, f"{problem}\n") if problem else ("200 OK", TEXT, STANDS_BY)
            case "/metrics":
                return "200 OK", EXPOSITION, METRICS
        return "503 Service Unavailable", TEXT, "this coordinator stands by: ask the one that leads\n"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers one request and closes the connection."""
        self._listener.on_protocol(writer.get_extra_info("peername"))
        self._num_connections += 1
        try:
            # Counted nevertheless, and closed at once below: the count must fit the one in `finally`.
            if self._num_connections > MAX_CONNECTIONS:
                return
            async with asyncio.timeout(ANSWER_S):
                request = await reader.readuntil(b"\r\n\r\n")
                words = request.split(b"\r\n", 1)[0].split()
                path = words[1].decode("latin-1").partition("?")[0] if len(words) == 3 else ""
                status, kind, text = self.answer(path)
                head = f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(text.encode())}\r\n"
                writer.write(f"{head}connection: close\r\n\r\n{text}".encode())
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # no request in time, or not HTTP
        finally:
            self._num_connections -= 1
            writer.close()


@asynccontextmanager
async def waiting_page(
    address: str | None, encryption: Encryption | None, problem: Callable[[], str]
) -> AsyncIterator[None]:
    """Context in which it answers at HOST:PORT; None: not at all. Raises `CannotStart` if it cannot listen there."""
    if address is None:
        yield
        return
    context = None
    if encryption is not None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(*encryption.page_files)
    host, port = split_address(address)
    try:
        listener = Listener(host, port)
        page = WaitingPage(problem, listener)
        server = await asyncio.start_server(page.serve, sock=listener, ssl=context, backlog=BACKLOG)
    except OSError as error:
        raise CannotStart(f"the page and /metrics cannot be served on {address}: {error.strerror}") from error
    renewing = None if encryption is None or context is None else asyncio.create_task(encryption.renew(context))
    try:
        yield
    finally:
        server.close()
        if renewing is not None:
            renewing.cancel()
            with suppress(asyncio.CancelledError):
                await renewing

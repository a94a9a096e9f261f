"""The HTTP server: uvicorn on the daemon's event loop, with a socket that is bound before anything starts."""

import asyncio
import ssl
from asyncio.sslproto import SSLProtocol
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from elche.network import split_address
from elche_coordinator.access.encryption import Encryption
from elche_coordinator.config import CannotStart
from elche_coordinator.limits.listener import BACKLOG, Listener
from elche_coordinator.web.access import LET_IN

STOP_S = 1
"""Seconds for open requests to end when the server stops."""
MAX_BUSY = 256
"""Requests and streams that are served at the same time; more are refused."""
MAX_CONNECTIONS = 128
"""With more connections, one is closed whose peer takes nothing, else the oldest idle or unauthenticated one."""
TLS_BYTES = 16 << 10
"""Buffer of a TLS connection. asyncio's own has 256 KiB, and outlives a handshake that fails until the garbage
collector looks for it: strangers' handshakes took 580 MB.
"""
MAX_HEADERS_BYTES = 64 << 10
MAX_HEADERS = 200
"""Lines of a request before its body; 12,000 take as long as 100 requests."""
MAX_BODY_BYTES = 4 << 10
TAKE_S = 120.0
"""Seconds for which a peer may take nothing of the pending data."""


class _Parser(h11.Connection):
    """Takes no request with a long body, one in chunks, or thousands of headers. None here needs one, and a chunk of a
    byte, or a header, takes as long as any: a few strangers' chunks kept everybody waiting for 20 s.
    """

    def next_event(self) -> Any:
        """The next part of a request. Raises `h11.RemoteProtocolError`, after which the connection is closed."""
        if self.their_state is h11.IDLE:
            come = self.trailing_data[0]
            if come.count(b"\n", 0, come.find(b"\r\n\r\n")) > MAX_HEADERS:
                raise h11.RemoteProtocolError("so many headers are not taken", 431)
        event = super().next_event()
        if isinstance(event, h11.Request):
            given = dict(event.headers)
            if b"transfer-encoding" in given or int(given.get(b"content-length", 0)) > MAX_BODY_BYTES:
                raise h11.RemoteProtocolError("a body of this kind is not taken", 413)
        return event


class _Connection(H11Protocol):
    """One connection, closed if its peer takes nothing, or, while idle, to make room for others."""

    _opened: ClassVar[dict["_Connection", None]] = {}
    """All connections of this process, oldest first."""
    _blocked: ClassVar[dict["_Connection", asyncio.TimerHandle]] = {}
    """Connections whose peers take nothing, the longest wait first, with the timers that will close them."""

    def __init__(self, *arguments: Any, listener: Listener, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.conn = _Parser(h11.SERVER, MAX_HEADERS_BYTES)
        self._listener = listener

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Registers the connection. If there are too many, closes the most expendable ones."""
        super().connection_made(transport)
        # From here on it counts as a connection, not as a handshake.
        self._listener.on_protocol(transport.get_extra_info("peername"))
        self._opened[self] = None
        while len(self._opened) > MAX_CONNECTIONS and (one := next(self._expendable(), None)) is not None:
            one._abort()

    @classmethod
    def _expendable(cls) -> Iterator["_Connection"]:
        """Connections that may be closed for others, in order; the newest unauthenticated one comes last."""
        yield from cls._blocked
        for one in cls._opened:
            if one.cycle is None or one.cycle.response_complete or LET_IN not in one.cycle.scope:
                yield one

    def pause_writing(self) -> None:
        """Called when the peer does not take pending data: starts the timer."""
        super().pause_writing()
        if self in self._opened and self not in self._blocked:
            self._blocked[self] = asyncio.get_running_loop().call_later(TAKE_S, self._abort)

    def resume_writing(self) -> None:
        """Called when the peer has taken the data: stops the timer."""
        self._release()
        super().resume_writing()

    def _abort(self) -> None:
        self._release()
        self._opened.pop(self, None)
        self.transport.abort()

    def _release(self) -> None:
        if (ending := self._blocked.pop(self, None)) is not None:
            ending.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forgets the connection."""
        self._release()
        self._opened.pop(self, None)
        super().connection_lost(exc)


class _Server(uvicorn.Server):
    """A uvicorn server that leaves signals to the daemon."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class WebServer:
    """Serves an ASGI application at HOST:PORT. Raises `OSError` when the address is not available."""

    def __init__(self, host: str, port: int) -> None:
        self._socket = Listener(host, port)
        self.port: int = self._socket.getsockname()[1]
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self, app: ASGIApp, files: tuple[Path, Path] | None = None) -> ssl.SSLContext | None:
        """Starts to serve the application, over TLS if given a certificate and its key. Returns the SSL context, into
        which a new certificate can be loaded.
        """
        certificate, key = files or (None, None)
        SSLProtocol.max_size = TLS_BYTES
        config = uvicorn.Config(
            app,
            ssl_certfile=certificate,
            ssl_keyfile=key,
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=STOP_S,
            http=partial(_Connection, listener=self._socket),  # type: ignore[arg-type]  # called as a class is
            backlog=BACKLOG,
            limit_concurrency=MAX_BUSY + MAX_CONNECTIONS,
            ws="none",
        )
        config.load()
        self._server = _Server(config)
        # Already bound, so that an address in use is an error at the start, and not of a task; and already listening,
        # so that who is told the address may connect before the task has begun.
        self._socket.listen(BACKLOG)
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        return config.ssl

    async def stop(self) -> None:
        """Waits up to 2 s for open requests, then closes the socket."""
        if self._server is not None and self._task is not None:
            self._server.should_exit = True
            await asyncio.wait([self._task], timeout=2 * STOP_S)
        self._socket.close()


@asynccontextmanager
async def serving(address: str, app: ASGIApp, encryption: Encryption | None) -> AsyncIterator[int]:
    """Context in which the application is served at HOST:PORT; its value is the port. Raises `CannotStart` if it cannot
    listen there.
    """
    try:
        server = WebServer(*split_address(address))
    except OSError as error:
        raise CannotStart(f"the page and /metrics cannot be served on {address}: {error.strerror}") from error
    presented = server.start(app, encryption.page_files if encryption is not None else None)
    renewing = None
    if encryption is not None and presented is not None:
        renewing = asyncio.create_task(encryption.renew(presented))
    try:
        yield server.port
    finally:
        if renewing is not None:
            renewing.cancel()
            await asyncio.wait([renewing])
        await server.stop()

"""The HTTP server: uvicorn on the daemon's event loop, with a socket that is bound before anything starts."""

import asyncio
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

STOP_S = 1
MAX_BUSY = 256
"""Requests and streams that are served at the same time; more are refused."""
MAX_CONNECTIONS = 128
"""With more connections, those that have been idle for longest are closed."""


class _Connection(H11Protocol):
    """One connection, which may be closed for others while it is idle."""

    _opened: ClassVar[dict["_Connection", None]] = {}
    """All connections of this process, oldest first."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Registers the connection, and closes idle ones when there are too many."""
        super().connection_made(transport)
        self._opened[self] = None
        silent = (one for one in self._opened if one.cycle is None or one.cycle.response_complete)
        while len(self._opened) > MAX_CONNECTIONS and (oldest := next(silent, None)) is not None:
            del self._opened[oldest]
            oldest.transport.abort()
            silent = (one for one in self._opened if one.cycle is None or one.cycle.response_complete)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forgets the connection."""
        self._opened.pop(self, None)
        super().connection_lost(exc)


class _Server(uvicorn.Server):
    """A uvicorn server that leaves signals to the daemon."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class WebServer:
    """Serves an ASGI application at HOST:PORT. Raises `OSError` when the address cannot be listened on."""

    def __init__(self, host: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((host, port))
        self.port: int = self._socket.getsockname()[1]
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self, app: ASGIApp, files: tuple[Path, Path] | None = None) -> ssl.SSLContext | None:
        """Starts to serve the application; over TLS with the files of a certificate and its key. Returns what presents
        that certificate, or another one that is loaded into it later.
        """
        certificate, key = files or (None, None)
        config = uvicorn.Config(
            app,
            ssl_certfile=certificate,
            ssl_keyfile=key,
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=STOP_S,
            http=_Connection,
            limit_concurrency=MAX_BUSY + MAX_CONNECTIONS,
            h11_max_incomplete_event_size=64 << 10,
            ws="none",
        )
        config.load()
        self._server = _Server(config)
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        return config.ssl

    async def stop(self) -> None:
        """Waits up to 2 s for open requests, then closes the socket."""
        if self._server is not None and self._task is not None:
            self._server.should_exit = True
            await asyncio.wait([self._task], timeout=2 * STOP_S)
        self._socket.close()

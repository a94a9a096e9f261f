"""The listening socket of the page, which bounds the connections that have not said yet what they want."""

import socket
from contextlib import suppress
from typing import Any

from elche_coordinator.limits.open_files import max_handshakes, raise_limit
from elche_coordinator.limits.sharing import crowded_out

BACKLOG = 128
"""Connections that the kernel holds, and that are accepted in one step."""


class Listener(socket.socket):
    """A listening socket that keeps the connections whose handshakes have not ended.

    asyncio creates a connection's protocol only after its TLS handshake, so nothing else can count them before.
    """

    def __init__(self, host: str, port: int) -> None:
        """Raises `OSError` when the address is not available."""
        super().__init__(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self.bind((host, port))
        except OSError:
            self.close()
            raise
        self.max_waiting = max_handshakes(raise_limit())
        self.waiting: dict[Any, socket.socket] = {}
        """Connections without a protocol, oldest first, by their peers' addresses."""

    def accept(self) -> tuple[socket.socket, object]:
        """The next connection. If too many wait, ends the oldest of the address that has most."""
        connection, peer = super().accept()
        self.waiting[peer] = connection
        if len(self.waiting) > self.max_waiting:
            # Nothing tells of connections that were closed in their handshakes, but they have no descriptor any more.
            self.waiting = {one: found for one, found in self.waiting.items() if found.fileno() >= 0}
            for one in crowded_out(((one, one[0], 1) for one in self.waiting), self.max_waiting):
                with suppress(OSError):  # it has been reset
                    self.waiting.pop(one).shutdown(socket.SHUT_RDWR)
        return connection, peer

    def on_protocol(self, peer: object) -> None:
        """A connection has its protocol, by which it is counted from now on."""
        self.waiting.pop(peer, None)

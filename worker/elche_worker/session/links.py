"""Tests which other ranks can be reached, on request when all are in a collective that does not end (protocol
P24.1)."""

import errno
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from elche.errors import InvalidJob
from elche.network import join_address, split_address
from elche.v1 import rank_pb2
from elche_worker.process.interfaces import listening_address

TRY_EVERY_S = 0.25
"""Seconds after which a further connection to each rank is begun, since a bad link may lose one."""
LIMIT_S = 3.0
"""Seconds after which a rank that has accepted no connection counts as unreachable."""
PENDING = (0, errno.EINPROGRESS, errno.EWOULDBLOCK)
"""Results of a non-blocking connect that has succeeded or is under way; any other is a failure."""


class Links:
    """Accepts other ranks' connections and closes them at once, and tries connections to them. No data is sent."""

    def __init__(self, coordinator: str, interface: str = "") -> None:
        """Listens on the same network as gloo."""
        self.address = ""
        """HOST:PORT; empty if it cannot listen."""
        with suppress(OSError, InvalidJob):
            self._listen(listening_address(coordinator, interface))

    def _listen(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=128)
        self.address = join_address(host, self._listener.getsockname()[1])
        threading.Thread(target=self._accept, name="links", daemon=True).start()

    def answer(self, probe: rank_pb2.Probe, send: Callable[[rank_pb2.ConverseRequest], None]) -> None:
        """Tests the ranks on another thread, then calls `send` with a message that lists the reachable ones."""

        def run() -> None:
            reached = reachable({peer.rank: peer.address for peer in probe.peers})
            send(rank_pb2.ConverseRequest(probed=rank_pb2.Probed(ranks=reached)))

        threading.Thread(target=run, name="probe", daemon=True).start()

    def _accept(self) -> None:
        while True:
            with suppress(OSError):  # the peer has closed the connection already
                self._listener.accept()[0].close()


def reachable(addresses: Mapping[int, str], limit_s: float = LIMIT_S) -> list[int]:
    """The ranks that accept a connection within `limit_s`, in order. The others have ended, or their link is broken."""
    left, opened = dict(addresses), []
    began_s = next_s = time.monotonic()
    with selectors.DefaultSelector() as selector:
        while left and (now_s := time.monotonic()) < began_s + limit_s:
            if now_s >= next_s:
                next_s = now_s + TRY_EVERY_S
                for rank, address in left.items():
                    if (one := _begin(address)) is not None:
                        opened.append(one)
                        selector.register(one, selectors.EVENT_WRITE, rank)
            for key, _ in selector.select(max(0.0, min(next_s, began_s + limit_s) - time.monotonic())):
                selector.unregister(key.fileobj)
                assert isinstance(key.fileobj, socket.socket)
                if key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                    left.pop(key.data, None)
    for one in opened:
        one.close()
    return sorted(addresses.keys() - left.keys())


def _begin(address: str) -> socket.socket | None:
    """Begins to connect; None if that fails at once."""
    host, port = split_address(address)
    one = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    one.setblocking(False)
    with suppress(OSError):
        if one.connect_ex((host, port)) in PENDING:
            return one
    one.close()
    return None

"""Tests which other ranks can be reached, when all are in a collective that does not end (protocol P24.1)."""

import errno
import fcntl
import selectors
import socket
import struct
import termios
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from elche.errors import InvalidJob
from elche.network import join_address, split_address
from elche.output import notice
from elche.v1 import rank_pb2
from elche_worker.process.interfaces import listening_address

TRY_EVERY_S = 0.25
"""Seconds after which a further connection to each rank is begun, since a bad link may lose one."""
LIMIT_S = 3.0
"""Seconds after which a rank that has accepted no connection counts as unreachable."""
PACKET_LIMIT_S = 6.0
"""The same of a rank to which a full packet, after that, has not come: on a slow link it waits behind others."""
MAX_PACKET_BYTES = 16 << 10
LOOK_EVERY_S = 0.05
"""Seconds between two looks whether it has come."""
PENDING = (0, errno.EINPROGRESS, errno.EWOULDBLOCK)
"""Results of a non-blocking connect that has succeeded or is under way; any other is a failure."""


class Links:
    """Accepts other ranks' connections and closes them at once, and tries connections to them, with a full packet each.

    Where hosts or tunnels disagree about the size of packets (MTU), small ones arrive, so that connections are made,
    and large ones are lost without a word. No process is waited for: the other side's kernel acknowledges the packet.
    """

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
            addresses = {peer.rank: peer.address for peer in probe.peers}
            reached = reachable(addresses, on_small=lambda ranks: _tell_small(ranks, addresses))
            send(rank_pb2.ConverseRequest(probed=rank_pb2.Probed(ranks=reached)))

        threading.Thread(target=run, name="probe", daemon=True).start()

    def _accept(self) -> None:
        while True:
            with suppress(OSError):  # the peer has closed the connection already
                self._listener.accept()[0].close()


def reachable(
    addresses: Mapping[int, str],
    limit_s: float = LIMIT_S,
    packet_limit_s: float = PACKET_LIMIT_S,
    on_small: Callable[[list[int]], None] = lambda ranks: None,
) -> list[int]:
    """The ranks that accept a connection within `limit_s`, and get a full packet within `packet_limit_s`, in order. The
    others have ended, or their link is broken. `on_small` is called with those that only get small packets.
    """
    left, opened, accepted = dict(addresses), list[socket.socket](), list[tuple[int, socket.socket]]()
    began_s = next_s = time.monotonic()
    with selectors.DefaultSelector() as selector:
        while left:
            now_s = time.monotonic()
            end_s = began_s + (packet_limit_s if any(rank in left for rank, _ in accepted) else limit_s)
            if now_s >= end_s:
                break
            if now_s >= next_s:
                next_s = now_s + TRY_EVERY_S
                for rank, address in left.items():
                    if (one := _begin(address)) is not None:
                        opened.append(one)
                        selector.register(one, selectors.EVENT_WRITE, rank)
            look_s = now_s + LOOK_EVERY_S if accepted else end_s
            for key, _ in selector.select(max(0.0, min(next_s, end_s, look_s) - time.monotonic())):
                selector.unregister(key.fileobj)
                assert isinstance(key.fileobj, socket.socket)
                if key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                    _send_packet(key.fileobj)
                    accepted.append((key.data, key.fileobj))
            for rank, one in accepted:
                if rank in left and _has_come(one):
                    left.pop(rank)
    for one in opened:
        one.close()
    if small := sorted({rank for rank, _ in accepted if rank in left}):
        on_small(small)
    return sorted(addresses.keys() - left.keys())


def _send_packet(one: socket.socket) -> None:
    """Sends as much as one packet of this connection holds."""
    with suppress(OSError):  # it is closed already: `_has_come` sees that
        one.send(bytes(min(one.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG), MAX_PACKET_BYTES)))


def _has_come(one: socket.socket) -> bool:
    """True if the other side's kernel has acknowledged what was sent, or has refused it since the connection is closed
    there. Also true where that cannot be asked.
    """
    if one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in (errno.ECONNRESET, errno.EPIPE):
        return True
    try:
        (num_bytes,) = struct.unpack("i", fcntl.ioctl(one, termios.TIOCOUTQ, bytes(4)))
    except OSError:
        return True
    return bool(num_bytes == 0)


def _tell_small(ranks: list[int], addresses: Mapping[int, str]) -> None:
    for rank in ranks:
        notice(
            f"rank {rank} accepts connections at {addresses[rank]}, but large packets to it are lost, or take over "
            f"{PACKET_LIMIT_S:.0f} s: see whether all network interfaces on the way have the same MTU"
        )


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

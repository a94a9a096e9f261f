"""Finds this process's TCP sockets by address, to end operations of gloo, which has no call for that."""

import os
import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import suppress

Address = tuple[str, int]
"""Host and port, as numbers."""
OPEN_FILES = "/dev/fd"
HELD_S = 1.0
"""How long connections that are given up stay open for writing: the other ranks are told to give them up, too."""


def listening() -> set[Address]:
    """Addresses on which this process accepts connections."""
    return {_address(one.getsockname()) for one in _sockets() if _listens(one)}


class ShutConnections:
    """Connections of gloo that were shut for reading. A moment later they are ended.

    gloo takes the end of what can be read for the end of a peer: all its operations on the connection fail. It has a
    hole at the other end: an operation whose first write fails, before its thread has read of the end, waits forever.
    So nobody's writes fail here while all shut their own: connections are neither shut for writing, nor ended by gloo's
    `close`, after which the peer's would. Beside two busy ranks, one abort of twelve had left an operation behind.
    """

    def __init__(self) -> None:
        self._held: dict[int, int] = {}
        """Duplicate descriptors, by the inode of their socket."""
        self._lock = threading.Lock()

    def add(self, own: set[Address], others: set[Address]) -> None:
        """Shuts the connections that were made to `own` and from here to `others`, if it was not done before.

        A listening socket is left alone: gloo ends the process when its own fails.
        """
        is_new = False
        for one in _sockets():
            inode = os.fstat(one.fileno()).st_ino
            with self._lock, suppress(OSError):  # not connected, or closed meanwhile
                is_meant = _address(one.getsockname()) in own or _address(one.getpeername()) in others
                if is_meant and not _listens(one) and inode not in self._held:
                    self._held[inode] = os.dup(one.fileno())
                    is_new = True
                    one.shutdown(socket.SHUT_RD)
        if is_new:
            timer = threading.Timer(HELD_S, self._end)
            timer.daemon = True
            timer.start()

    def _end(self) -> None:
        with self._lock:
            held, self._held = self._held, {}
        for one in held.values():
            with suppress(OSError), socket.socket(fileno=one) as connection:
                # Not closed alone: a DataLoader's worker has them open as well, and a peer that nobody has told of the
                # abort would wait for as long as that lives.
                connection.shutdown(socket.SHUT_RDWR)


def _sockets() -> Iterator[socket.socket]:
    """Each open TCP socket, as a duplicate that is closed after use."""
    for name in os.listdir(OPEN_FILES):
        with suppress(OSError):  # no socket any more, or not even open
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as one:
                    if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                        yield one


def _listens(one: socket.socket) -> bool:
    return bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _address(name: tuple[str, int]) -> Address:
    """The address without an IPv6 zone, which differs between hosts."""
    return name[0].partition("%")[0], name[1]

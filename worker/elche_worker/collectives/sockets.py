"""Finds this process's TCP sockets by address, to end operations of gloo, which has no call for that."""

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import suppress

Address = tuple[str, int]
"""Host and port, as numbers."""
OPEN_FILES = "/dev/fd"


def listening() -> set[Address]:
    """Addresses on which this process accepts connections."""
    return {_address(one.getsockname()) for one in _sockets() if _listens(one)}


def shut_connections(own: set[Address], others: set[Address]) -> int:
    """Shuts down the connections that were made to `own` and from here to `others`; returns how many.

    A thread that is blocked on one of them gets an error. A listening socket is left alone: gloo ends the process when
    its own fails.
    """
    num_shut = 0
    for one in _sockets():
        with suppress(OSError):  # not connected, or closed meanwhile
            # `shutdown`, not `close`: gloo's threads still use the descriptor, whose number could be given out again.
            if not _listens(one) and (_address(one.getsockname()) in own or _address(one.getpeername()) in others):
                one.shutdown(socket.SHUT_RDWR)
                num_shut += 1
    return num_shut


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

"""Measures the link between two hosts, for `elche doctor --links`: one listens, the other connects and controls."""

import hmac
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from statistics import median

from elche.network import join_address, split_address
from elche.v1.job_pb2 import LinkMeasured

WAIT_S = 20.0
"""Seconds for which a host listens, and which a measurement may take in all."""
SLOW_S = 0.5
"""If sending the first amount takes longer, in seconds, the link is slow, and no other is sent."""
CONNECT_S = 5.0
"""Seconds for a connection, and for the secret on it."""
NUM_PINGS = 20
"""Round trips that are timed; their median counts."""
STEPS_S = (0.05, 1.0)
"""Seconds for the second and third amount, sized by the time of the one before, since TCP starts slowly."""
FIRST_BYTES = 64 << 10
"""Least amount that is sent, and the first one."""
MAX_BYTES = 4 << 30
"""Most bytes of an amount, whatever the other host asks for."""
BLOCK = bytes(256 << 10)
"""The data that are sent, again and again."""
LENGTH = 8
"""Bytes of the number that says how large an amount is, big-endian."""
PING, TAKE, GIVE = b"p", b"t", b"g"
"""Commands: `PING`, answer with one byte; `TAKE`, receive an amount, then answer; `GIVE`, send an amount."""


class LinkFault(Exception):
    """The link cannot be measured, with the reason."""


def listen(host: str, secret: bytes) -> str:
    """Waits on a thread for a peer that sends the secret, and serves its commands; returns the address, as HOST:PORT.

    Connections without the secret are closed. Raises `OSError` when it cannot listen on `host`.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family)
    address = join_address(host, listener.getsockname()[1])
    threading.Thread(target=_serve, args=(listener, secret), name="link", daemon=True).start()
    return address


def _serve(listener: socket.socket, secret: bytes) -> None:
    end_s = time.monotonic() + WAIT_S
    with listener:
        while (left_s := end_s - time.monotonic()) > 0:
            listener.settimeout(left_s)
            with suppress(OSError), listener.accept()[0] as one:  # the peer has closed the connection, or none came
                one.settimeout(CONNECT_S)
                if hmac.compare_digest(_read(one, len(secret)), secret):
                    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    return _follow(one, end_s)
    return None


def _follow(one: socket.socket, end_s: float) -> None:
    """Obeys the other end's commands: "p" asks for a reply, "t" takes a number of bytes from it, "g" gives it some."""
    while (left_s := end_s - time.monotonic()) > 0:
        one.settimeout(left_s)
        match one.recv(1):
            case b"p":
                one.sendall(PING)
            case b"t":
                _take(one, min(MAX_BYTES, int.from_bytes(_read(one, LENGTH))))
                one.sendall(PING)
            case b"g":
                _give(one, min(MAX_BYTES, int.from_bytes(_read(one, LENGTH))))
            case _:
                return


def measure(address: str, secret: bytes, *, only_connects: bool = False) -> LinkMeasured:
    """Measures bandwidth and round trip to the host that listens at HOST:PORT; with `only_connects` the round trip
    alone. Takes 2 to 3 s, and at most `WAIT_S`. Raises `LinkFault`.
    """
    try:
        with socket.create_connection(split_address(address), CONNECT_S) as one:
            # `settimeout` limits each call alone: a peer that sends a byte now and then would take forever.
            ending = threading.Timer(WAIT_S, _end, (one,))
            ending.start()
            try:
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                one.settimeout(WAIT_S)
                one.sendall(secret)
                trips_s = [_timed(partial(_ping, one)) for _ in range(NUM_PINGS)]
                found = LinkMeasured(round_trip_s=median(trips_s))
                if not only_connects:
                    found.to_bytes_per_s = _bytes_per_s(partial(_send, one))
                    found.from_bytes_per_s = _bytes_per_s(partial(_receive, one))
                return found
            finally:
                ending.cancel()
    except TimeoutError:
        raise LinkFault(f"{address} does not answer in time") from None
    except OSError as error:
        raise LinkFault(f"{address}: {error.strerror or error}") from None
    except UnicodeError as error:
        raise LinkFault(f"{address} is no address: {error}") from None


def _end(one: socket.socket) -> None:
    with suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)


def _bytes_per_s(move: Callable[[int], None]) -> float:
    """Moves growing amounts, until one takes long enough to measure; returns the bandwidth of the last."""
    amount, took_s = FIRST_BYTES, _timed(partial(move, FIRST_BYTES))
    for wanted_s in STEPS_S:
        if took_s > SLOW_S:
            break
        amount = max(FIRST_BYTES, min(MAX_BYTES, int(amount * wanted_s / took_s)))
        took_s = _timed(partial(move, amount))
    return amount / took_s


def _timed(work: Callable[[], None]) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


def _ping(one: socket.socket) -> None:
    one.sendall(PING)
    _read(one, 1)


def _send(one: socket.socket, amount: int) -> None:
    one.sendall(TAKE + amount.to_bytes(LENGTH))
    _give(one, amount)
    _read(one, 1)


def _receive(one: socket.socket, amount: int) -> None:
    one.sendall(GIVE + amount.to_bytes(LENGTH))
    _take(one, amount)


def _give(one: socket.socket, amount: int) -> None:
    while amount > 0:
        one.sendall(BLOCK[:amount] if amount < len(BLOCK) else BLOCK)
        amount -= len(BLOCK)


def _take(one: socket.socket, amount: int) -> None:
    block = bytearray(len(BLOCK))
    while amount > 0:
        amount -= _some(one.recv_into(block, min(amount, len(block))))


def _read(one: socket.socket, amount: int) -> bytes:
    read = b""
    while len(read) < amount:
        part = one.recv(amount - len(read))
        _some(len(part))
        read += part
    return read


def _some(number: int) -> int:
    if number == 0:
        raise ConnectionError("the other host has closed the connection")
    return number

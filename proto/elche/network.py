"""Addresses, and the options of gRPC channels between elche's programs."""

import getpass
import ipaddress
import os
import socket

from elche.errors import ElcheError

DEFAULT_ADDRESS = "127.0.0.1:7717"
"""The coordinator's default HOST:PORT."""
MAX_MESSAGE_BYTES = 4 << 20
MAX_USER_CHARS = 255

ANSWER = ("grpc.http2.ping_timeout_ms", 15_000)
"""Time for the answer to an HTTP/2 ping; by default a minute. In gRPC 1.85 `keepalive_timeout_ms` limits only the time
until the kernel acknowledges (TCP), and the kernel of a stopped process does, as does a proxy before a lost host. A
ping waits behind data that is being sent, so 5 s are too few on a slow line.
"""
KEEPALIVE = (
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ANSWER,
    ("grpc.http2.max_pings_without_data", 0),
)
"""Pings of clients, by which a waiting rank notices that the coordinator's host, or the network to it, is lost."""
SERVER_KEEPALIVE = (
    ("grpc.keepalive_time_ms", 15_000),
    ("grpc.keepalive_timeout_ms", 15_000),
    ANSWER,
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),  # a client that pings more often is disconnected
)
"""Pings of the coordinator. A stopped process (SIGSTOP) does not answer, so that its stream ends without its death."""
SERVER_CONNECTIONS = (
    ("grpc.server_handshake_timeout_ms", 20_000),
    ("grpc.http2.settings_timeout", 10_000),
    ("grpc.max_connection_idle_ms", 300_000),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 512 << 10),
)
"""Limits of connections to the coordinator: those without a handshake, that do not acknowledge its HTTP/2 settings, and
idle ones are closed. gRPC bounds headers only once they are acknowledged. A channel reconnects with its next call.
With its probes gRPC receives 5 MB and more of a stream that the coordinator does not read, and there may be thousands;
without them 512 KiB, which is enough for 80 Mbit/s at a round trip of 50 ms.
"""
FRESH_NAMES = ("grpc.dns_min_time_between_resolutions_ms", 1_000)
"""Resolves a coordinator's name again after 1 s instead of gRPC's 30 s, since its address may have changed."""

CHANNEL_OPTIONS = (
    *KEEPALIVE,
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),  # an HTTP proxy must not be used for loopback
    ("grpc.initial_reconnect_backoff_ms", 100),  # to find a restarted coordinator within a second
    ("grpc.min_reconnect_backoff_ms", 1000),  # in spite of its name, the least that an attempt to connect may take
    ("grpc.max_reconnect_backoff_ms", 1000),
    FRESH_NAMES,
)
"""Options of the agents' and ranks' channels to the coordinator."""


class BadAddress(ElcheError):
    """An address is not HOST:PORT."""


def split_address(address: str) -> tuple[str, int]:
    """Host and port of an address HOST:PORT. Raises `BadAddress`."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise BadAddress(f"{address!r} is not HOST:PORT, such as {DEFAULT_ADDRESS}")
    return host.strip("[]"), int(port)


def split_addresses(text: str) -> list[str]:
    """The addresses of one or several coordinators, HOST:PORT each, separated by commas. Raises `BadAddress`."""
    addresses = [one.strip() for one in text.split(",")]
    for one in addresses:
        split_address(one)
    return addresses


def join_address(host: str, port: int) -> str:
    """HOST:PORT, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """True if the host is a loopback address, which only this machine can reach."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def split_host(header: str) -> str:
    """The host in an HTTP `host` header, with or without a port."""
    host, colon, port = header.rpartition(":")
    return (host if colon and port.isdigit() else header).strip("[]")


def own_address(coordinator: str) -> str:
    """This host's address, IPv4 before IPv6, on the route to a coordinator, or to one of several. Sends nothing.

    While none of them can be looked up or has a route, it is the last one that was found: names and routes may be away
    for a moment. Raises `OSError` if none was found before.
    """
    problem: OSError | None = None
    for host, port in map(split_address, split_addresses(coordinator)):
        try:
            there = sorted(socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM), key=lambda one: one[0])
        except OSError as error:
            problem = error
            continue
        for family, *_, address in there:
            try:
                with socket.socket(family, socket.SOCK_DGRAM) as probe:
                    probe.connect(address)
                    _own_addresses[coordinator] = found = str(probe.getsockname()[0])
                    return found
            except OSError as error:
                problem = error
    if coordinator in _own_addresses:
        return _own_addresses[coordinator]
    raise problem or OSError(f"{coordinator} has no address")


_own_addresses: dict[str, str] = {}
"""By coordinator: what `own_address` has found last."""


def user_at_host() -> str:
    """USER@HOST of this process, for people; a user without a name is a number."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a container may run as a user without an entry in /etc/passwd
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"[:MAX_USER_CHARS]

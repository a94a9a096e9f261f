"""Connections of commands and clients to a coordinator: address, credentials and channel."""

from dataclasses import dataclass

import grpc

from elche.channel import open_channel
from elche.network import DEFAULT_ADDRESS, FRESH_NAMES, KEEPALIVE, BadAddress, split_address, split_addresses
from elche.protocol import call_metadata
from elche.token import checked
from elche_client.transport import contexts

MAX_MESSAGE_BYTES = 16 * 2**20
"""Largest message, in bytes, that is sent or received: a view of a job with very many ranks is large."""
OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),  # an HTTP proxy must not be used for loopback
    *KEEPALIVE,
    FRESH_NAMES,
    ("grpc.max_reconnect_backoff_ms", 2_000),
)


@dataclass(frozen=True, slots=True)
class Connection:
    """A connection to a coordinator, opened by the first call."""

    address: str
    """HOST:PORT, or several, separated by commas."""
    metadata: tuple[tuple[str, str], ...]
    """Sent with every call."""
    channel: grpc.Channel


def connect(address: str | None, token: str | None, tls: str | None) -> Connection:
    """The connection to the coordinator at HOST:PORT with a token and a folder of certificates. None takes the value of
    the environment or the context (`elche context`); "" means none. Raises `ElcheError`.
    """
    place = checked_address(contexts.address() if address is None else address)
    text = contexts.token_of(place) if token is None else token
    folder = contexts.tls_of(place) if tls is None else tls
    return Connection(place, call_metadata(checked(text.strip(), "token")), open_channel(place, folder, OPTIONS))


def checked_address(address: str) -> str:
    """Returns one or several addresses. Raises `BadAddress` for an invalid one, or one to which nobody can connect."""
    for one in split_addresses(address):
        if split_address(one)[1] == 0:
            raise BadAddress(f"{one!r} is not HOST:PORT, such as {DEFAULT_ADDRESS}: port 0 is none to connect to")
    return address

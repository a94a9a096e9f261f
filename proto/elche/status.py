"""The table of errors and gRPC status codes, used in both directions."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from elche.errors import (
    ElcheError,
    Forbidden,
    HostAway,
    InvalidJob,
    NotAllowed,
    TooMuch,
    UnknownJob,
    Unreachable,
    WrongVersion,
)
from elche.tls import AUTHORITY, VARIABLE

CODES: dict[type[ElcheError], grpc.StatusCode] = {
    InvalidJob: grpc.StatusCode.INVALID_ARGUMENT,
    HostAway: grpc.StatusCode.ABORTED,
    UnknownJob: grpc.StatusCode.NOT_FOUND,
    NotAllowed: grpc.StatusCode.UNAUTHENTICATED,
    Forbidden: grpc.StatusCode.PERMISSION_DENIED,
    TooMuch: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Unreachable: grpc.StatusCode.UNAVAILABLE,
    WrongVersion: grpc.StatusCode.UNIMPLEMENTED,
}
UNKNOWN_METHOD = "Method not found!"
"""gRPC's details for a call that the server does not know."""
HINTS = {
    "Hostname Verification": "its certificate is for other names: connect to one of them, or make one that has this "
    "name, with `elche certs server`",
    "WRONG_VERSION_NUMBER": f"what listens there does not speak TLS: unset {VARIABLE}, or start it with --tls",
    "Tls handshake failed": "its certificate is expired, or of another authority than that of "
    f"the {AUTHORITY} in the folder that {VARIABLE} names",
    "Socket closed": f"if it asks for TLS, set {VARIABLE} to a folder with its {AUTHORITY}, and with a certificate "
    "that has not expired if it asks for those of clients (`elche doctor` shows it)",
}
"""Remedies by parts of gRPC's details for a connection that failed; the first match counts."""
UNRESOLVED = "address lookup failed"
"""Part of gRPC's details if the name cannot be resolved."""
SILENT = "nothing comes back from there: its host is off, or packets are lost on the way (`elche doctor` shows it)"
REASONS = {
    "Connection refused": "nothing listens there; start `elche-coordinator`, or name another address",
    "Connection timed out": SILENT,
    "ping timeout": SILENT,
    "Network is unreachable": "this host has no way to it (`elche doctor` shows it)",
    "No route to host": "this host has no way to it, or a firewall refuses (`elche doctor` shows it)",
    UNRESOLVED: "this host name cannot be resolved",
    "http1.x server": "an HTTP server listens there, such as the coordinator's page; name the port of --listen (7717)",
}
"""Meanings of gRPC's details, by a part of them that needs no further detail."""
ERRORS = {code: error for error, code in CODES.items()}


class answering:  # noqa: N801 - used as a function
    """Server side: an `ElcheError` in the body ends the call with its status code. Other exceptions pass through.

    No generator of contextlib: on Python 3.12 its frame and the error keep each other, and with them the request of the
    refused call, until the collector looks.
    """

    def __init__(self, context: "grpc.aio.ServicerContext[Any, Any]") -> None:
        self._context = context

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, ElcheError):
            return
        code, text = CODES.get(type(error), grpc.StatusCode.FAILED_PRECONDITION), str(error)
        del error, trace
        await self._context.abort(code, text)


@contextmanager
def calling(address: str) -> Iterator[None]:
    """Client side: a failed call in the body raises the matching `ElcheError`."""
    try:
        yield
    except grpc.RpcError as error:
        raise from_rpc(error, address) from error


NOT_CONNECTED = "failed to connect"
"""Part of gRPC's details if there is no connection."""
BROKEN = "Stream removed"
"""Begins gRPC's details if the connection broke in the middle of a call."""


def from_rpc(error: grpc.RpcError, address: str) -> ElcheError:
    """The error for a failed call to the coordinator at `address`."""
    code = error.code() if hasattr(error, "code") else grpc.StatusCode.UNKNOWN
    details = (error.details() if hasattr(error, "details") else "") or code.name
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        known = explained(details)
        if details.startswith(BROKEN):
            why = known if known != details else f"is it still there? ({details})"
            return Unreachable(f"the connection to the coordinator at {address} broke: {why}")
        why = known if known != details else f"is `elche-coordinator` running there? ({details})"
        return Unreachable(f"no coordinator answers at {address}: {why}")
    if code is grpc.StatusCode.UNIMPLEMENTED and details == UNKNOWN_METHOD:
        details = f"the coordinator at {address} does not know this call: it is older than this program; upgrade it"
    raised = ElcheError.__new__(ERRORS.get(code, ElcheError))
    raised.args = (details,)
    return raised


def was_never_sent(error: grpc.RpcError) -> bool:
    """True if a call failed before it was sent, since there was no connection, so that repeating it is safe."""
    return NOT_CONNECTED in (error.details() or "")


def is_unresolved(error: grpc.RpcError) -> bool:
    """True if a call failed since the coordinator's name cannot be resolved."""
    return UNRESOLVED in (error.details() or "")


def explained(details: str) -> str:
    """Why a connection failed, in plain words where these gRPC details are known; else the details."""
    if known := next((text for sign, text in REASONS.items() if sign in details), ""):
        return known
    if NOT_CONNECTED not in details:  # a connection that is lost later has the details of `HINTS`, too
        return details
    return next((f"{text} ({details})" for sign, text in HINTS.items() if sign in details), details)

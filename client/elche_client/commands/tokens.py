"""Makes, lists and revokes the tokens of a coordinator."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Self

import grpc

from elche.mapping import from_message
from elche.status import calling
from elche.token import Role
from elche.v1 import access_pb2 as pb
from elche.v1.access_pb2_grpc import AccessServiceStub
from elche_client.client import CALL_TIMEOUT_S, Request, Response
from elche_client.transport.connection import connect


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A token, without its text."""

    id: str
    name: str
    role: Role
    made_at: datetime
    expires_at: datetime | None
    """None: it does not expire."""
    made_by: str
    """Name of the token that made it; empty: the coordinator's own token."""


class Tokens:
    """The tokens of the coordinator at `address`; arguments and errors are those of `Client`. It needs the role of an
    operator.
    """

    def __init__(self, address: str | None = None, *, token: str | None = None, tls: str | None = None) -> None:
        connection = connect(address, token, tls)
        self.address, self._metadata, self._channel = connection.address, connection.metadata, connection.channel
        self._stub = AccessServiceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._channel.close()

    def make(self, name: str, role: Role, *, expires: timedelta | None) -> tuple[Token, str]:
        """A new token, and its text, which the coordinator does not store. Jobs submitted with it belong to `name`.

        Raises `InvalidJob` for an invalid name or time, and if the coordinator requires no token.
        """
        seconds = 0.0 if expires is None else expires.total_seconds()
        request = pb.MakeTokenRequest(name=name, role=pb.Role.Value(f"ROLE_{role.upper()}"), expires_s=seconds)
        made = self._ask(self._stub.MakeToken, request)
        return _token(made.token), made.text

    def all(self) -> list[Token]:
        """The tokens that have not been revoked, oldest first."""
        return [_token(one) for one in self._ask(self._stub.ListTokens, pb.ListTokensRequest()).tokens]

    def revoke(self, token_id: str) -> Token:
        """Revokes the token, and ends its open streams. Raises `InvalidJob` for an unknown id."""
        return _token(self._ask(self._stub.RevokeToken, pb.RevokeTokenRequest(id=token_id)).token)

    def _ask(self, call: "grpc.UnaryUnaryMultiCallable[Request, Response]", request: Request) -> Response:
        with calling(self.address):
            return call(request, timeout=CALL_TIMEOUT_S, metadata=self._metadata)


def _token(message: pb.Token) -> Token:
    return from_message(
        message,
        Token,
        role=Role(pb.Role.Name(message.role).removeprefix("ROLE_").lower()),
        made_at=datetime.fromtimestamp(message.made_at, UTC),
        expires_at=datetime.fromtimestamp(message.expires_at, UTC) if message.expires_at else None,
    )

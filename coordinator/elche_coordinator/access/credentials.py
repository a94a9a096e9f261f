"""Identifies who calls, by gRPC or from the page: the one place at which tokens and certificates are checked."""

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from math import isfinite

from elche.errors import NotAllowed
from elche.token import BEARER, HOW, is_bearer
from elche_coordinator.access.encryption import caller_of
from elche_coordinator.access.tokens import Grant, IssuedTokens
from elche_coordinator.roles import Caller

LOOK_EVERY_S = 10.0
"""Seconds between two looks at whether the token of an open call has expired."""


class Credentials:
    """Identifies callers by the coordinator's own token, one made with `elche token`, or a certificate.

    If neither an own token nor certificates are required, the coordinator listens on loopback only, and any caller may
    do everything.
    """

    def __init__(self, own: str, tokens: IssuedTokens, *, asks_certificates: bool = False) -> None:
        self._own = own
        self._tokens = tokens
        self.are_needed = bool(own) or asks_certificates
        """True if callers must present a token or certificate."""

    def find(self, authorization: str, uris: Iterable[bytes] = ()) -> tuple[Caller, Grant | None]:
        """The caller that presents this header or a certificate with these names, and the grant of a made token.
        A token counts more than a certificate. Raises `NotAllowed`.
        """
        if not self.are_needed or (self._own and is_bearer(authorization, self._own)):
            return Caller(), None
        if not authorization and (caller := caller_of(uris)) is not None:
            return caller, None
        grant = self._tokens.find(authorization.removeprefix(BEARER))
        if grant is None:
            what = "the token is wrong, expired or revoked" if authorization else "no token was given"
            raise NotAllowed(f"{what}: {HOW}")
        return grant.token.caller, grant

    async def ended(self, grant: Grant) -> None:
        """Returns once the token has expired or is revoked. Looks at the clock now and then, since it may be set."""
        while not grant.revoked.is_set() and (left_s := self._tokens.left_s(grant)) > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, LOOK_EVERY_S) if isfinite(left_s) else None):
                    await grant.revoked.wait()
        if not grant.revoked.is_set():
            self._tokens.tell_end(grant)

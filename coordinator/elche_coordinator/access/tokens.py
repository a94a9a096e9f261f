"""Tokens with roles: made, listed and revoked while the coordinator runs, and kept as hashes in its database."""

import asyncio
import hashlib
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from elche.errors import InvalidJob
from elche.token import Role
from elche_coordinator.roles import TokenRecord
from elche_coordinator.storage.sql.store import SqlStore

log = logging.getLogger(__name__)

PREFIX = "elche_"
"""Prefix of tokens, by which scanners for secrets find them."""
MAX_TOKENS = 10_000
"""Most tokens that are valid at once."""
MAX_NAME = 64
"""Longest name of a token, in characters."""
MAX_NAME_BYTES = 128
"""The same in UTF-8: `MAX_TOKENS`, each with its name and its maker's, must fit the message that lists them."""


@dataclass(slots=True)
class Grant:
    """A token that a call has presented, for the duration of the call."""

    token: TokenRecord
    revoked: asyncio.Event = field(default_factory=asyncio.Event)
    is_end_told: bool = False
    """True if the log has said that it has expired."""


class IssuedTokens:
    """The tokens of a coordinator. Its methods are called on one thread, since they wait for the disk."""

    def __init__(self, store: SqlStore, now: Callable[[], float] = time.time) -> None:
        self._store = store
        self._now = now
        self._grants = {one.hash: Grant(one) for one in store.load_tokens()}

    def make(self, name: str, role: Role, *, expires_s: float, made_by: str) -> tuple[TokenRecord, str]:
        """Returns a new token, and its text, which is not stored. Raises `InvalidJob` for a name that is not one
        printable word, and when there are `MAX_TOKENS`. `expires_s` is from now; 0: never.
        """
        if not name or len(name) > MAX_NAME or not name.isprintable() or any(c.isspace() or c in "@/" for c in name):
            raise InvalidJob(
                f"{name[:MAX_NAME]!r} is not a name for a token: one word of up to {MAX_NAME} letters without @ or /"
            )
        if (num_bytes := len(name.encode())) > MAX_NAME_BYTES:
            raise InvalidJob(f"{name!r} is too long for a token: it has {num_bytes} bytes, of at most {MAX_NAME_BYTES}")
        if len(self._grants) >= MAX_TOKENS:
            raise InvalidJob(f"there are {MAX_TOKENS} tokens: revoke some first")
        text, made_at = PREFIX + secrets.token_urlsafe(32), self._now()
        expires_at = made_at + expires_s if expires_s else 0.0
        token = TokenRecord(
            id=secrets.token_hex(4),
            hash=_hash(text),
            name=name,
            role=role,
            made_at=made_at,
            expires_at=expires_at,
            # a certificate has names of any length
            made_by=made_by.encode()[:MAX_NAME_BYTES].decode(errors="ignore"),
        )
        # Durable first: a token that works must work after a restart, too.
        self._store.add_token(token)
        self._grants[token.hash] = Grant(token)
        return token, text

    def all(self) -> list[TokenRecord]:
        """Tokens that were not revoked, oldest first."""
        return [grant.token for grant in self._grants.values()]

    def revoke(self, token_id: str) -> TokenRecord:
        """Removes a token; streams that were opened with it end. Raises `InvalidJob` for an unknown id."""
        for grant in self._grants.values():
            if grant.token.id == token_id:
                break
        else:
            raise InvalidJob(f"no token has the id {token_id!r}; `elche token list` shows them")
        # Durable first: a token that is said to be revoked must not be good again after a restart.
        self._store.remove_token(token_id)
        del self._grants[grant.token.hash]
        grant.revoked.set()
        return grant.token

    def find(self, text: str) -> Grant | None:
        """The grant of a token by its text; None for one that is unknown, revoked or expired."""
        grant = self._grants.get(_hash(text))
        return None if grant is None or self.left_s(grant) <= 0 else grant

    def left_s(self, grant: Grant) -> float:
        """Seconds until the token expires; infinite if it does not."""
        return grant.token.expires_at - self._now() if grant.token.expires_at else float("inf")

    def tell_end(self, grant: Grant) -> None:
        """Says once in the log that the token has expired, by which clock: all workers that have it exit."""
        if not grant.is_end_told:
            grant.is_end_told = True
            log.warning(
                "the token %s (%s) has expired, by this machine's clock at %s: what was opened with it ends",
                *(grant.token.name, grant.token.id, datetime.fromtimestamp(grant.token.expires_at, UTC)),
            )


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()

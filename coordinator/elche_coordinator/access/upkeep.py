"""Things that run out unless somebody acts: room on the coordinator's disk, its certificates, and tokens."""

import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509

from elche.tls import AUTHORITY, CERTIFICATE
from elche_coordinator.access.encryption import Encryption
from elche_coordinator.access.tokens import IssuedTokens

FORGOTTEN_S = 24 * 3600.0
"""Seconds after its end for which a token or certificate is exported, so that an alert outlasts a night."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """The time for which a token or certificate is valid, in Unix time."""

    kind: str
    """"token" or "certificate"."""
    name: str
    role: str = ""
    made_at: float
    ends_at: float


@dataclass(slots=True)
class Upkeep:
    """Looks after a coordinator's data folder, tokens and certificates."""

    data: Path
    tokens: IssuedTokens
    encryption: Encryption | None = None
    _read: tuple[tuple[bytes, bytes], list[Term]] = field(default=((b"", b""), []), init=False)
    """Certificates, and their terms."""

    def disk(self) -> tuple[int, int] | None:
        """Free bytes and all bytes of the disk with the data folder; None if it cannot be asked. May wait for it."""
        with suppress(OSError):
            usage = shutil.disk_usage(self.data)
            return usage.free, usage.total
        return None

    def terms(self, now_s: float) -> list[Term]:
        """Those that end, or ended within `FORGOTTEN_S`: certificates, and of each holder's tokens the last to end."""
        found = [*self._certificates(), *self._tokens()]
        return [one for one in found if one.ends_at > now_s - FORGOTTEN_S]

    def _tokens(self) -> Iterator[Term]:
        """The last to end of each name and role; none for a holder with one that does not end."""
        last: dict[tuple[str, str], Term | None] = {}
        for one in self.tokens.all():
            holder = one.name, str(one.role)
            known = last.get(holder, Term(kind="", name="", made_at=0, ends_at=0))
            if not one.expires_at or known is None:
                last[holder] = None
            elif one.expires_at > known.ends_at:
                name, role = holder
                last[holder] = Term(kind="token", name=name, role=role, made_at=one.made_at, ends_at=one.expires_at)
        yield from filter(None, last.values())

    def _certificates(self) -> list[Term]:
        if self.encryption is None:
            return []
        held = self.encryption.held
        if self._read[0] != (held.certificate, held.authority):
            named = ((CERTIFICATE, held.certificate), (AUTHORITY, held.authority))
            self._read = (held.certificate, held.authority), [_term(name, pem) for name, pem in named if pem]
        return self._read[1]


def _term(name: str, pem: bytes) -> Term:
    """The term of a file's certificate; of several authorities, as while one replaces another, the longest."""
    found = x509.load_pem_x509_certificates(pem)
    first = max(found, key=lambda one: one.not_valid_after_utc) if name == AUTHORITY else found[0]
    made_at, ends_at = first.not_valid_before_utc.timestamp(), first.not_valid_after_utc.timestamp()
    return Term(kind="certificate", name=name, made_at=made_at, ends_at=ends_at)

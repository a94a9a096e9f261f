"""TLS between elche's programs: a folder with certificates, under the names that Kubernetes gives them.

`ca.crt` is the authority for others' certificates, `tls.crt` and `tls.key` are the program's own. Files may be replaced
at any time; programs read them again when they have changed.
"""

import logging
import os
import ssl
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from elche.errors import ElcheError
from elche.folders import without_waiting

VARIABLE = "ELCHE_TLS"
"""Environment variable that names the folder for clients, workers and the coordinator."""
AUTHORITY, CERTIFICATE, KEY = "ca.crt", "tls.crt", "tls.key"
SCHEME = "elche"
MAX_BYTES = 1 << 20
WRITTEN_S, LOOK_S = 2.0, 0.05
"""Seconds within which a certificate and its key are replaced, and between looks meanwhile."""

log = logging.getLogger(__name__)


def named_folder() -> str:
    """The folder named by the environment; empty: no TLS."""
    return os.environ.get(VARIABLE, "")


def client_context(authority: str | Path | None) -> ssl.SSLContext:
    """Settings of a connection to a server with a certificate of this authority; None: of those that the system has."""
    context = ssl.create_default_context(cafile=authority)
    # Python 3.13 refuses authorities without key identifiers, which everybody else takes: those of many Kubernetes
    # clusters, and those that `elche certs` made before it wrote them.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


class BadCertificate(ElcheError):
    """A folder lacks a certificate or key, or has an unusable one."""


class _Unpaired(BadCertificate):
    """Certificate and key do not belong together, as between the replacement of the one and the other."""


@dataclass(frozen=True, slots=True)
class Certificates:
    """A folder's contents as PEM; empty for a missing file."""

    authority: bytes = b""
    certificate: bytes = b""
    key: bytes = b""


class Folder:
    """A folder of certificates."""

    def __init__(self, path: Path | str, *, needs: tuple[str, ...]) -> None:
        """`needs`: the required files. Raises `BadCertificate`."""
        self.path = Path(path).expanduser()
        self._needs = needs
        self._stamp = self._look()
        self.held = self._read_pair()
        """The last usable contents."""

    def renew(self) -> bool:
        """Reads changed files; returns True if that changed `held`. Unusable files cause a warning and no change."""
        if (stamp := self._look()) == self._stamp:
            return False
        try:
            found = self._read()
        except BadCertificate as error:
            log.warning("%s; what was read before stays in use", error)
            self._stamp = stamp
            return False
        if self._look() != stamp:
            return False  # it is being written: the next call reads it
        self._stamp, is_new = stamp, found != self.held
        self.held = found
        return is_new

    def _look(self) -> tuple[tuple[int, ...], ...]:
        """A fingerprint that changes with any file."""
        return tuple(_stamp(self.path / name) for name in (AUTHORITY, CERTIFICATE, KEY))

    def _read_pair(self) -> Certificates:
        """As `_read`, but waits for the second of two files of which the first has just been replaced."""
        until_s = time.monotonic() + WRITTEN_S
        while True:
            try:
                return self._read()
            except _Unpaired:
                if time.monotonic() > until_s:
                    raise
            time.sleep(LOOK_S)
            self._stamp = self._look()

    def _read(self) -> Certificates:
        found = Certificates(*(self._content(name) for name in (AUTHORITY, CERTIFICATE, KEY)))
        if bool(found.certificate) != bool(found.key):
            raise _Unpaired(f"{self.path} has only one of {CERTIFICATE} and {KEY}, which belong together")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            name = f"{CERTIFICATE} with {KEY}"
            if found.certificate:
                context.load_cert_chain(self.path / CERTIFICATE, self.path / KEY, password="")
            name = AUTHORITY
            if found.authority:
                context.load_verify_locations(self.path / AUTHORITY)
        except (OSError, ValueError) as error:  # SSLError is an OSError
            is_unpaired = getattr(error, "reason", "") == "KEY_VALUES_MISMATCH"
            kind = _Unpaired if is_unpaired else BadCertificate
            raise kind(f"{self.path / name} cannot be used: {error}") from None
        return found

    def _content(self, name: str) -> bytes:
        path = self.path / name
        try:
            with open(path, "rb", opener=without_waiting) as file:
                content = file.read(MAX_BYTES)
        except FileNotFoundError:
            if name not in self._needs:
                return b""
            raise BadCertificate(f"{path} is not there; `elche certs` makes such folders") from None
        except OSError as error:
            raise BadCertificate(f"{path} cannot be read: {error.strerror}") from None
        if name in self._needs and not content:
            raise BadCertificate(f"{path} is empty; `elche certs` makes such folders")
        return content


def _stamp(path: Path) -> tuple[int, ...]:
    try:
        found = path.stat()
    except OSError:
        return ()
    return (found.st_ino, found.st_mtime_ns, found.st_size)


def identity_uri(role: str, name: str) -> str:
    """The URI in a client's certificate with its name and role (protocol P1.11)."""
    return f"{SCHEME}://{role}/{quote(name, safe='')}"


def identity(uri: str) -> tuple[str, str] | None:
    """Role and name of such a URI; None for another one."""
    try:
        parts = urlsplit(uri)
    except ValueError:
        return None
    name = unquote(parts.path.removeprefix("/"))
    return (parts.netloc, name) if parts.scheme == SCHEME and name else None

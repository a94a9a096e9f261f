"""A private certificate authority in a folder, and the certificates that it signs for coordinators, agents and people.

Each holder has a subfolder with all that it needs: `tls.crt`, `tls.key` and `ca.crt`. The authority's key is in none.
"""

import ipaddress
import os
import re
import secrets
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from elche.tls import AUTHORITY, CERTIFICATE, KEY, BadCertificate, identity, identity_uri
from elche_client.display.notices import print_notice

AUTHORITY_KEY = "ca.key"
AUTHORITY_LIFE = timedelta(days=3650)
SKEW = timedelta(minutes=5)
"""Allowed difference of clocks: certificates are valid from so long before they are made."""
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
"""Names in each server's certificate, for commands on its host and tunnels to it."""
MAX_NAME = 64
"""Most characters of a common name (X.520)."""
_HOST = re.compile(r"(\*\.)?[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?")

NOT_READABLE = (ValueError, x509.InvalidVersion, x509.DuplicateExtension, x509.UnsupportedGeneralNameType)
"""Errors that reading the parts of a damaged certificate raises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """One certificate, and its folder."""

    folder: Path
    names: tuple[str, ...]
    """A server's host names and addresses, or a client's name."""
    role: str
    """A client's role; empty for a server."""
    expires_at: datetime


class Authority:
    """The authority in a folder, created with the first certificate."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def server(self, names: list[str], *, expires: timedelta) -> Holder:
        """A certificate for a coordinator that is reached by these host names and addresses, and on its own host.

        Raises `BadCertificate` for an invalid name, or if the files cannot be read or written.
        """
        found = [_checked_host(name) for name in dict.fromkeys([*names, *LOCAL_NAMES])]
        usage = ExtendedKeyUsageOID.SERVER_AUTH
        return self._sign(names[0].replace("*", "any"), names[0], found, usage, expires)

    def client(self, name: str, role: str, *, expires: timedelta) -> Holder:
        """A certificate for an agent, a program or a person, with its name and role. Errors as for `server`."""
        if not name or len(name) > MAX_NAME or not name.isprintable() or re.search(r"[\s@/]|^\.", name):
            raise BadCertificate(
                f"{name[:MAX_NAME]!r} is not a name for a certificate: use one word of up to {MAX_NAME} letters, "
                "without @ or /"
            )
        found: list[x509.GeneralName] = [x509.UniformResourceIdentifier(identity_uri(role, name))]
        return self._sign(name, name, found, ExtendedKeyUsageOID.CLIENT_AUTH, expires)

    def all(self) -> list[Holder]:
        """The certificates in this folder, in order of their folders' names. Raises `BadCertificate`."""
        if not (self.folder / AUTHORITY).exists():
            raise BadCertificate(f"{self.folder} has no {AUTHORITY} of an authority: name its folder with --dir")
        return [_holder(path.parent, read_certificate(path)) for path in sorted(self.folder.glob(f"*/{CERTIFICATE}"))]

    def _sign(
        self, folder: str, title: str, names: list[x509.GeneralName], usage: x509.ObjectIdentifier, expires: timedelta
    ) -> Holder:
        try:
            authority, authority_key = self._own()
            signed_by = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
            key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
            made = (
                _builder(title, authority.subject, key, now + expires)
                .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
                .add_extension(x509.SubjectAlternativeName(names), critical=False)
                .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
                # Python 3.13, and whoever checks strictly (RFC 5280), refuses a certificate that does not name its
                # issuer's key.
                .add_extension(signed_by, critical=False)
                .sign(authority_key, hashes.SHA256())
            )
            place = self.folder / folder
            place.mkdir(parents=True, exist_ok=True)
            _write(place / KEY, _key_text(key), mode=0o600)
            _write(place / CERTIFICATE, made.public_bytes(serialization.Encoding.PEM))
            _write(place / AUTHORITY, authority.public_bytes(serialization.Encoding.PEM))
            return _holder(place, made)
        except OSError as error:
            raise BadCertificate(f"{error.filename} cannot be written: {error.strerror}") from error

    def _own(self) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
        """The authority's certificate and key, created if there are none."""
        path = self.folder / AUTHORITY_KEY
        if not path.exists() and not (self.folder / AUTHORITY).exists():
            self._make_own()
        try:
            key = serialization.load_pem_private_key(path.read_bytes(), password=None)
        except (OSError, ValueError, TypeError) as error:
            raise BadCertificate(f"the authority's key {path} cannot be read: {error!s:.500}") from error
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise BadCertificate(f"the authority's key {path} is of another kind than `elche certs` makes")
        certificate = read_certificate(self.folder / AUTHORITY)
        if certificate.public_key() != key.public_key():
            raise BadCertificate(f"{path} is not the key of {self.folder / AUTHORITY}")
        return certificate, key

    def _make_own(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        key, title = ec.generate_private_key(ec.SECP256R1()), f"elche authority {secrets.token_hex(4)}"
        made = (
            _builder(title, _name(title), key, datetime.now(UTC) + AUTHORITY_LIFE)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_SIGNS, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(key, hashes.SHA256())
        )
        _write(self.folder / AUTHORITY_KEY, _key_text(key), mode=0o600)
        _write(self.folder / AUTHORITY, made.public_bytes(serialization.Encoding.PEM))
        print_notice(f"{self.folder} has a new authority; programs refuse the certificates of any other")


# What the authority's key may be used for: certificates and lists of revoked ones.
_SIGNS = x509.KeyUsage(
    key_cert_sign=True,
    crl_sign=True,
    digital_signature=True,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    encipher_only=False,
    decipher_only=False,
)


def _builder(
    title: str, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, expires_at: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(_name(title))
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.now(UTC) - SKEW)
        .not_valid_after(expires_at)
    )


def _name(title: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, title[:MAX_NAME])])


def _checked_host(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        if not _HOST.fullmatch(name) or len(name) > 253:
            raise BadCertificate(
                f"{name[:253]!r} is neither a host's name, such as gpu1.lab, nor an address, such as 10.0.0.5"
            ) from None
        return x509.DNSName(name)


def _holder(folder: Path, certificate: x509.Certificate) -> Holder:
    try:
        expires_at = certificate.not_valid_after_utc
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return Holder(folder=folder, names=(), role="", expires_at=expires_at)
    except NOT_READABLE as error:
        raise BadCertificate(f"the certificate {folder / CERTIFICATE} cannot be read: {error!s:.500}") from error
    known = [one for one in map(identity, found.get_values_for_type(x509.UniformResourceIdentifier)) if one]
    if known:
        return Holder(folder=folder, names=(known[0][1],), role=known[0][0], expires_at=expires_at)
    addresses = [str(one) for one in found.get_values_for_type(x509.IPAddress)]
    names = tuple(one for one in (*found.get_values_for_type(x509.DNSName), *addresses) if one not in LOCAL_NAMES)
    return Holder(folder=folder, names=names or LOCAL_NAMES[:1], role="", expires_at=expires_at)


def read_certificate(path: Path) -> x509.Certificate:
    """Reads a certificate in PEM. Raises `BadCertificate`."""
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, *NOT_READABLE) as error:
        raise BadCertificate(f"the certificate {path} cannot be read: {error!s:.500}") from error


def _key_text(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(path: Path, content: bytes, *, mode: int = 0o644) -> None:
    """Replaces a file atomically."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    # Created with its mode, in a new file: if the mode were set later, others could open the key before.
    draft.unlink(missing_ok=True)
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
    draft.replace(path)

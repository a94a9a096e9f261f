"""Certificates of one's own authority, and folders of them that are replaced while they are read."""

import os
import ssl
import stat
import time
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from elche import tls
from elche.tls import AUTHORITY, CERTIFICATE, KEY, BadCertificate, Folder, client_context, identity, identity_uri
from elche_client.commands.certificates import AUTHORITY_KEY, Authority

DAY = timedelta(days=1)


def test_each_holder_has_a_folder_with_all_that_it_needs(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "certs")
    server = authority.server(["gpu1.lab", "10.0.0.5", "fe80::1"], expires=DAY)
    pool = authority.client("pool", "agent", expires=timedelta(hours=1))
    assert (server.names, server.role) == (("gpu1.lab", "10.0.0.5", "fe80::1"), "")
    assert (pool.names, pool.role) == (("pool",), "agent")
    assert abs(pool.expires_at - datetime.now(UTC) - timedelta(hours=1)) < timedelta(minutes=1)
    assert authority.all() == [server, pool]
    for holder in (server, pool):
        assert {path.name for path in holder.folder.iterdir()} == {AUTHORITY, CERTIFICATE, KEY}
        assert (holder.folder / AUTHORITY).read_bytes() == (tmp_path / "certs" / AUTHORITY).read_bytes()
        Folder(holder.folder, needs=(AUTHORITY, CERTIFICATE, KEY))
    for key in (tmp_path / "certs" / AUTHORITY_KEY, server.folder / KEY, pool.folder / KEY):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600


def shake_hands(server: Path, client: ssl.SSLContext) -> None:
    """Both sides of a handshake, in memory. Raises what the client has against the server's certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(server / CERTIFICATE, server / KEY)
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    asks = client.wrap_bio(down, up, server_hostname="localhost")
    answers = context.wrap_bio(up, down, server_side=True)
    for _ in range(3):
        for side in (asks, answers):
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
    assert asks.version() == "TLSv1.3"


def test_the_strictest_check_takes_a_servers_certificate(tmp_path: Path) -> None:
    """Python's own from 3.13 on, so that any client of the page's takes it."""
    folder = Authority(tmp_path).server(["gpu1.lab"], expires=DAY).folder
    strict = ssl.create_default_context(cafile=folder / AUTHORITY)
    strict.verify_flags |= ssl.VERIFY_X509_STRICT
    shake_hands(folder, strict)


def test_an_authority_without_key_identifiers_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of many Kubernetes clusters, and of what `elche certs` made before it wrote identifiers."""
    sign = x509.CertificateBuilder.add_extension

    def without(self: Any, extension: Any, critical: bool) -> Any:
        kinds = x509.SubjectKeyIdentifier, x509.AuthorityKeyIdentifier
        return self if isinstance(extension, kinds) else sign(self, extension, critical)

    monkeypatch.setattr(x509.CertificateBuilder, "add_extension", without)
    folder = Authority(tmp_path).server(["gpu1.lab"], expires=DAY).folder
    context = client_context(folder / AUTHORITY)
    assert not context.verify_flags & ssl.VERIFY_X509_STRICT
    shake_hands(folder, context)
    strict = ssl.create_default_context(cafile=folder / AUTHORITY)
    strict.verify_flags |= ssl.VERIFY_X509_STRICT
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(folder, strict)


@pytest.mark.parametrize("name", ["", "two words", "gpu1:7717", "-x", "a/b", "x" * 254, "ä.lab", "../up"])
def test_what_is_no_host_is_refused_and_makes_nothing(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadCertificate, match="is neither a host's name"):
        Authority(tmp_path / "certs").server([name], expires=DAY)
    assert not (tmp_path / "certs").exists()


@pytest.mark.parametrize("name", ["", "two words", "a/b", "anna@lab", "x" * 65, "..", ".hidden", "a\nb"])
def test_what_is_no_name_is_refused_and_makes_nothing(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadCertificate, match="is not a name for a certificate"):
        Authority(tmp_path / "certs").client(name, "user", expires=DAY)
    assert not (tmp_path / "certs").exists()


def test_a_folder_without_an_authority_is_not_listed_as_empty_and_a_new_authority_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In another folder `elche certs list` printed nothing, and `elche certs client` made a certificate of a new
    authority, which the coordinator refuses.
    """
    authority = Authority(tmp_path / "certs")
    with pytest.raises(BadCertificate, match=r"certs has no ca\.crt of an authority"):
        authority.all()
    for name in ("ada", "bob"):
        authority.client(name, "user", expires=DAY)
        assert ("certs has a new authority" in capsys.readouterr().err) == (name == "ada")
    assert len(authority.all()) == 2


def test_an_authority_without_its_key_is_not_replaced(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    authority.client("anna", "user", expires=DAY)
    before = (tmp_path / AUTHORITY).read_bytes()
    (tmp_path / AUTHORITY_KEY).unlink()
    with pytest.raises(BadCertificate, match=r"the authority's key .*ca\.key cannot be read"):
        authority.client("bob", "user", expires=DAY)
    Authority(tmp_path / "other").client("bob", "user", expires=DAY)
    (tmp_path / "other" / AUTHORITY_KEY).rename(tmp_path / AUTHORITY_KEY)
    with pytest.raises(BadCertificate, match="is not the key of"):
        authority.client("bob", "user", expires=DAY)
    assert (tmp_path / AUTHORITY).read_bytes() == before


def test_a_folder_is_read_again_when_its_files_have_changed(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    folder = Folder(authority.client("anna", "user", expires=DAY).folder, needs=(AUTHORITY,))
    first = folder.held
    assert (folder.renew(), folder.held) == (False, first)
    authority.client("anna", "user", expires=DAY)
    assert folder.renew()
    assert folder.held != first
    assert folder.held.authority == first.authority
    assert not folder.renew()


def test_half_of_a_new_pair_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    authority = Authority(tmp_path)
    path = authority.client("anna", "user", expires=DAY).folder
    folder = Folder(path, needs=(AUTHORITY,))
    first = folder.held
    other = authority.client("bob", "user", expires=DAY).folder
    (other / KEY).replace(path / KEY)
    assert (folder.renew(), folder.held) == (False, first)
    assert caplog.messages[0].endswith("what was read before stays in use")
    assert not folder.renew()
    assert len(caplog.messages) == 1, "it is said once"
    (other / CERTIFICATE).replace(path / CERTIFICATE)
    assert folder.renew()
    assert folder.held != first
    (path / KEY).unlink()
    assert not folder.renew(), "what has been read goes on without its files"


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda path: (path / AUTHORITY).unlink(), r"ca\.crt is not there; `elche certs` makes such folders"),
        (lambda path: (path / KEY).unlink(), r"has only one of tls\.crt and tls\.key"),
        (lambda path: (path / CERTIFICATE).write_text("nonsense"), r"tls\.crt with tls\.key cannot be used"),
        (lambda path: (path / AUTHORITY).write_text("nonsense"), r"ca\.crt cannot be used"),
        (lambda path: (path / KEY).unlink() or (path / KEY).mkdir(), r"tls\.key cannot be read: Is a directory"),
    ],
)
def test_a_folder_that_cannot_be_used_says_which_file(tmp_path: Path, spoil: object, why: str) -> None:
    path = Authority(tmp_path).client("anna", "user", expires=DAY).folder
    assert callable(spoil)
    spoil(path)
    with pytest.raises(BadCertificate, match=why):
        Folder(path, needs=(AUTHORITY,))


def test_a_key_with_a_password_is_refused_and_nobody_is_asked(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization

    path = Authority(tmp_path).client("anna", "user", expires=DAY).folder
    key = serialization.load_pem_private_key((path / KEY).read_bytes(), None)
    locked = serialization.BestAvailableEncryption(b"secret")
    form = serialization.PrivateFormat.PKCS8
    (path / KEY).write_bytes(key.private_bytes(serialization.Encoding.PEM, form, locked))
    with pytest.raises(BadCertificate, match=r"tls\.crt with tls\.key cannot be used"):
        Folder(path, needs=(AUTHORITY,))


def test_files_that_are_links_may_be_swapped_as_kubernetes_does(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "certs")
    place, data = tmp_path / "mounted", tmp_path / "mounted" / "..data"
    place.mkdir()
    data.symlink_to(authority.client("anna", "user", expires=DAY).folder)
    for name in (AUTHORITY, CERTIFICATE, KEY):
        (place / name).symlink_to(Path("..data") / name)
    folder = Folder(place, needs=(AUTHORITY,))
    draft = place / "..new"
    draft.symlink_to(authority.client("anna-again", "user", expires=DAY).folder)
    os.replace(draft, data)
    assert folder.renew()


@pytest.mark.parametrize(
    ("uri", "found"),
    [
        (identity_uri("user", "anna"), ("user", "anna")),
        (identity_uri("agent", "a b/ä"), ("agent", "a b/ä")),
        ("elche://user", None),
        ("elche://user/", None),
        ("spiffe://user/anna", None),
        ("elche://[", None),
        ("", None),
    ],
)
def test_an_identity_is_a_role_and_a_name(uri: str, found: tuple[str, str] | None) -> None:
    assert identity(uri) == found


def test_who_reads_between_a_certificate_and_its_key_waits_for_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that started just then ended, and its job failed."""
    authority = Authority(tmp_path / "certs")
    folder = authority.client("pool", "agent", expires=DAY).folder
    before = (folder / KEY).read_bytes()
    after = authority.client("pool", "agent", expires=DAY).folder / KEY
    newest = after.read_bytes()
    after.write_bytes(before)
    looks = []

    def sleep(_: float) -> None:
        looks.append(len(looks))
        if len(looks) == 3:
            after.write_bytes(newest)

    monkeypatch.setattr(time, "sleep", sleep)
    found = Folder(folder, needs=(AUTHORITY, CERTIFICATE, KEY))
    assert (found.held.key, len(looks), found.renew()) == (newest, 3, False)


def test_a_key_of_another_certificate_is_refused_in_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = Authority(tmp_path / "certs")
    folder = authority.client("pool", "agent", expires=DAY).folder
    (folder / KEY).write_bytes((authority.client("anna", "user", expires=DAY).folder / KEY).read_bytes())
    monkeypatch.setattr(tls, "WRITTEN_S", 0.2)
    with pytest.raises(BadCertificate, match=r"tls.crt with tls.key cannot be used: .*key values mismatch"):
        Folder(folder, needs=(AUTHORITY, CERTIFICATE, KEY))

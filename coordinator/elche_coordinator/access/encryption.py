"""TLS of the coordinator: certificates of its gRPC server and page, renewed while they run."""

import asyncio
import ssl
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import grpc

from elche.tls import AUTHORITY, CERTIFICATE, KEY, Certificates, Folder, identity
from elche.token import Role
from elche_coordinator.roles import Caller

RENEW_EVERY_S = 5.0
"""Seconds between the page's looks for new files; the gRPC server looks at each new connection."""


class Encryption:
    """The certificates of a coordinator. Raises `BadCertificate` for an incomplete folder."""

    def __init__(self, path: Path, *, asks_clients: bool) -> None:
        """`asks_clients`: True if gRPC clients must present a certificate of the authority in the folder."""
        self.asks_clients = asks_clients
        needs = (CERTIFICATE, KEY, *((AUTHORITY,) if asks_clients else ()))
        self._of_server, self._of_page = Folder(path, needs=needs), Folder(path, needs=needs)

    def server_credentials(self) -> grpc.ServerCredentials:
        """Credentials for gRPC. Each connection gets the certificate that is in the folder when it begins."""

        def renewed() -> grpc.ServerCertificateConfiguration | None:
            """None while nothing has changed. gRPC frees what it had for one that is given, also while another
            connection that begins is about to use it, which ends the process (grpc/grpc#36693).
            """
            return self._configuration() if self._of_server.renew() else None

        credentials: grpc.ServerCredentials = grpc.dynamic_ssl_server_credentials(
            self._configuration(),
            renewed,  # type: ignore[arg-type]  # the stubs do not know of None
            require_client_authentication=self.asks_clients,
        )
        return credentials

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        held = self._of_server.held
        return grpc.ssl_server_certificate_configuration(
            [(held.key, held.certificate)], root_certificates=held.authority if self.asks_clients else None
        )

    @property
    def held(self) -> Certificates:
        """The certificates that the page's next visitor is shown."""
        return self._of_page.held

    @property
    def page_files(self) -> tuple[Path, Path]:
        """Paths of the certificate and key."""
        return self._of_page.path / CERTIFICATE, self._of_page.path / KEY

    async def renew(self, page: ssl.SSLContext) -> None:
        """Reloads the page's certificate when the folder's changes, until it is cancelled."""
        while True:
            await asyncio.sleep(RENEW_EVERY_S)
            if self._of_page.renew():
                with suppress(OSError):  # it was just checked, and is being replaced again
                    page.load_cert_chain(*self.page_files)


def caller_of(uris: Iterable[bytes]) -> Caller | None:
    """The caller that a client's certificate names; None if it names no known role."""
    for uri in uris:
        found = identity(uri.decode("utf-8", "replace"))
        if found is not None and found[0] in set(Role):
            return Caller(found[1], Role(found[0]))
    return None

"""A way between two processes that breaks when a test says so."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class Cutter:
    """Forwards connections to an address, and cuts the one under way after so many bytes, once for each."""

    def __init__(self, address: str, cut_after: list[int]) -> None:
        host, _, port = address.rpartition(":")
        self._to = (host, int(port))
        self._cut_after = cut_after
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self.num_cuts = self.num_uploaded = 0
        self.swallows = False
        """True while what comes is taken and not passed on, as for a stopped process, or a host behind a proxy."""
        self.swallows_from_bytes: int | None = None
        """Swallows what is as long as this, and all that follows, as where large packets are lost."""
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._server.close()

    def cut(self) -> None:
        """Cuts all connections that are under way."""
        while self._open:
            with suppress(OSError):
                self._open.pop().shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                inner, _ = self._server.accept()
                outer = socket.create_connection(self._to)
                self._open += [inner, outer]
                threading.Thread(target=self._forward, args=(inner, outer, True), daemon=True).start()
                threading.Thread(target=self._forward, args=(outer, inner, False), daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket, is_upload: bool) -> None:
        num_bytes = 0
        with suppress(OSError):
            while data := source.recv(1 << 16):
                num_bytes += len(data)
                self.num_uploaded += len(data) * is_upload
                if self.swallows_from_bytes is not None and len(data) >= self.swallows_from_bytes:
                    self.swallows = True
                if not self.swallows:
                    target.sendall(data)
                if is_upload and self._cut_after and num_bytes > self._cut_after[0]:
                    self._cut_after.pop(0)
                    self.num_cuts += 1
                    break
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


@contextmanager
def cutting(address: str, *cut_after: int) -> Iterator[Cutter]:
    cutter = Cutter(address, list(cut_after))
    yield cutter
    cutter.close()

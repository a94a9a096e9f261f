"""Channels to a coordinator: plain, or with TLS and certificates that may be renewed while the channel is used."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from elche import tls
from elche.network import CHANNEL_OPTIONS

Options = Sequence[tuple[str, int]]


def open_channel(address: str, folder: str, options: Options = CHANNEL_OPTIONS) -> grpc.Channel:
    """A channel to HOST:PORT with bounded messages: over TLS with the certificates of a folder, or plain without one.

    Raises `BadCertificate`.
    """
    if not folder:
        return grpc.insecure_channel(address, options=options)
    return _Renewed(address, tls.Folder(folder, needs=(tls.AUTHORITY,)), options)


class _Renewed(grpc.Channel):
    """A channel of which each call uses the certificates that are in the folder when it begins.

    gRPC reads them once per channel. So a new channel is opened when they have changed. Calls that are under way stay
    on the former one, whose connection gRPC closes when it has been idle for 30 minutes.
    """

    def __init__(self, address: str, folder: tls.Folder, options: Options) -> None:
        self._address = address
        self._folder = folder
        self._options = options
        self._lock = threading.Lock()
        self._opened = [self._new()]
        """The last is the present one."""

    def _new(self) -> grpc.Channel:
        held = self._folder.held
        credentials = grpc.ssl_channel_credentials(held.authority, held.key or None, held.certificate or None)
        return grpc.secure_channel(self._address, credentials, options=self._options)

    def _present(self) -> grpc.Channel:
        with self._lock:
            if self._folder.renew():
                self._opened.append(self._new())
            return self._opened[-1]

    def unary_unary(self, method: str, *args: Any, **more: Any) -> Any:
        return _Method(lambda: self._present().unary_unary(method, *args, **more))

    def unary_stream(self, method: str, *args: Any, **more: Any) -> Any:
        return _Method(lambda: self._present().unary_stream(method, *args, **more))

    def stream_unary(self, method: str, *args: Any, **more: Any) -> Any:
        return _Method(lambda: self._present().stream_unary(method, *args, **more))

    def stream_stream(self, method: str, *args: Any, **more: Any) -> Any:
        return _Method(lambda: self._present().stream_stream(method, *args, **more))

    def subscribe(self, callback: Any, try_to_connect: bool = False) -> None:
        self._present().subscribe(callback, try_to_connect)

    def unsubscribe(self, callback: Any) -> None:
        self._present().unsubscribe(callback)

    def close(self) -> None:
        for channel in self._opened:
            channel.close()

    def __enter__(self) -> "_Renewed":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Method:
    """A method of a stub, on the channel that is there when it is called."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def __call__(self, *args: Any, **more: Any) -> Any:
        return self._make()(*args, **more)

    def with_call(self, *args: Any, **more: Any) -> Any:
        return self._make().with_call(*args, **more)

    def future(self, *args: Any, **more: Any) -> Any:
        return self._make().future(*args, **more)

"""Channels to a coordinator: plain, or with TLS and certificates that may be renewed meanwhile, and to the leader of
several coordinators.
"""

import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from ipaddress import ip_address
from typing import Any

import grpc

from elche import tls
from elche.network import CHANNEL_OPTIONS, split_address, split_addresses
from elche.status import is_unresolved, was_never_sent

Options = Sequence[tuple[str, int]]
NOBODY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
HEALTH = "/grpc.health.v1.Health/Check"

CHOOSE_S = 5.0
"""Seconds for one of several coordinators to answer."""
OWN = (
    ("grpc.client_idle_timeout_ms", 30 * 60_000),  # connections without calls are closed after half an hour
    ("grpc.use_local_subchannel_pool", 1),  # else a new channel shares the reconnection backoff of older ones
)


def open_channel(address: str, folder: str, options: Options = CHANNEL_OPTIONS) -> grpc.Channel:
    """A channel to HOST:PORT with bounded messages: over TLS with the certificates of a folder, or plain without one.

    With several addresses, separated by commas, calls go to the one that serves: standbys do not listen. Raises
    `BadCertificate` and `BadAddress`.
    """
    addresses = split_addresses(address)
    if not folder and len(addresses) == 1 and not _is_name(addresses[0]):
        return grpc.insecure_channel(address, options=options)
    held = tls.Folder(folder, needs=(tls.AUTHORITY,)) if folder else None
    return _Renewed(addresses, held, (*options, *OWN))


class _Renewed(grpc.Channel):
    """A channel on which each call uses the certificates in the folder, and the leading coordinator, as of its
    beginning.

    A gRPC channel reads certificates once and has one address. So a new channel is opened when the certificates have
    changed, or when the connection is lost and there are other addresses, or one with a name. Open calls stay on the
    old one.
    """

    def __init__(self, addresses: Sequence[str], folder: tls.Folder | None, options: Options) -> None:
        self._addresses = addresses
        self._folder = folder
        self._options = options
        self._lock = threading.Lock()
        self._opened: list[grpc.Channel] = []
        """Opened channels; the last is the present one."""
        self._lost: set[grpc.Channel] = set()
        """Channels on which a call could not connect."""

    def _new(self, address: str) -> grpc.Channel:
        if self._folder is None:
            return grpc.insecure_channel(address, options=self._options)
        held = self._folder.held
        credentials = grpc.ssl_channel_credentials(held.authority, held.key or None, held.certificate or None)
        return grpc.secure_channel(address, credentials, options=self._options)

    def present(self) -> grpc.Channel:
        """The channel for a call that begins now. If it must be opened and there are several addresses, waits up to
        `CHOOSE_S` for the first answer.
        """
        with self._lock:
            has_changed = self._folder is not None and self._folder.renew()
            if not self._opened or has_changed or self._opened[-1] in self._lost:
                # The last one stays open for calls that are under way on it, until its successor is replaced, too.
                while len(self._opened) > 1 and self._opened[0] in self._lost:
                    self._lost.discard(self._opened[0])
                    self._opened.pop(0).close()
                self._opened.append(self._new(self._addresses[0]) if len(self._addresses) == 1 else self._first())
            return self._opened[-1]

    def note(self, channel: grpc.Channel, call: Any) -> None:
        """Records how a call on the channel has ended."""
        is_lost = call.code() in NOBODY and len(self._addresses) > 1
        # A name that cannot be resolved for a while is looked up again after up to two minutes, and until then the old
        # address is tried: ranks that came back too late for that were given up. A new channel looks it up at once.
        if is_lost or (_is_name(self._addresses[0]) and (was_never_sent(call) or is_unresolved(call))):
            self._lost.add(channel)

    def _first(self) -> grpc.Channel:
        """A channel to the first coordinator that answers; if none does, to the first of all, whose error is shown."""
        answers: queue.SimpleQueue[tuple[grpc.Channel, bool]] = queue.SimpleQueue()
        channels = [self._new(address) for address in self._addresses]
        for channel in channels:
            asked = channel.unary_unary(HEALTH, _as_it_is, _as_it_is).future(b"", timeout=CHOOSE_S)
            asked.add_done_callback(partial(_put_answer, answers, channel))
        chosen = channels[0]
        for _ in channels:
            channel, is_there = answers.get()
            if is_there:
                chosen = channel
                break
        for channel in channels:
            if channel is not chosen:
                channel.close()
        return chosen

    def unary_unary(self, method: str, *args: Any, **more: Any) -> Any:
        return _Method(self, lambda channel: channel.unary_unary(method, *args, **more))

    def unary_stream(self, method: str, *args: Any, **more: Any) -> Any:
        return _Method(self, lambda channel: channel.unary_stream(method, *args, **more))

    def stream_unary(self, method: str, *args: Any, **more: Any) -> Any:
        return _Method(self, lambda channel: channel.stream_unary(method, *args, **more))

    def stream_stream(self, method: str, *args: Any, **more: Any) -> Any:
        return _Method(self, lambda channel: channel.stream_stream(method, *args, **more))

    def subscribe(self, callback: Any, try_to_connect: bool = False) -> None:
        self.present().subscribe(callback, try_to_connect)

    def unsubscribe(self, callback: Any) -> None:
        self.present().unsubscribe(callback)

    def close(self) -> None:
        with self._lock:
            for channel in self._opened:
                channel.close()

    def __enter__(self) -> "_Renewed":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _is_name(address: str) -> bool:
    """True if the host is named, and not an IP address."""
    try:
        ip_address(split_address(address)[0])
    except ValueError:
        return True
    return False


def _as_it_is(message: bytes) -> bytes:
    return message


def _put_answer(answers: "queue.SimpleQueue[tuple[grpc.Channel, bool]]", channel: grpc.Channel, call: Any) -> None:
    """Treats any answer, even a refusal, as a sign that the coordinator is there."""
    answers.put((channel, not call.cancelled() and call.code() not in NOBODY))


class _Method:
    """A method of a stub, on the channel that is present when it is called."""

    def __init__(self, owner: _Renewed, make: Callable[[grpc.Channel], Any]) -> None:
        self._owner = owner
        self._make = make

    def __call__(self, *args: Any, **more: Any) -> Any:
        return self._call(lambda method: method(*args, **more))

    def with_call(self, *args: Any, **more: Any) -> Any:
        return self._call(lambda method: method.with_call(*args, **more))

    def _call(self, call: Callable[[Any], Any]) -> Any:
        """Makes a call, again on another channel if it was never sent."""
        channel = self._owner.present()
        try:
            return self._noted(channel, call(self._make(channel)))
        except grpc.RpcError as error:
            self._owner.note(channel, error)
            if (other := self._owner.present()) is channel or not was_never_sent(error):
                raise
            return call(self._make(other))

    def future(self, *args: Any, **more: Any) -> Any:
        channel = self._owner.present()
        return self._noted(channel, self._make(channel).future(*args, **more))

    def _noted(self, channel: grpc.Channel, answer: Any) -> Any:
        """Returns the answer; has the end of a streaming call recorded."""
        if isinstance(answer, grpc.Future):
            answer.add_done_callback(lambda call: self._owner.note(channel, call))
        return answer

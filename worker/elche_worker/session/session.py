"""The rank's end of its stream with the coordinator: a thread reads commands, a queue holds messages to send."""

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import grpc

from elche.errors import ElcheError, UnknownMessage
from elche.formatting import shortened
from elche.network import MAX_MESSAGE_BYTES
from elche.output import notice
from elche.v1 import rank_pb2, rank_pb2_grpc
from elche_worker.session.outbound import LOG_EVERY_S, MAX_RETRY_S, RETRY_S, Outbound, Pending, soon

MAX_TEXT_CHARS = 32_768
"""Most characters of an error or traceback that is sent."""


TAKEN_POLL_S = 0.01
"""Seconds between two looks whether a stream is open, or the coordinator has the last messages."""
MAX_WAITING_EVENTS = 1000
"""User-defined events are dropped while this many messages are not durable at the coordinator."""
FLEETING = frozenset({"batches_trained", "loop_progress", "spans", "pong"})
"""Messages that are not sent again on the next stream: outdated then, or replaced by later ones."""
NEWEST = frozenset({"batches_trained", "loop_progress"})
"""Those of `FLEETING` that report progress. The newest one is sent again on the next stream, or the coordinator would
not know of the batches that the rank has made while it was not connected.
"""
FOR_GOOD = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.INTERNAL)
"""Status codes after which another stream would get the same answer."""
Outgoing = queue.SimpleQueue[rank_pb2.ConverseRequest | None]

LOST = "the coordinator is lost: "
"""Prefix of the reason for which a session is lost because the coordinator does not know the rank any more."""

WHEN_TOO_LARGE = {
    "ready": "it contains the names of the model's tensors, the data set's shards and the checkpoint's state; "
    "give tensors shorter names, or make fewer shards",
}
"""Advice for a message that is too large, by its kind."""


def sendable(text: str) -> str:
    """Shortens a text to its beginning and end, and escapes characters that UTF-8 lacks."""
    return shortened(text, MAX_TEXT_CHARS).encode("utf-8", "backslashreplace").decode()


class Session:
    """The conversation of one incarnation with the coordinator, over one stream after the other.

    A stream may end with the network or the coordinator; the rank goes on, and another is opened. Messages that change
    the coordinator's state are numbered, and kept until they are durable (protocol P15). `on_command` and `on_lost` are
    called on the session's thread, which answers pings itself. The session is lost when the coordinator does not know
    the rank any more, or when `on_command` raises `UnknownMessage`.
    """

    def __init__(
        self,
        channel: grpc.Channel,
        secret: str,
        *,
        on_command: Callable[[rank_pb2.ConverseResponse], None],
        on_lost: Callable[[str], None],
        on_away: Callable[[], None] = lambda: None,
        store: str = "",
        pending: Pending[rank_pb2.ConverseRequest] | None = None,
    ) -> None:
        """`on_away` is called when a stream has ended and another is to be opened. `store` and `pending` continue the
        conversation of a process that has stopped.
        """
        self._secret = secret
        self._on_command = on_command
        self._on_lost = on_lost
        self._on_away = on_away
        self.last_words: Callable[[], None] | None = None
        """Called before the session is closed, to send remaining data."""
        self._outbound: Outbound[rank_pb2.ConverseRequest] = Outbound()
        self._newest: dict[str, rank_pb2.ConverseRequest] = {}
        """The newest message of each kind in `NEWEST`."""
        if pending is not None:
            self._outbound.go_on(pending)
        self.store = store
        """Id of the coordinator's store; empty before its first welcome."""
        self._away_since_s = time.monotonic()
        self._closing = threading.Event()
        self._is_leaving = False
        """Set once the session is closing; from then on the coordinator's absence is not printed."""
        self._stub = rank_pb2_grpc.RankServiceStub(channel)
        self._call: Any = None
        self._thread = threading.Thread(target=self._run, name="session", daemon=True)
        self._thread.start()

    @property
    def pending(self) -> Pending[rank_pb2.ConverseRequest]:
        """The rest of the conversation, to be sent by another process; after `close`."""
        return self._outbound.pending()

    @property
    def has_sent_all(self) -> bool:
        """True if all kept messages are durable at the coordinator."""
        return not self._outbound.num_kept

    @property
    def is_connected(self) -> bool:
        """True while a stream to the coordinator is open."""
        return self._outbound.is_open

    @property
    def away_s(self) -> float:
        """Seconds for which there has been no stream to the coordinator; 0 while one is open."""
        return 0.0 if self.is_connected else time.monotonic() - self._away_since_s

    def send(self, message: rank_pb2.ConverseRequest) -> None:
        """Queues a message. Drops an event of the user's while `MAX_WAITING_EVENTS` messages wait. Raises `ElcheError`
        for a message that is too large.
        """
        size_bytes = message.ByteSize()
        kind = message.WhichOneof("message") or "message"
        if size_bytes > MAX_MESSAGE_BYTES:
            what_to_do = WHEN_TOO_LARGE.get(kind, "record fewer scalars and metrics, with shorter names")
            raise ElcheError(
                f"the rank's message ({kind.replace('_', ' ')}) has {size_bytes} bytes, "
                f"and at most {MAX_MESSAGE_BYTES} can be sent: {what_to_do}"
            )
        if kind in NEWEST:
            self._newest[kind] = message
        if kind != "event_recorded" or self._outbound.num_kept < MAX_WAITING_EVENTS:
            self._outbound.send(message, is_kept=kind not in FLEETING)

    def report_event(self, text: str, num_dropped: int) -> None:
        """Sends a user-defined event."""
        self.send(rank_pb2.ConverseRequest(event_recorded=rank_pb2.EventRecorded(text=text, num_dropped=num_dropped)))

    def wait_until_connected(self, timeout_s: float) -> None:
        """Waits until a stream is open, after which the coordinator sees the process's end, or it is lost."""
        end_s = time.monotonic() + timeout_s
        while not self.is_connected and self._thread.is_alive() and time.monotonic() < end_s:
            time.sleep(TAKEN_POLL_S)

    def wait_until_taken(self, timeout_s: float) -> None:
        """Waits until all kept messages are durable at the coordinator, which may be away and return meanwhile."""
        self._is_leaving = True
        end_s = time.monotonic() + timeout_s
        while self._outbound.num_kept and self._thread.is_alive() and time.monotonic() < end_s:
            time.sleep(TAKEN_POLL_S)

    def close(self, timeout_s: float = 2.0) -> None:
        """Ends the conversation, and waits up to `timeout_s` until the coordinator has read it."""
        # Set first: a stream that is being opened looks at it, and ends.
        self._closing.set()
        self._outbound.close()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        retry_s, logged, logged_s = RETRY_S, "", 0.0
        while not self._closing.is_set():
            what, began_s = "is away", time.monotonic()
            try:
                reason = self._converse()
            except UnknownMessage as error:
                self._call.cancel()
                return self._on_lost(str(error))
            except grpc.RpcError as error:
                reason = error.details() or error.code().name
                if error.code() in FOR_GOOD:
                    return self._on_lost(f"{LOST}{reason}")
                if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                    what = "refuses this rank"
            finally:
                # Only where a stream was open: each failed try would otherwise count as if the coordinator had been
                # there.
                if self.is_connected:
                    self._away_since_s = time.monotonic()
                self._outbound.close()
            if self._closing.is_set():
                break
            self._on_away()
            # Another reason is told at once.
            if (what != logged or time.monotonic() - logged_s >= LOG_EVERY_S) and not self._is_leaving:
                logged, logged_s = what, time.monotonic()
                notice(f"the coordinator {what} ({reason}); this rank goes on, and tries again")
            # a stream that has lasted resets the pause
            retry_s = RETRY_S if time.monotonic() - began_s > MAX_RETRY_S else min(2 * retry_s, MAX_RETRY_S)
            self._closing.wait(soon(retry_s))
        return self._on_lost("the session is closed")

    def _converse(self) -> str:
        """Runs one stream to its end; returns why it has ended. Raises `grpc.RpcError` if it ended with an error."""
        outgoing: Outgoing = queue.SimpleQueue()
        metadata = (("elche-secret", self._secret), ("elche-heard", str(self._outbound.num_received)))
        store = (("elche-store", self.store),) if self.store else ()
        self._call = call = self._stub.Converse(self._outbound.requests(outgoing), metadata=metadata + store)
        try:
            for command in call:
                kind = command.WhichOneof("message")
                if kind == "welcome":
                    self.store = command.welcome.store
                    self._outbound.open(outgoing, command.welcome.taken)
                    # A copy: other threads send meanwhile.
                    for message in list(self._newest.values()):
                        outgoing.put(message)
                    if self._closing.is_set():  # `close` found no stream that it could end
                        self._outbound.close()
                elif kind == "taken":
                    self._outbound.forget(command.taken.seq)
                elif kind == "ping":
                    outgoing.put(rank_pb2.ConverseRequest(pong=rank_pb2.Pong()))
                elif self._outbound.is_news(command.seq):
                    self._on_command(command)
                    # Only now: a command that was not handled must be sent again on the next stream.
                    self._outbound.num_received = command.seq or self._outbound.num_received
        finally:
            # Ends gRPC's thread, which would otherwise wait for further requests of this stream forever.
            outgoing.put(None)
        return "it closed the stream"

"""The rank's end of its stream with the coordinator: a thread reads commands, a queue holds messages to send."""

import queue
import threading
from collections.abc import Callable, Iterator

import grpc

from elche.errors import ElcheError, UnknownMessage
from elche.network import CHANNEL_OPTIONS, MAX_MESSAGE_BYTES
from elche.v1 import rank_pb2, rank_pb2_grpc

MAX_TEXT_CHARS = 32_768
"""Limit of an error or traceback that is sent."""


WHEN_TOO_LARGE = {
    "ready": "it names every tensor of the model, every shard of the data set and what the checkpoint says; "
    "give tensors shorter names, or make fewer shards",
}
"""Advice for a message that is too large, by its kind."""


def sendable(text: str) -> str:
    """Shortens a text to its beginning and end, and escapes characters that UTF-8 lacks."""
    if len(text) > MAX_TEXT_CHARS:
        text = f"{text[: MAX_TEXT_CHARS // 2]}\n[...]\n{text[-MAX_TEXT_CHARS // 2 :]}"
    return text.encode("utf-8", "backslashreplace").decode()


def open_channel(address: str) -> grpc.Channel:
    """A channel to the coordinator with bounded messages."""
    return grpc.insecure_channel(address, options=CHANNEL_OPTIONS)


class Session:
    """The stream of one incarnation. `on_command` and `on_lost` are called on its thread, which answers pings itself.

    When `on_command` raises `UnknownMessage` the session is lost.
    """

    def __init__(
        self,
        channel: grpc.Channel,
        secret: str,
        *,
        on_command: Callable[[rank_pb2.ConverseResponse], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._outgoing: queue.SimpleQueue[rank_pb2.ConverseRequest | None] = queue.SimpleQueue()
        self._on_command = on_command
        self._on_lost = on_lost
        self.last_words: Callable[[], None] | None = None
        """Called before the session is closed, to send what is left."""
        stub = rank_pb2_grpc.RankServiceStub(channel)
        self._call = stub.Converse(self._requests(), metadata=(("elche-secret", secret),))
        self._thread = threading.Thread(target=self._read, name="session", daemon=True)
        self._thread.start()

    def send(self, message: rank_pb2.ConverseRequest) -> None:
        """Queues a message. Raises `ElcheError` for one that is too large."""
        size_bytes = message.ByteSize()
        if size_bytes > MAX_MESSAGE_BYTES:
            kind = message.WhichOneof("message") or "message"
            what_to_do = WHEN_TOO_LARGE.get(kind, "record fewer scalars and metrics, with shorter names")
            raise ElcheError(
                f"what the rank has to tell ({kind.replace('_', ' ')}) is {size_bytes} bytes, "
                f"and at most {MAX_MESSAGE_BYTES} can be sent: {what_to_do}"
            )
        self._outgoing.put(message)

    def tell_event(self, text: str, num_dropped: int) -> None:
        """Sends an event of the user's own."""
        self.send(rank_pb2.ConverseRequest(event_recorded=rank_pb2.EventRecorded(text=text, num_dropped=num_dropped)))

    def close(self, timeout_s: float = 2.0) -> None:
        """Ends the stream, and waits up to `timeout_s` until the coordinator has read it."""
        self._outgoing.put(None)
        self._thread.join(timeout_s)

    def _requests(self) -> Iterator[rank_pb2.ConverseRequest]:
        while (message := self._outgoing.get()) is not None:
            yield message

    def _read(self) -> None:
        try:
            for command in self._call:
                if command.HasField("ping"):
                    self._outgoing.put(rank_pb2.ConverseRequest(pong=rank_pb2.Pong()))
                else:
                    self._on_command(command)
            self._on_lost("the coordinator closed the session")
        except grpc.RpcError as error:
            self._on_lost(f"the coordinator is lost: {error.details()}")
        except UnknownMessage as error:
            self._call.cancel()  # type: ignore[no-untyped-call]
            self._on_lost(str(error))

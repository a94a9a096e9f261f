"""Messages to the coordinator, numbered, and kept until they are durable there; sent again on each new stream."""

import queue
import random
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

_chance = random.Random()
"""A generator of its own: user code gives all ranks the same seed, with which they would all pause equally long."""


def soon(pause_s: float) -> float:
    """A pause of 0.5 to 1 times `pause_s`, at random, so that clients do not all reconnect at the same time."""
    return pause_s * _chance.uniform(0.5, 1.0)


Message = TypeVar("Message", bound=Any)

RETRY_S = 0.05
"""First pause in seconds between two attempts to open a stream; doubled with each failure."""
MAX_RETRY_S = 1.0
"""Longest pause in seconds between two attempts to open a stream."""
LOG_EVERY_S = 60.0
"""Seconds between log lines that say that the coordinator is away."""


@dataclass(frozen=True, slots=True)
class Pending(Generic[Message]):
    """The rest of a conversation that one process has left, with which another process continues it."""

    num_sent: int
    num_received: int
    messages: tuple[Message, ...]
    """Those that may not be durable at the coordinator."""


class Outbound(Generic[Message]):
    """One side's messages in a conversation, and the number of those received (protocol P15). Any thread may send."""

    def __init__(self) -> None:
        self.num_received = 0
        """Number of the last message from the coordinator that was handled."""
        self._lock = threading.Lock()
        self._num_sent = 0
        self._kept: deque[Message] = deque()
        """Messages that may not be durable at the coordinator."""
        self._queue: queue.SimpleQueue[Message | None] | None = None
        """Queue of the present stream; None while there is none."""

    @property
    def is_open(self) -> bool:
        """True while a stream is open."""
        return self._queue is not None

    @property
    def num_kept(self) -> int:
        """Number of messages that may not be durable yet."""
        return len(self._kept)

    def send(self, message: Message, *, is_kept: bool = True) -> None:
        """Sends a message on the present stream; with `is_kept` also on later ones, until it is durable."""
        with self._lock:
            if is_kept:
                self._num_sent += 1
                message.seq = self._num_sent
                self._kept.append(message)
            if self._queue is not None:
                self._queue.put(message)

    def open(self, outgoing: "queue.SimpleQueue[Message | None]", taken: int) -> None:
        """Uses a new stream to a coordinator that has the first `taken` messages: first sends it the others."""
        self.forget(taken)
        # under the lock, a message sent meanwhile comes after the kept ones: numbers must rise on a stream
        with self._lock:
            for message in self._kept:
                outgoing.put(message)
            self._queue = outgoing

    def requests(self, outgoing: "queue.SimpleQueue[Message | None]") -> Iterator[Message]:
        """The messages of a stream, each with the number of the last one received, until the queue gives None."""
        while (message := outgoing.get()) is not None:
            message.num_received = self.num_received
            yield message

    def is_news(self, number: int) -> bool:
        """True if the message was not received before, on another stream. Always true for messages without a number."""
        return number == 0 or number > self.num_received

    def forget(self, taken: int) -> None:
        """Drops messages up to the number `taken`, which are durable."""
        with self._lock:
            while self._kept and self._kept[0].seq <= taken:
                self._kept.popleft()

    def close(self) -> None:
        """Closes the present stream after the messages sent so far, or drops it if it has ended."""
        with self._lock:
            if self._queue is not None:
                self._queue.put(None)
                self._queue = None

    def pending(self) -> Pending[Message]:
        """The rest of the conversation, to be sent by another process."""
        with self._lock:
            return Pending(self._num_sent, self.num_received, tuple(self._kept))

    def go_on(self, pending: Pending[Message]) -> None:
        """Continues a conversation that another process has left."""
        with self._lock:
            self._num_sent, self.num_received = pending.num_sent, pending.num_received
            self._kept = deque(pending.messages)

    def begin_anew(self) -> None:
        """Begins again with number 1 and without messages, for a coordinator that does not know this conversation."""
        with self._lock:
            self._num_sent = self.num_received = 0
            self._kept.clear()

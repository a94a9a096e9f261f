"""Messages to the coordinator, numbered and kept until they are durable there, over one stream after the other."""

import queue
import random
import threading
from collections import deque
from typing import Any, Generic, TypeVar

_chance = random.Random()
"""Not the process's own, which user code seeds."""


def soon(pause_s: float) -> float:
    """A pause of about this length, not the same for all who wait for the coordinator, in seconds."""
    return pause_s * _chance.uniform(0.5, 1.0)


Message = TypeVar("Message", bound=Any)

RETRY_S = 0.05
MAX_RETRY_S = 1.0
"""Longest pause between two attempts to open a stream again."""
SAY_EVERY_S = 60.0
"""Interval between lines that say that the coordinator is away, in seconds."""


class Outbound(Generic[Message]):
    """What one side of a conversation says, and how much it has heard (protocol P15). Any thread may send."""

    def __init__(self) -> None:
        self.num_heard = 0
        """The number of the last message from the coordinator that was acted upon."""
        self._lock = threading.Lock()
        self._num_sent = 0
        self._kept: deque[Message] = deque()
        """What the coordinator may not have durably."""
        self._queue: queue.SimpleQueue[Message | None] | None = None
        """Of the present stream; None while there is none."""

    @property
    def is_open(self) -> bool:
        """True if the coordinator is there, as far as is known."""
        return self._queue is not None

    @property
    def num_kept(self) -> int:
        """How many messages wait to be durable."""
        return len(self._kept)

    def send(self, message: Message, *, is_kept: bool = True) -> None:
        """Sends a message on the present stream. One that is kept is sent on the next ones too, until it is durable."""
        with self._lock:
            if is_kept:
                self._num_sent += 1
                message.seq = self._num_sent
                self._kept.append(message)
            if self._queue is not None:
                self._queue.put(message)

    def open(self, outgoing: "queue.SimpleQueue[Message | None]", taken: int) -> None:
        """A stream is open, and the coordinator has so many messages durably: it gets the others, then what is new."""
        self.forget(taken)
        with self._lock:
            for message in self._kept:
                outgoing.put(message)
            self._queue = outgoing

    def is_news(self, number: int) -> bool:
        """True if a message from the coordinator has not come before on another stream; unnumbered ones never have."""
        return number == 0 or number > self.num_heard

    def forget(self, taken: int) -> None:
        """Messages up to the number are durable."""
        with self._lock:
            while self._kept and self._kept[0].seq <= taken:
                self._kept.popleft()

    def close(self) -> None:
        """The present stream has ended, or is to end after what was sent."""
        with self._lock:
            if self._queue is not None:
                self._queue.put(None)
                self._queue = None

    def begin_anew(self) -> None:
        """The coordinator is another one, that knows nothing of this conversation: it begins again with number 1."""
        with self._lock:
            self._num_sent = self.num_heard = 0
            self._kept.clear()

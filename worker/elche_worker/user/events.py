"""User-defined events: short texts, shown among the job's events."""

import threading
import time
from collections.abc import Callable

MAX_CHARS = 200
"""Most characters of an event."""
BURST = 20
"""Most events at once; further ones are counted and dropped."""
PER_S = 5.0
"""Events per second on average."""


class EventSender:
    """Sends events within a rate limit. From any thread."""

    def __init__(self, send: Callable[[str, int], None], clock: Callable[[], float] = time.monotonic) -> None:
        """`send` is called with an event's text, and the number of events dropped before it."""
        self._send = send
        self._clock = clock
        self._lock = threading.Lock()
        self._budget = float(BURST)
        self._refilled_s = clock()
        self._num_dropped = 0

    def add(self, text: str) -> None:
        """Sends an event. Counts and drops those beyond `BURST` and `PER_S`; the next one sent tells their number."""
        with self._lock:
            now_s = self._clock()
            self._budget = min(BURST, self._budget + PER_S * (now_s - self._refilled_s))
            self._refilled_s = now_s
            if self._budget < 1:
                self._num_dropped += 1
                return
            self._budget -= 1
            num_dropped, self._num_dropped = self._num_dropped, 0
        self._send(one_line(text), num_dropped)


def one_line(text: str) -> str:
    """The text without line breaks and control characters, shortened to `MAX_CHARS`."""
    words = "".join(character if character.isprintable() else " " for character in text[: 4 * MAX_CHARS]).split()
    line = " ".join(words)
    return line if len(line) <= MAX_CHARS else f"{line[: MAX_CHARS - 1]}…"


_sender: EventSender | None = None


def record_event(text: str) -> None:
    """Shows a user-defined event among those of the job: on the page, in `elche watch`, and in the timeline.

    At most 200 characters; 20 at once and 5 per second, further ones are dropped and counted. Without a coordinator, as
    in `job.run()`, it does nothing.
    """
    if not isinstance(text, str):
        raise TypeError(f"record_event() takes a string, not {type(text).__name__}")
    if _sender is not None:
        _sender.add(text)


def send_events_to(send: Callable[[str, int], None]) -> None:
    """Sends this process's events to `send` from now on."""
    global _sender
    _sender = EventSender(send)

"""Events of the user's own: a few words, seen where the job's other events are, at the moment when they happen."""

import threading
import time
from collections.abc import Callable

MAX_CHARS = 200
BURST = 20
PER_S = 5.0
"""So many at once, and so many a second after that; what is beyond is counted and not sent."""


class EventSender:
    """Passes events on, no more than a job's watchers can read. From any thread."""

    def __init__(self, tell: Callable[[str, int], None], clock: Callable[[], float] = time.monotonic) -> None:
        """`tell` gets an event's text, and the number of those before it that were left out."""
        self._tell = tell
        self._clock = clock
        self._lock = threading.Lock()
        self._budget = float(BURST)
        self._refilled_s = clock()
        self._num_dropped = 0

    def add(self, text: str) -> None:
        """One more."""
        with self._lock:
            now_s = self._clock()
            self._budget = min(BURST, self._budget + PER_S * (now_s - self._refilled_s))
            self._refilled_s = now_s
            if self._budget < 1:
                self._num_dropped += 1
                return
            self._budget -= 1
            num_dropped, self._num_dropped = self._num_dropped, 0
        self._tell(one_line(text), num_dropped)


def one_line(text: str) -> str:
    """The text without line breaks and control characters, in characters that UTF-8 has, and not too long."""
    words = "".join(character if character.isprintable() else " " for character in text[: 4 * MAX_CHARS]).split()
    line = " ".join(words)
    return line if len(line) <= MAX_CHARS else f"{line[: MAX_CHARS - 1]}…"


_sender: EventSender | None = None


def record_event(text: str) -> None:
    """Shows an event of your own among those of the job: on the page, in `elche watch`, and in the timeline.

    At most 200 characters; 20 at once and 5 a second, what is beyond is counted. Where nobody watches, as in
    `job.run()`, it does nothing.
    """
    if not isinstance(text, str):
        raise TypeError(f"record_event() takes a text, not {type(text).__name__}")
    if _sender is not None:
        _sender.add(text)


def send_events_to(tell: Callable[[str, int], None]) -> None:
    """From now on events of this process are told here."""
    global _sender
    _sender = EventSender(tell)

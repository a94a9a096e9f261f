"""Events of the user's own: bounded in size and number, and harmless where nobody watches."""

import pytest

from elche_worker import record_event
from elche_worker.user.events import BURST, MAX_CHARS, PER_S, EventSender, one_line


def test_events_beyond_the_rate_are_counted_and_told_with_the_next() -> None:
    told: list[tuple[str, int]] = []
    now_s = [0.0]
    sender = EventSender(lambda text, num_dropped: told.append((text, num_dropped)), clock=lambda: now_s[0])
    for number in range(1000):
        sender.add(f"event {number}")
    assert told == [(f"event {number}", 0) for number in range(BURST)]
    now_s[0] += 1 / PER_S
    sender.add("later")
    sender.add("too soon")
    assert told[BURST:] == [("later", 1000 - BURST)]
    now_s[0] += 3600
    for number in range(1000):
        sender.add(f"event {number}")
    assert len(told) == 2 * BURST + 1, "what was not used is not saved up"
    assert told[BURST + 1] == ("event 0", 1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("loss  halved", "loss halved"),
        ("two\nlines\x1b[31m and\x00more", "two lines [31m and more"),
        ("x" * 10_000_000, "x" * (MAX_CHARS - 1) + "…"),
        ("\ud800 lone", "lone"),
        ("", ""),
    ],
)
def test_an_event_is_one_short_line(text: str, expected: str) -> None:
    assert one_line(text) == expected
    one_line(text).encode()  # in characters that UTF-8 has


def test_what_is_no_text_is_refused_and_without_a_watcher_nothing_happens() -> None:
    record_event("nobody hears it")
    with pytest.raises(TypeError, match="takes a string, not int"):
        record_event(7)  # type: ignore[arg-type]

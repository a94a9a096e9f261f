"""Memory that is free again goes back to the system, once there is much of it."""

import pytest

from elche_coordinator import heap
from elche_coordinator.heap import GROWN_BYTES, Heap, resident_bytes

SMALL = 700
"""Bytes of objects that Python asks the C library for, and that lie together in its heap."""


def test_memory_that_is_free_again_is_given_back() -> None:
    one = Heap()
    held = [bytes(SMALL) for _ in range(4 * GROWN_BYTES // SMALL)]
    at_end = held[-1]  # at the heap's end, so that the C library returns nothing by itself
    del held
    before = resident_bytes()
    one.look()
    assert before - resident_bytes() > 2 * GROWN_BYTES
    assert len(at_end) == SMALL


def test_what_becomes_free_only_after_the_process_has_grown_is_given_back() -> None:
    """400 MB of open calls stayed when these had ended, since a look in between had found nothing that is free."""
    one = Heap()
    held = [bytes(SMALL) for _ in range(4 * GROWN_BYTES // SMALL)]
    at_end = held[-1]
    one.look()
    del held
    before = resident_bytes()
    one.look()
    assert before - resident_bytes() > 2 * GROWN_BYTES
    assert len(at_end) == SMALL


def test_what_is_used_and_free_again_between_two_looks_is_given_back() -> None:
    """The C library still calls free what was given back: a second flood of calls within two seconds stayed."""
    one = Heap()
    for _ in range(2):
        held = [bytes(SMALL) for _ in range(4 * GROWN_BYTES // SMALL)]
        at_end = held[-1]
        del held
        before = resident_bytes()
        one.look()
        assert before - resident_bytes() > 2 * GROWN_BYTES
        assert len(at_end) == SMALL


def test_it_is_given_back_again_only_after_as_much_is_free_again(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, trimmed = [100, 100 + GROWN_BYTES], []
    monkeypatch.setattr(heap, "_trim", lambda: trimmed.append(sizes[-1]))
    one = Heap(lambda: sizes[-1])
    one.look()
    one.look()
    assert not trimmed
    sizes.append(100 + 2 * GROWN_BYTES)
    one.look()
    one.look()
    assert trimmed == [100 + 2 * GROWN_BYTES]
    sizes.append(0)  # is in use again
    one.look()
    sizes.append(GROWN_BYTES)
    one.look()
    assert trimmed == [100 + 2 * GROWN_BYTES, GROWN_BYTES]

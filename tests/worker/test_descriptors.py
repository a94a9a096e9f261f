"""A process notices that its file descriptors were closed."""

import os

import pytest

from elche_worker.process.descriptors import OpenDescriptor


def test_a_closed_descriptor_is_noticed_also_if_another_file_has_its_number() -> None:
    mark, other = OpenDescriptor(), os.open(os.devnull, os.O_RDONLY)
    assert not mark.was_closed
    os.close(mark._number)
    assert mark.was_closed
    os.dup2(other, mark._number)
    assert mark.was_closed
    os.close(mark._number)
    os.close(other)


def test_a_process_may_look_for_closed_descriptors_any_number_of_times() -> None:
    """Each loop that became a job left one open; it is not closed if another file has its number."""
    number = (first := OpenDescriptor())._number
    del first
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)
    second, other = OpenDescriptor(), os.open(os.devnull, os.O_RDONLY)
    number = second._number
    os.dup2(other, number)
    del second
    assert os.fstat(number).st_ino == os.fstat(other).st_ino
    os.close(number)
    os.close(other)

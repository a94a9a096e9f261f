"""A process notices that its file descriptors were closed."""

import os

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

"""What a database holds cannot run code in the coordinator that reads it."""

import os
import pickle
from functools import partial
from http import HTTPStatus
from pathlib import Path

import pytest

from elche_coordinator.core.coordinator import Coordinator
from elche_coordinator.core.messages.spec import Slot
from elche_coordinator.core.records.machine import JobPhase
from elche_coordinator.storage.unpickling import loads, sealed, unsealed


class Calls:
    """Is pickled as a call of something."""

    def __init__(self, what: object, *args: object) -> None:
        self.what, self.args = what, args

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return self.what, self.args


def test_a_slot_comes_back() -> None:
    assert loads(pickle.dumps(Slot(device="cuda:0", model="H100", memory_bytes=7))) == Slot(
        device="cuda:0", model="H100", memory_bytes=7
    )


def test_a_bit_that_a_disk_has_flipped_is_noticed() -> None:
    """It made other numbers, with which jobs went on."""
    content = sealed(pickle.dumps([1, 2, 3]))
    assert loads(unsealed(content)) == [1, 2, 3]
    for at in range(len(content)):
        damaged = bytearray(content)
        damaged[at] ^= 1
        with pytest.raises(pickle.UnpicklingError, match="it was damaged"):
            unsealed(bytes(damaged))


def test_members_of_enumerations_come_back_as_any_python_has_pickled_them() -> None:
    """A coordinator whose Python was upgraded meanwhile goes on, too."""
    by_value, by_name = Calls(JobPhase, "queued"), Calls(getattr, JobPhase, "QUEUED")
    assert loads(pickle.dumps([JobPhase.QUEUED, by_value, by_name])) == [JobPhase.QUEUED] * 3


@pytest.mark.parametrize(
    "content",
    [
        Calls(os.system, "true"),
        Calls(eval, "1"),
        partial(os.getcwd),
        Calls(getattr, os.getcwd, "__call__"),
        Calls(getattr, Coordinator, "__init__"),
        Calls(getattr, Slot(device="cpu"), "__class__"),
        Calls(getattr, JobPhase, "__members__"),
        Calls(getattr, HTTPStatus, "OK"),
        Path("/tmp"),
    ],
)
def test_other_things_are_refused(content: object) -> None:
    with pytest.raises(pickle.UnpicklingError, match="not a"):
        loads(pickle.dumps(content))


def test_what_a_module_of_elche_has_imported_is_refused() -> None:
    with pytest.raises(pickle.UnpicklingError, match="not a class"):
        loads(b"\x80\x04\x8c\x16elche_coordinator.tape\x8c\x13asyncio.sys.modules\x93.")

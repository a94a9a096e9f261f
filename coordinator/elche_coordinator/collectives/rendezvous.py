"""The rendezvous store through which the ranks of a job form process groups: one table per job."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice

from elche.errors import ElcheError, TooMuch

MAX_KEYS = 200_000
"""Most keys of one table."""
MAX_VALUE_BYTES = 1 << 20
"""Largest value of a key, appended parts included."""
MAX_BYTES = 64 << 20
"""Largest size of one table, keys and values, in bytes."""
MAX_AWAITED = 1_000_000
"""Most missing keys of all waiting calls of one table together."""
MAX_COUNT = 2**63
"""Counters are 64-bit integers."""


class NotInTime(ElcheError):
    """A key was not set in time."""


class NotACounter(ElcheError):
    """The value of a key is not a number."""


@dataclass(slots=True, eq=False)
class _Waiting:
    """A call that waits for keys."""

    missing: dict[str, None]
    """Keys that were not set yet, in the call's order."""
    done: asyncio.Event = field(default_factory=asyncio.Event)


class Rendezvous:
    """A table of keys and values, with waiting for keys. Used on the event loop only."""

    def __init__(self, hold: Callable[[int], None] = lambda num_bytes: None) -> None:
        """`hold` is called with each change of its size in bytes, and may raise `TooMuch`: then nothing changes."""
        self._hold = hold
        self._values: dict[str, bytes] = {}
        self._num_bytes = 0
        self._is_closed = False
        self._waiting: dict[str, dict[_Waiting, None]] = {}
        """Waiting calls by each missing key."""
        self._num_awaited = 0
        """Missing keys of all waiting calls together."""

    def close(self) -> None:
        """Clears the table when the job has ended. Calls that wait for a key raise `NotInTime`."""
        self._values.clear()
        self._hold(-self._num_bytes)
        self._num_bytes = 0
        self._is_closed = True
        for one in [one for waiting in self._waiting.values() for one in waiting]:
            one.done.set()

    def set(self, key: str, value: bytes) -> None:
        """Sets a key. Raises `TooMuch` when its value or the table would be too large."""
        held = self._values.get(key)
        num_bytes = self._num_bytes + len(value) - (-len(key) if held is None else len(held))
        is_full = (held is None and len(self._values) >= MAX_KEYS) or num_bytes > MAX_BYTES
        if is_full or len(value) > MAX_VALUE_BYTES:
            raise TooMuch(f"the rendezvous store cannot take {len(value)} bytes under {key!r}")
        # Before any change, since it may raise.
        self._hold(num_bytes - self._num_bytes)
        self._values[key] = value
        self._num_bytes = num_bytes
        for one in self._waiting.pop(key, ()):
            del one.missing[key]
            self._num_awaited -= 1
            if not one.missing:
                one.done.set()

    def add(self, key: str, amount: int) -> int:
        """Adds to a decimal counter, 0 when missing; returns it. Raises `NotACounter` for other values and overflow."""
        held = self._values.get(key, b"0")
        if not held.removeprefix(b"-").isdigit() or len(held) > 20:
            raise NotACounter(f"{key!r} holds no number to add to")
        value = int(held) + amount
        if not -MAX_COUNT <= value < MAX_COUNT:
            raise NotACounter(f"{key!r} holds {held.decode()}, and {amount} more is not a 64-bit number")
        self.set(key, str(value).encode())
        return value

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Sets the key if it has the expected value, or is missing and an empty one is expected. Returns its value."""
        if self._values.get(key, b"") == expected:
            self.set(key, desired)
        return self._values.get(key, expected)

    def append(self, key: str, value: bytes) -> None:
        """Adds to the end of a key's value, which is empty when it is missing. Raises `TooMuch` as `set` does."""
        self.set(key, self._values.get(key, b"") + value)

    def __len__(self) -> int:
        return len(self._values)

    def has(self, keys: Iterable[str]) -> bool:
        """True if all keys exist."""
        return all(key in self._values for key in keys)

    def delete(self, key: str) -> bool:
        """Deletes a key. Returns False if it did not exist."""
        value = self._values.pop(key, None)
        if value is not None:
            self._num_bytes -= len(key) + len(value)
            self._hold(-len(key) - len(value))
        return value is not None

    async def wait(self, keys: Iterable[str], timeout_s: float) -> None:
        """Waits until each key has been there. Raises `NotInTime` after the timeout or when the job ends, and `TooMuch`
        when too many calls wait for too many keys.
        """
        waiting = _Waiting(dict.fromkeys(key for key in keys if key not in self._values))
        if waiting.missing:
            await self._await_missing(waiting, timeout_s)

    async def _await_missing(self, waiting: "_Waiting", timeout_s: float) -> None:
        if self._is_closed:
            raise NotInTime("the job has ended")
        if self._num_awaited + len(waiting.missing) > MAX_AWAITED:
            raise TooMuch(
                f"too many calls wait for keys: they lack {self._num_awaited}, and {MAX_AWAITED} is the limit"
            )
        self._num_awaited += len(waiting.missing)
        for key in waiting.missing:
            self._waiting.setdefault(key, {})[waiting] = None
        try:
            async with asyncio.timeout(timeout_s):
                await waiting.done.wait()
        except TimeoutError:
            missing = ", ".join(islice(waiting.missing, 3))
            raise NotInTime(f"timeout after {timeout_s:g} s: nobody has set {missing}") from None
        finally:
            self._num_awaited -= len(waiting.missing)
            for key in waiting.missing:
                del self._waiting[key][waiting]
                if not self._waiting[key]:
                    del self._waiting[key]
        if self._is_closed:
            raise NotInTime("the job has ended")

    async def get(self, key: str, timeout_s: float) -> bytes:
        """Waits for a key and returns its value. Raises as `wait` does."""
        while key not in self._values:  # it may be deleted before this goes on
            await self.wait([key], timeout_s)
        return self._values[key]

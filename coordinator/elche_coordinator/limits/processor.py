"""Rate limit on the event loop's processor time: a caller that has used more than its share waits.

Counts the time of each step of a call on the event loop's thread between two awaits, without other calls' steps.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator
from typing import Any, TypeVar

from elche.errors import TooMuch
from elche_coordinator.limits.budgets import MAX_TURN_S, PROCESSOR_FRACTION, PROCESSOR_STORE_S

Result = TypeVar("Result")
STRANGERS = "\n"
"""Name under which all callers of requests without a token are charged together. No token has it."""


class Processor:
    """The loop's time used by each caller. A caller without a name, with the coordinator's own token or where none is
    needed, has no limit.
    """

    def __init__(
        self,
        *,
        now: Callable[[], float] = time.monotonic,
        used: Callable[[], float] = time.thread_time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._now, self._used, self._sleep = now, used, sleep
        self._paid_at: dict[str, float] = {}
        """Time, by `now`, at which each caller's share covers its use. Bounded by the number of tokens and
        certificates.
        """

    def wait_s(self, caller: str) -> float:
        """Seconds until the caller's next turn."""
        return max(0.0, self._paid_at.get(caller, 0.0) - self._now()) if caller else 0.0

    async def turn(self, caller: str) -> None:
        """Waits for the caller's turn to make a call. Raises `TooMuch` if that would take too long."""
        if (wait_s := self.wait_s(caller)) > MAX_TURN_S:
            raise TooMuch(
                f"your calls have used more than {PROCESSOR_FRACTION:.0%} of the coordinator's processor for a while: "
                f"make fewer, and try again in {wait_s:.0f} s"
            )
        await self.pause(caller)

    async def pause(self, caller: str) -> None:
        """Waits for the caller's turn without a limit, for the next part of an answer."""
        while (wait_s := self.wait_s(caller)) > 0:
            await self._sleep(wait_s)

    def charge(self, caller: str, used_s: float) -> None:
        """Charges the caller for `used_s` seconds."""
        now_s = self._now()
        begin_s = max(self._paid_at.get(caller, 0.0), now_s - PROCESSOR_STORE_S)
        self._paid_at[caller] = begin_s + used_s / PROCESSOR_FRACTION

    def metered(self, caller: str, awaitable: Awaitable[Result]) -> "Awaitable[Result]":
        """Wraps an awaitable, charging the caller for its steps."""
        return _Metered(self, caller, awaitable) if caller else awaitable

    async def metered_parts(self, caller: str, parts: AsyncIterator[Result]) -> AsyncGenerator[Result, None]:
        """Yields the parts of an answer, each at the caller's turn, charging the caller for making them."""
        while (part := await self.metered(caller, anext(parts, None))) is not None:
            yield part
            await self.pause(caller)

    def run(self, caller: str, step: Callable[[], Result]) -> Result:
        """Runs a step, charging the caller for it."""
        began_s = self._used()
        try:
            return step()
        finally:
            self.charge(caller, self._used() - began_s)


class _Metered(Awaitable[Result]):
    """Wraps an awaitable, and charges the caller for each step from one await to the next."""

    def __init__(self, processor: Processor, caller: str, awaitable: Awaitable[Result]) -> None:
        self._processor, self._caller, self._awaitable = processor, caller, awaitable

    def __await__(self) -> Generator[Any, Any, Result]:
        steps = self._awaitable.__await__()
        step: Callable[[], Any] = lambda: next(steps)  # noqa: E731
        while True:
            try:
                waits_for = self._processor.run(self._caller, step)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]  # that of the awaitable
            try:
                yield waits_for
                step = lambda: next(steps)  # noqa: E731
            except BaseException as error:  # it is cancelled, or ended: the awaitable is to see that
                thrown = error
                step = lambda: steps.throw(thrown)  # noqa: E731, B023

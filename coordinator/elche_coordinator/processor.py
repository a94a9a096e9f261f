"""Processor time of the event loop: each caller gets a part of it, and who has used more waits until that is paid for.

Counted is what a call does on the event loop's thread, step by step between its awaits; not what others do meanwhile.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator
from typing import Any, TypeVar

from elche.errors import TooMuch
from elche_coordinator.budgets import MAX_TURN_S, PROCESSOR_FRACTION, PROCESSOR_STORE_S

Result = TypeVar("Result")
STRANGERS = "\n"
"""Those who need no token for what they ask, all together. No token has this name."""


class Processor:
    """How much of the loop's time each caller has used. A caller without a name has no limit: who has the coordinator's
    own token, or needs none.
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
        """When each caller will have paid for what they have used, by `now`. There are no more callers than tokens and
        certificates.
        """

    def wait_s(self, caller: str) -> float:
        """How long the caller has to wait for its next turn."""
        return max(0.0, self._paid_at.get(caller, 0.0) - self._now()) if caller else 0.0

    async def turn(self, caller: str) -> None:
        """Waits for the caller's turn to make a call. Raises `TooMuch` when that is far."""
        if (wait_s := self.wait_s(caller)) > MAX_TURN_S:
            raise TooMuch(
                f"your calls have used more than {PROCESSOR_FRACTION:.0%} of the coordinator's processor for a while: "
                f"make fewer, and try again in {wait_s:.0f} s"
            )
        await self.pause(caller)

    async def pause(self, caller: str) -> None:
        """Waits for the caller's turn, however far it is: for the next part of an answer that has begun."""
        while (wait_s := self.wait_s(caller)) > 0:
            await self._sleep(wait_s)

    def charge(self, caller: str, used_s: float) -> None:
        """The caller has used so much."""
        now_s = self._now()
        begin_s = max(self._paid_at.get(caller, 0.0), now_s - PROCESSOR_STORE_S)
        self._paid_at[caller] = begin_s + used_s / PROCESSOR_FRACTION

    def metered(self, caller: str, awaitable: Awaitable[Result]) -> "Awaitable[Result]":
        """The awaitable, whose steps the caller is charged for."""
        return _Metered(self, caller, awaitable) if caller else awaitable

    async def metered_parts(self, caller: str, parts: AsyncIterator[Result]) -> AsyncGenerator[Result, None]:
        """The parts of an answer, each when it is the caller's turn, who is charged for its making."""
        while (part := await self.metered(caller, anext(parts, None))) is not None:
            yield part
            await self.pause(caller)

    def run(self, caller: str, step: Callable[[], Result]) -> Result:
        """What the step returns or raises; the caller is charged for it."""
        began_s = self._used()
        try:
            return step()
        finally:
            self.charge(caller, self._used() - began_s)


class _Metered(Awaitable[Result]):
    """Awaits what it is given, and charges the caller for each step from one await to the next."""

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

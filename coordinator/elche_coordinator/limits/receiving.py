"""Requests that are being received: gRPC holds what has come of each, up to 4 MiB, and says nothing of it until it has
all. A caller who never finished 500 of them took 2 GB.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from weakref import WeakValueDictionary

from elche.errors import Unreachable


class Receiving:
    """Lets some requests of each caller be received at once. The others wait, with up to 512 KiB each."""

    def __init__(self, of_caller: int, receive_s: float) -> None:
        """`receive_s`: seconds for which a request may be on its way."""
        self._of_caller, self._receive_s = of_caller, receive_s
        self._rooms: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    @asynccontextmanager
    async def turn(self, caller: str) -> AsyncIterator[None]:
        """Context in which a request is received, once fewer than `of_caller` of its caller's are; a caller "" does not
        wait. Raises `Unreachable` if receiving takes longer than `receive_s`; time spent waiting does not count.
        """
        async with self._rooms.setdefault(caller, asyncio.Semaphore(self._of_caller)) if caller else nullcontext():
            try:
                async with asyncio.timeout(self._receive_s):
                    yield
            except TimeoutError:
                raise Unreachable(f"the request has not come within {self._receive_s:g} s") from None

"""Downloads of models by a browser, through links that work once because the browser sends no token."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import ExitStack, aclosing
from urllib.parse import quote

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from elche_coordinator.limits.budgets import MAX_FILE_CALLS, MAX_FILE_CALLS_OF_CALLER, Budget

LINK_S = 30.0
"""Seconds for which a link is valid."""
MAX_LINKS = 64
"""Most links that are valid at once; a further one is refused."""
MAX_LINKS_OF_CALLER = 8
"""Of these, those of one caller."""


class Download:
    """A file whose first chunk has arrived."""

    def __init__(
        self, file_name: str, chunks: AsyncIterator[bytes], first: bytes, counted: ExitStack | None = None
    ) -> None:
        """`counted` is closed with the download."""
        self.file_name = file_name
        self._counted = counted or ExitStack()
        self._chunks = chunks
        self._first = first

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self._first
        async for chunk in self._chunks:
            yield chunk

    async def close(self) -> None:
        """Cancels the rest; the delivering host learns it with its next chunk."""
        with self._counted:
            async with aclosing(self._chunks):  # type: ignore[type-var]  # it is a generator
                pass


class DownloadResponse(StreamingResponse):
    """Streams a download, and closes it when the browser disconnects."""

    def __init__(self, download: Download) -> None:
        name = quote(download.file_name)
        headers = {"content-disposition": f"attachment; filename*=UTF-8''{name}"}
        super().__init__(aiter(download), media_type="application/octet-stream", headers=headers)
        self._download = download

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._download.close()


class Downloads:
    """Downloads of models, and links to downloads that have not been followed yet."""

    def __init__(self) -> None:
        self._waiting: dict[str, Download] = {}
        """Downloads by the names of their links."""
        self._links = Budget("downloads that have not been started", MAX_LINKS_OF_CALLER, MAX_LINKS)
        self._models = Budget("models that are sent", MAX_FILE_CALLS_OF_CALLER, MAX_FILE_CALLS)
        self._counted: dict[str, ExitStack] = {}
        """The entry of each link in `_links`, by name; closing it frees the place."""

    async def begin(self, chunks: AsyncGenerator[bytes], file_name: str, caller: str) -> Download:
        """Waits for the first chunk. Raises `ElcheError` when the host cannot deliver, and `TooMuch` when too many
        models are sent: each takes some MB, also if nobody reads it.
        """
        # Before the link is made: the page then shows the error of a host that is gone, where a followed link would
        # leave a broken file. Why a link: a page's script can send the token, but holds the whole model in memory.
        with ExitStack() as counted:
            counted.enter_context(self._models.taking(caller))
            return Download(file_name, chunks, await anext(chunks, b""), counted.pop_all())

    def link(self, download: Download, caller: str) -> str:
        """A new link: a path that works once, for `LINK_S`. Raises `TooMuch` when too many links are open."""
        counted = ExitStack()
        counted.enter_context(self._links.taking(caller))
        name = secrets.token_urlsafe(32)
        self._waiting[name], self._counted[name] = download, counted
        asyncio.get_running_loop().call_later(LINK_S, self._expire, name)
        return f"/download/{name}"

    def take(self, name: str) -> Download | None:
        """The download of a link; None when it has been followed or has expired."""
        if name in self._counted:
            self._counted.pop(name).close()
        return self._waiting.pop(name, None)

    def _expire(self, name: str) -> None:
        download = self.take(name)
        if download is not None:
            asyncio.get_running_loop().create_task(download.close())

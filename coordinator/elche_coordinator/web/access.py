"""Access to the page: by the token where there is one, else from this machine alone."""

import asyncio
from collections.abc import Awaitable
from contextlib import ExitStack

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from elche.errors import Forbidden, NotAllowed, TooMuch
from elche.network import is_loopback, split_host
from elche.token import Role
from elche_coordinator.access.audit import UNCHANGED, Audit
from elche_coordinator.access.credentials import Credentials
from elche_coordinator.access.tokens import Grant
from elche_coordinator.limits.budgets import MAX_REQUESTS, MAX_REQUESTS_OF_CALLER, Budget
from elche_coordinator.limits.processor import STRANGERS, Processor
from elche_coordinator.roles import CALLER, HAS_CHANGED

OPEN_PATHS = frozenset({"/healthz", "/readyz", "/"})
"""Paths that need no token: their answers do not depend on any job."""
OPEN_FOLDERS = ("/static/", "/download/")
"""Folders that need no token: the page's own files, and download links, which cannot be guessed and work once."""
LET_IN = "elche.let_in"
"""Key in the scope of an authorised request."""
SECURITY_HEADERS = (
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
        b"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),
)


class AccessControl:
    """ASGI middleware that checks each request. With a token, all but the page's own files require one whose role
    allows the request. Without one, the coordinator listens on loopback and answers only requests whose Host header
    names loopback, which protects against DNS rebinding. Requests that change something must be JSON, which protects
    against cross-site forms, and are noted in the audit log.
    """

    def __init__(
        self, app: ASGIApp, credentials: Credentials, audit: Audit, *, processor: Processor | None = None
    ) -> None:
        self._app = app
        self._credentials = credentials
        self._audit = audit
        self._budget = Budget("requests to the page", MAX_REQUESTS_OF_CALLER, MAX_REQUESTS)
        self._processor = processor or Processor()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        send, grant = _hardened(send), None
        try:
            refusal = _invalid_request(scope)
            if refusal is None:
                grant = self._let_in(scope)
                refusal = self._refusal(scope)
        except NotAllowed as error:
            refusal = _answer(401, str(error))
        except Forbidden as error:
            self._note(scope, "refused for want of a role")
            refusal = _answer(403, str(error))
        if refusal is None and scope["method"] == "POST":
            send = self._noting(scope, send)
        answer = (refusal or self._counted)(scope, receive, send)
        await (answer if grant is None else self._until_ended(grant, answer))

    async def _counted(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers the request, or refuses it if the caller has too many open, or has used too much processor time."""
        answer: ASGIApp = self._app
        is_open, payer = _is_open(scope["path"]), _payer(scope["path"])
        with ExitStack() as stack:
            try:
                if not is_open:
                    stack.enter_context(self._budget.taking(CALLER.get().name))
                await self._processor.turn(payer)
                if not is_open:
                    scope[LET_IN] = True
            except TooMuch as error:
                answer = _answer(429, str(error))
            await self._processor.metered(payer, answer(scope, receive, self._paced(payer, send)))

    def _paced(self, payer: str, send: Send) -> Send:
        async def paced(message: Message) -> None:
            await send(message)
            if message.get("more_body"):
                await self._processor.pause(payer)

        return paced

    def _let_in(self, scope: Scope) -> Grant | None:
        """Authorises the request; returns the grant of a made token. Raises `NotAllowed` or `Forbidden`."""
        path = scope["path"]
        if _is_open(path):
            return None
        caller, grant = self._credentials.find(Headers(scope=scope).get("authorization", ""))
        CALLER.set(caller)
        caller.require(_needed(scope["method"], path), f"{scope['method']} {path}")
        return grant

    def _refusal(self, scope: Scope) -> JSONResponse | None:
        headers = Headers(scope=scope)
        if not self._credentials.are_needed and not is_loopback(split_host(headers.get("host", ""))):
            return _answer(421, "this coordinator has no token and is available as 127.0.0.1 or localhost only")
        if scope["method"] == "POST" and headers.get("content-type", "").partition(";")[0] != "application/json":
            return _answer(415, "send JSON: content-type application/json")
        return None

    async def _until_ended(self, grant: Grant, answer: Awaitable[None]) -> None:
        """Answers; ends a stream that outlasts the token."""
        answering, ending = asyncio.ensure_future(answer), asyncio.ensure_future(self._credentials.ended(grant))
        try:
            await asyncio.wait({answering, ending}, return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                answering.result()
        finally:
            ending.cancel()
            answering.cancel()
            await asyncio.wait({answering})

    def _noting(self, scope: Scope, send: Send) -> Send:
        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                status = message["status"]
                done = "done" if HAS_CHANGED.get() else UNCHANGED
                self._note(scope, done if status < 300 else f"refused: HTTP {status}")
            await send(message)

        return noting

    def _note(self, scope: Scope, outcome: str) -> None:
        path: str = scope["path"]
        *_, what, call = ("", "", *path.strip("/").split("/"))
        host, _ = scope.get("client") or ("", 0)
        self._audit.note(CALLER.get(), call, what, host, outcome)


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith(OPEN_FOLDERS)


def _payer(path: str) -> str:
    """The caller that is charged for a request's processor time; empty: none, as for the health check."""
    if path == "/healthz":
        return ""
    return STRANGERS if _is_open(path) else CALLER.get().name


def _invalid_request(scope: Scope) -> JSONResponse | None:
    """The error for a path with control characters, or for a write to a public page; else None.

    Starlette's routes would match a path that ends with a line feed, but `_needed` would not, and so ask for a lesser
    role.
    """
    if not scope["path"].isprintable():
        return _answer(404, "no such page")
    if _is_open(scope["path"]) and scope["method"] not in ("GET", "HEAD"):
        return _answer(405, "this page can only be read")
    return None


def _needed(method: str, path: str) -> Role:
    """The role that a request needs. The handler checks the job's owner."""
    if method == "POST":
        return Role.OPERATOR if path.startswith("/api/agents/") else Role.USER
    return Role.USER if path.endswith(("/model", "/journal")) else Role.VIEWER


def _answer(status: int, error: str) -> JSONResponse:
    headers = {"www-authenticate": "Bearer"} if status == 401 else None
    return JSONResponse({"error": error}, status, headers)


def _hardened(send: Send) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], *SECURITY_HEADERS]}
        await send(message)

    return send_with_headers

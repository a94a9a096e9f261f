"""Access to the page: by the token where there is one, else from this machine alone."""

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from elche.network import is_loopback, split_host
from elche.token import HOW, is_bearer

OPEN_PATHS = frozenset({"/healthz", "/"})
"""Paths that need no token: their answers do not depend on any job."""
OPEN_FOLDERS = ("/static/", "/download/")
"""Folders that need no token: the page's own files, and download links, which cannot be guessed and work once."""
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
    """ASGI middleware that checks each request. With a token, all but the page's own files require it. Without one,
    the coordinator listens on loopback and answers only requests whose Host header names loopback, which protects
    against DNS rebinding. Requests that change something must be JSON, which protects against cross-site forms.
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        refusal = self._refusal(scope)
        await (refusal or self._app)(scope, receive, _hardened(send))

    def _refusal(self, scope: Scope) -> JSONResponse | None:
        headers, path = Headers(scope=scope), scope["path"]
        if self._token:
            is_open = path in OPEN_PATHS or path.startswith(OPEN_FOLDERS)
            if not is_open and not is_bearer(headers.get("authorization", ""), self._token):
                return _answer(401, f"the token is missing or wrong: {HOW}")
        elif not is_loopback(split_host(headers.get("host", ""))):
            return _answer(421, "this coordinator has no token and is available as 127.0.0.1 or localhost only")
        if scope["method"] == "POST" and headers.get("content-type", "").partition(";")[0] != "application/json":
            return _answer(415, "send JSON: content-type application/json")
        return None


def _answer(status: int, error: str) -> JSONResponse:
    headers = {"www-authenticate": "Bearer"} if status == 401 else None
    return JSONResponse({"error": error}, status, headers)


def _hardened(send: Send) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], *SECURITY_HEADERS]}
        await send(message)

    return send_with_headers

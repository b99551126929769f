"""Decides which requests are answered, and what a browser may do with the answer.

The server listens on loopback. Any page in the same browser can send requests to it. So a request
must name a loopback host (otherwise DNS rebinding would give a foreign page the same origin) and
carry the token, first in the URL and then in a cookie. Pages show hostile text. They are escaped,
and the policy also forbids scripts, styles and requests other than the viewer's own files.
"""

import hashlib
import hmac
from urllib.parse import quote, urlencode, urlsplit

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK = ("127.0.0.1", "localhost", "::1")
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'self'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types perdure",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
TOKEN = "token"
"""The URL parameter with the token."""


def view_token(secret: bytes) -> str:
    """The token for a home's viewer. It is derived, so links stay valid across restarts."""
    return hmac.new(secret, b"view", hashlib.sha256).hexdigest()[:40]


class Guard:
    """Answers only authorized requests, and adds the security headers to every answer."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self.app = app
        self.token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # lifespan and websockets are not supported

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        request = Request(scope)
        answer = self._refusal(request) or self._welcome(request) or self._locked(request)
        await (answer or self.app)(scope, receive, marked)

    def _refusal(self, request: Request) -> Response | None:
        hosts = [value for name, value in request.headers.items() if name == "host"]
        if len(hosts) != 1 or not is_loopback(hosts[0]):
            return PlainTextResponse("use 127.0.0.1 or localhost in the URL\n", 403)
        if request.method not in ("GET", "HEAD"):
            return PlainTextResponse("the viewer is read-only\n", 405, {"Allow": "GET, HEAD"})
        return None

    def _welcome(self, request: Request) -> Response | None:
        """Set the cookie, and redirect to the same page without the token in its URL."""
        if not self._is_token(request.query_params.get(TOKEN, "")):
            return None
        rest = [
            (name, value) for name, value in request.query_params.multi_items() if name != TOKEN
        ]
        path = "/" + quote(request.url.path.lstrip("/"))  # `//host` would redirect to another host
        answer = RedirectResponse(f"{path}?{urlencode(rest)}" if rest else path, 303)
        # Lax: a link on another site, such as Temporal's web UI, can open a page but not read it.
        answer.set_cookie(
            _cookie(request), self.token, httponly=True, samesite="lax", max_age=30 * 86_400
        )
        return answer

    def _locked(self, request: Request) -> Response | None:
        if self._is_token(request.cookies.get(_cookie(request), "")):
            return None
        return PlainTextResponse("open the URL that `perdure view` printed\n", 401)

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode("utf-8", "replace"), self.token.encode())


def is_loopback(host: str) -> bool:
    """Whether a Host header names this host. Its port may be a tunnel's."""
    try:
        found = urlsplit(f"//{host}")
        return found.hostname in LOOPBACK and found.netloc == host and "@" not in host
    except ValueError:
        return False


def _cookie(request: Request) -> str:
    """The cookie's name. It has the port, because all ports of a host share cookies."""
    server = request.scope.get("server")
    return f"perdure_view_{server[1] if server else 0}"

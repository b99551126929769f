"""Persistent connections to engines: sends one POST, and passes on its answer's bytes as they arrive.

Uses aiohttp, because httpx searches all its connections at each request, which costs 18 ms per request
with 128 concurrent calls. `token_server` reads the content. A request is sent only once; the pool decides
what follows if it breaks.
"""

import asyncio
import contextlib
import io
import ssl
import urllib.request
from collections.abc import Callable, Mapping
from typing import NamedTuple

import aiohttp
import httpx
from yarl import URL

from perdure.engines.clients.hosted_requests import CONNECT_S, READ_TIMEOUT_S

KEPT_S = 4.0
"""Seconds that an idle connection is kept. uvicorn, on which engines run, closes it after five."""
ENDS_WITHIN_S = 0.2
"""Seconds in which an answer must end after `take` has returned True. Otherwise its connection is not
reused."""
MAX_TEXT = 1 << 20
"""The most bytes of an answer other than 200."""
LARGE = 1 << 20
"""Bytes from which a request is sent in parts, because aiohttp warns about a larger one in one piece."""

Take = Callable[[bytes], bool]
"""Takes the next bytes of a 200's content. Returns whether it needs no more; an exception ends the answer."""


class Answer(NamedTuple):
    """`content`: the body of an answer other than 200."""

    status: int
    headers: Mapping[str, str]
    content: bytes


class Target(NamedTuple):
    """A URL for requests, and the proxy that leads to it."""

    url: URL
    proxy: URL | None


def target(url: str) -> Target:
    """Raises: ValueError."""
    found = URL(url)
    if found.scheme not in ("http", "https") or not found.host:
        raise ValueError(f"{url!r} is not an http:// or https:// URL")
    return Target(found, _proxy(found.scheme, found.host))


def _proxy(scheme: str, host: str) -> URL | None:
    """The proxy from the environment. It is read once; aiohttp would read it at each request."""
    found = urllib.request.getproxies()
    url = found.get(scheme) or found.get("all")
    if not url or urllib.request.proxy_bypass(host):
        return None
    return URL(url if "://" in url else f"http://{url}")


class Connections:
    """Sends requests to engines over persistent connections.

    Example:
        answer = await connections.post(target(url), {"content-type": "application/json"}, body, take)
    """

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._tls: ssl.SSLContext | None = None

    async def post(self, to: Target, headers: Mapping[str, str], body: bytes, take: Take) -> Answer:
        """Raises: OSError or aiohttp.ClientError if the connection is refused, breaks or is too slow, or
        if the answer is not HTTP; ValueError if the answer is too long; and any error of `take`."""
        loop = asyncio.get_running_loop()
        async with (
            # Once aiohttp's parser has failed, aiohttp's own read timeout no longer ends the call.
            asyncio.timeout(READ_TIMEOUT_S) as silence,
            self._opened().post(
                to.url,
                data=body if len(body) < LARGE else io.BytesIO(body),
                headers={"accept-encoding": "identity", **headers},
                proxy=to.proxy,
                ssl=self._context() if to.url.scheme == "https" else True,
                allow_redirects=False,
            ) as answer,
        ):
            if answer.status != httpx.codes.OK:
                return Answer(answer.status, answer.headers, await _text(answer))
            async for data in answer.content.iter_any():
                silence.reschedule(loop.time() + READ_TIMEOUT_S)
                if take(data):
                    await _read_to_end(answer.content)
                    break
            return Answer(answer.status, answer.headers, b"")

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()

    def _opened(self) -> aiohttp.ClientSession:
        """The session. It is made at the first request, because it belongs to an event loop."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_S),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(connect=CONNECT_S),
                auto_decompress=False,
            )
        return self._session

    def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = httpx.create_ssl_context()  # SSL_CERT_FILE, or certifi's authorities
        return self._tls


async def _read_to_end(content: aiohttp.StreamReader) -> None:
    """Read the rest, so that the connection can carry the next request."""
    if content.at_eof():
        return
    with contextlib.suppress(OSError, aiohttp.ClientError):
        async with asyncio.timeout(ENDS_WITHIN_S):
            async for _ in content.iter_any():
                pass


async def _text(answer: aiohttp.ClientResponse) -> bytes:
    """Raises: ValueError."""
    text = b""
    async for data in answer.content.iter_any():
        text += data
        if len(text) > MAX_TEXT:
            raise ValueError(f"HTTP {answer.status} with more than {MAX_TEXT} bytes")
    return text

"""HTTP to an inference server; for a hosted API, one POST that is repeated for a bounded time.

While an engine restarts, agents see a slow answer instead of an error. Owns which failures are
transient; each engine's client owns the request and reads the answer.
"""

import asyncio
import json
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar
from urllib.parse import urlsplit

import httpx

from perdure import tracing
from perdure.dialects.base import Refused
from perdure.errors import Boundary, GatewayUnavailable

PATIENCE_S = 120.0
"""Seconds for which one turn repeats a request to an engine that cannot be reached."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0
CONNECT_S = 5.0
READ_TIMEOUT_S = 900.0
"""Seconds for a long completion under load; agents' own clients give up after 600 to 900 s."""
TRANSIENT = {408, 409, 425, 429, 500, 502, 503, 504, 529}
KEY_REFUSED = {401, 403}
TOO_LONG = ("context length", "context_length_exceeded", "too long", "maximum model length")
"""Phrases by which servers report that the prompt is too long; the last is vLLM's token endpoint."""
NO_QUOTA = ("insufficient_quota", "exceeded your current quota", "credit balance is too low")
SECRET = re.compile(r"[\w*.-]{20,}")
"""What may be a key, or a part of one, in the answer of a server that refused it."""
UNREADABLE = (
    *(KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError),
    *(RecursionError, Refused),
)
"""What reading an answer of an unexpected shape raises."""
Read = Callable[[dict[str, Any]], dict[str, Any]]
"""Turns a server's answer into a chat completion. Raises: one of UNREADABLE."""


def engine_name(kind: str, url: str) -> str:
    """`vllm 10.0.0.7:8000`: recorded with each turn; without credentials or paths."""
    parts = urlsplit(url)
    return f"{kind} {parts.hostname}{f':{parts.port}' if parts.port else ''}"


def new_client() -> httpx.AsyncClient:
    timeout = httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_S, pool=None)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
    return httpx.AsyncClient(timeout=timeout, limits=limits)


class HostedApi(ABC):
    """One hosted API that answers a whole chat completion as JSON."""

    kind: ClassVar[str]

    def __init__(
        self,
        base_url: str,
        model: str,
        client: httpx.AsyncClient,
        *,
        api_key: str,
        key_source: str,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """`base_url` with or without `/v1`. `key_source`: the variable that the key came from. An error
        names it and never shows the key."""
        root = base_url.rstrip("/")
        self._root = root if urlsplit(root).path else f"{root}/v1"
        self.model = model
        self._client = client
        self._headers = {"content-type": "application/json", **self._headers_of(api_key)}
        self._key_source = key_source
        self._patience_s = patience_s
        self.name = engine_name(self.kind, base_url)

    @abstractmethod
    def _headers_of(self, api_key: str) -> dict[str, str]: ...

    async def _post(self, path: str, body: Mapping[str, Any], read: Read) -> dict[str, Any]:
        """What `read` makes of the JSON object of a 200; if it cannot read it, the request is repeated.

        Raises: GatewayUnavailable after `patience_s` without a usable answer; Refused at once if the
        server says that the request or our key is wrong.
        """
        content = json.dumps(body, separators=(",", ":")).encode()
        deadline = time.monotonic() + self._patience_s
        pause = FIRST_PAUSE_S
        while True:
            try:
                return await self._once(path, content, read)
            except GatewayUnavailable as failure:
                wait = min(max(failure.retry_after or 0.0, pause), LONGEST_PAUSE_S)
                if time.monotonic() + wait > deadline:
                    raise
            await asyncio.sleep(wait)
            pause = min(pause * 2, LONGEST_PAUSE_S)

    async def _once(self, path: str, content: bytes, read: Read) -> dict[str, Any]:
        try:
            response = await self._client.post(
                self._root + path, content=content, headers=self._headers | tracing.carrier()
            )
        except httpx.TransportError as error:
            raise self._unavailable(f"{type(error).__name__} {error}".strip()) from None
        no_quota = response.status_code in TRANSIENT and says_no_quota(response.text)
        if response.status_code in TRANSIENT and not no_quota:
            raise self._unavailable(
                f"HTTP {response.status_code} {excerpt(response.text)}",
                retry_after(response.headers),
            )
        if response.status_code != httpx.codes.OK:
            raise refusal(self.name, response.status_code, response.text, self._key_source)
        try:
            value = json.loads(response.content)
        except ValueError:
            raise self._unavailable(f"not JSON: {excerpt(response.text)}") from None
        if not isinstance(value, dict):
            raise self._unavailable("an answer that is no JSON object")
        try:
            return read(value)
        except UNREADABLE as error:
            raise self._unavailable(f"a malformed answer: {error!r}") from error

    def _unavailable(self, problem: str, retry_after: float | None = None) -> GatewayUnavailable:
        return GatewayUnavailable(
            f"the engine {self.name} gave nothing usable: {problem}",
            retry_after=retry_after,
            boundary=Boundary.ENGINE,
        )


def refusal(name: str, status: int, text: str, key_source: str = "") -> Refused:
    """What a permanent error of a server means for the caller: its own sentence, and the fix."""
    key = f"the key in {key_source}" if key_source else "the engine's key"
    said = f"the engine {name} answered {status}: {sentence(text)}"
    if says_no_quota(text) or status == httpx.codes.PAYMENT_REQUIRED:
        return Refused(403, "engine_quota", f"{said}. Add credit to the account of {key}")
    if status in KEY_REFUSED:
        said = f"the engine {name} answered {status}: {SECRET.sub('…', sentence(text))}"
        return Refused(403, "engine_refused_key", f"{said}. Check {key}")
    if status == httpx.codes.NOT_FOUND:
        said += ". Name a model that it serves with --model or PERDURE_ENGINE__MODEL"
    code = "context_length_exceeded" if _too_long(text) else "engine_refused"
    return Refused(400, code, said)


def says_no_quota(text: str) -> bool:
    """An account without money; hosted APIs also send 429 for it, and waiting does not cure it."""
    return any(said in text[:5000].lower() for said in NO_QUOTA)


def sentence(text: str) -> str:
    """The message of an error answer, without the JSON around it."""
    try:
        told = json.loads(text)
    except ValueError:
        return excerpt(text)
    for name in ("error", "message", "detail"):
        if isinstance(told, dict) and name in told:
            told = told[name]
    return excerpt(told if isinstance(told, str) else text).rstrip(".")


def excerpt(text: str) -> str:
    return " ".join(text[:500].split())


def _too_long(text: str) -> bool:
    return any(said in text[:5000] for said in TOO_LONG)


def retry_after(headers: Mapping[str, str]) -> float | None:
    try:
        return float(headers.get("retry-after", ""))
    except ValueError:
        return None

"""HTTP to inference servers. A POST to a hosted API is repeated for a bounded time.

While an engine restarts or refuses, agents see a slow answer instead of an error. `engine_errors`
interprets errors; each engine's client makes the request and reads the answer.
"""

import asyncio
import contextlib
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar
from urllib.parse import urlsplit

import httpx

from perdure import tracing
from perdure.dialects.base import Refused
from perdure.engines.api_allowance import ApiAllowance, ApiUsage
from perdure.engines.base import ChatAnswer, Wait
from perdure.engines.clients.engine_errors import (
    content_refusal,
    excerpt,
    is_transient,
    lacks_credit,
    trouble,
)
from perdure.engines.clients.rate_limit_headers import reset_in_s
from perdure.engines.hosted_sampling import check_hosted_sampling
from perdure.engines.quota_resets import utc_minute
from perdure.engines.waiting_calls import Waits
from perdure.errors import (
    Boundary,
    CallsRefused,
    ConfigurationError,
    GatewayUnavailable,
    QuotaExhausted,
)
from perdure.retry import ASK_AGAIN_S
from perdure.types import Sampling

PATIENCE_S = 120.0
"""Seconds for which one turn repeats a request to an engine that gives no usable answer."""
FIRST_PATIENCE_S = 20.0
"""The same while an API has refused every call of this process, so that a wrong key or model is soon
reported."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0
CONNECT_S = 5.0
BYTES_PER_TOKEN = 4
"""Estimates a prompt's tokens until the answer says how many it had."""
PARK_AFTER_S = 300.0
"""Default of `engine.park_after_s`."""
READ_TIMEOUT_S = 900.0
"""Seconds for a long completion under load. Agents' own clients give up after 600 to 900 s."""
UNREADABLE = (
    *(KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError),
    *(RecursionError, Refused),
)
"""Exceptions from reading an answer of an unexpected form."""
Read = Callable[[dict[str, Any]], dict[str, Any]]
"""Turns a server's answer into a chat completion. Raises: UNREADABLE."""


def engine_name(kind: str, url: str) -> str:
    """An engine's name in turns, such as `vllm 10.0.0.7:8000`. It has no credentials and no path."""
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
        park_after_s: float = PARK_AFTER_S,
        allowance: ApiAllowance | None = None,
    ) -> None:
        """`base_url`: with or without `/v1`. `key_source`: the environment variable of the key. Errors name
        it and never show the key. `park_after_s`: a call does not wait for a later reset of a quota.
        `allowance`: the limits of the account."""
        root = base_url.rstrip("/")
        self._root = root if urlsplit(root).path else f"{root}/v1"
        self.model = model
        self._client = client
        self._headers = {"content-type": "application/json", **self._headers_of(api_key)}
        self._key_source = key_source
        self._patience_s = patience_s
        self._park_after_s = park_after_s
        self._allowance = allowance
        self._refused_since: float | None = None
        """`time.monotonic()` of its first refusal since it last served a call."""
        self._has_served = False
        self._waiting = Waits()
        """Calls that have had no usable answer yet."""
        self.name = engine_name(self.kind, base_url)

    def waits(self, session_id: str) -> Wait | None:
        """Since when the session's oldest call has had no usable answer, and why."""
        return self._waiting.longest(session_id)

    def check(self, rules: Sampling) -> None:
        """Raises: Refused, which names a sampling parameter that the API does not have."""
        try:
            check_hosted_sampling(rules, self.kind, self._root)
        except ConfigurationError as error:
            raise Refused(400, "engine_refused", str(error)) from None

    @abstractmethod
    def _headers_of(self, api_key: str) -> dict[str, str]: ...

    async def _post(
        self, path: str, body: Mapping[str, Any], read: Read, *, session_id: str
    ) -> ChatAnswer:
        """Post a request, and return the result of `read` on the JSON object of a 200. After any other
        answer, the request is repeated, unless its content caused the answer.

        Raises: GatewayUnavailable after `patience_s` without a usable answer; CallsRefused sooner if
        the API has refused every call of this process; QuotaExhausted at once; Refused if the API
        refuses the request's content; StoreUnavailable if the account has limits.
        """
        content = json.dumps(body, separators=(",", ":")).encode()
        began, patience_s = time.monotonic(), self._patience_s
        pause, since = FIRST_PAUSE_S, time.time()
        with contextlib.ExitStack() as told:  # stays noted during the next try
            while True:
                expected = ApiUsage(requests=1, prompt=len(content) // BYTES_PER_TOKEN)
                patience_s += await self._within_limits(session_id, expected)
                waited_s = time.monotonic() - began
                try:
                    return ChatAnswer(await self._once(path, content, read, expected), waited_s)
                except QuotaExhausted:
                    raise
                except GatewayUnavailable as failure:
                    wait = min(max(failure.retry_after or 0.0, pause), LONGEST_PAUSE_S)
                    over = time.monotonic() + wait > began + patience_s
                    if over or self._gives_up(failure):
                        raise
                    told.close()
                    reason = Wait(since=since, reason=str(failure))
                    told.enter_context(self._waiting.noted(session_id, reason))
                await asyncio.sleep(wait)
                pause = min(pause * 2, LONGEST_PAUSE_S)

    async def _within_limits(self, session_id: str, expected: ApiUsage) -> float:
        """Wait until the account's limits allow the call. Returns the seconds of the wait.

        Raises: QuotaExhausted if the wait is longer than `park_after_s`; StoreUnavailable.
        """
        began, since = time.monotonic(), time.time()
        while self._allowance and (reached := await self._allowance.take(expected)):
            wait = reached.opens_at - time.time()
            if wait > self._park_after_s:
                raise QuotaExhausted(reached.reason, reached.opens_at)
            with self._waiting.noted(session_id, Wait(since=since, reason=reached.reason)):
                await asyncio.sleep(max(0.0, wait))
        return time.monotonic() - began

    def _gives_up(self, failure: GatewayUnavailable) -> bool:
        """Whether refusals have lasted long enough that only a user can fix the cause."""
        if self._refused_since is None or not isinstance(failure, CallsRefused):
            return False
        patience = self._patience_s if self._has_served else FIRST_PATIENCE_S
        return time.monotonic() - self._refused_since >= min(patience, self._patience_s)

    async def _once(
        self, path: str, content: bytes, read: Read, expected: ApiUsage
    ) -> dict[str, Any]:
        """One try. Without a usable answer its expected use stays deducted: it may be charged."""
        try:
            response = await self._client.post(
                self._root + path, content=content, headers=self._headers | tracing.carrier()
            )
        except httpx.TransportError as error:
            raise self._unavailable(f"{type(error).__name__} {error}".strip()) from None
        if response.status_code != httpx.codes.OK:
            self._settle(expected, ApiUsage(requests=1))
            raise self._refusal(response)
        try:
            value = json.loads(response.content)
        except ValueError:
            raise self._unavailable(f"the answer is not JSON: {excerpt(response.text)}") from None
        if not isinstance(value, dict):
            raise self._unavailable("the answer is not a JSON object")
        try:
            found = read(value)
        except UNREADABLE as error:
            raise self._unavailable(f"a malformed answer: {error!r}") from error
        self._refused_since, self._has_served = None, True
        self._settle(expected, _usage_of(found) or expected)
        return found

    def _settle(self, expected: ApiUsage, used: ApiUsage) -> None:
        if self._allowance is not None:
            self._allowance.settle(expected, used)

    def _refusal(self, response: httpx.Response) -> Exception:
        status, text = response.status_code, response.text
        if (refused := content_refusal(self.name, status, text)) is not None:
            self._refused_since, self._has_served = None, True
            return refused
        told = trouble(self.name, status, text, self._key_source)
        now = time.time()
        wait = reset_in_s(response.headers, now)
        if wait is not None and wait > self._park_after_s:
            return QuotaExhausted(
                f"the quota resets at {utc_minute(now + wait)}: {told}", now + wait
            )
        if lacks_credit(status, text):
            until = now + ASK_AGAIN_S
            asked = f"the account is asked again at {utc_minute(until)}: {told}"
            return QuotaExhausted(asked, until)
        if is_transient(status, text):
            return GatewayUnavailable(told, retry_after=wait, boundary=Boundary.ENGINE)
        self._refused_since = self._refused_since or time.monotonic()
        return CallsRefused(told, retry_after=wait)

    def _unavailable(self, problem: str, retry_after: float | None = None) -> GatewayUnavailable:
        return GatewayUnavailable(
            f"the engine {self.name} gave no usable answer: {problem}",
            retry_after=retry_after,
            boundary=Boundary.ENGINE,
        )


def _usage_of(completion: Mapping[str, Any]) -> ApiUsage | None:
    """The usage that a chat completion object reports; None if it reports none."""
    try:
        usage = completion["usage"]
        details = usage.get("prompt_tokens_details") or {}
        cached = int(details.get("cached_tokens") or 0)
        return ApiUsage(1, int(usage["prompt_tokens"]), cached, int(usage["completion_tokens"]))
    except (KeyError, TypeError, ValueError, AttributeError):
        return None

"""One POST of JSON, bounded in time and bytes. It follows no redirect and repeats nothing."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import httpx

from perdure.errors import Boundary, ConfigurationError, GiveUp, RetryHere

MOST_BYTES = 256 << 10
"""Bytes of one answer."""
LONGEST_PAUSE_S = 300.0
"""Seconds that a server's `Retry-After` may ask for."""
PASSING = (408, 425, 429)
UNREACHABLE = (401, 403, 404, 405)
"""Statuses that mean a wrong address or key, which a user must correct."""


class RewardModelRefused(GiveUp):
    """The reward model refuses this call for good. The rollout ends without a verdict."""

    boundary = Boundary.GRADER


class Answered(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes


async def post_json(
    url: str,
    content: object,
    *,
    headers: Mapping[str, str],
    timeout_s: float,
    transport: httpx.AsyncBaseTransport | None = None,
) -> Answered:
    """Raises: RetryHere without a whole answer of at most MOST_BYTES in time."""
    asked = {"accept-encoding": "identity", "content-type": "application/json", **headers}
    client = httpx.AsyncClient(timeout=None, transport=transport)
    try:
        async with asyncio.timeout(timeout_s):
            async with client:
                call = client.stream("POST", url, content=json.dumps(content), headers=asked)
                async with call as response:
                    return Answered(response.status_code, response.headers, await _read(response))
    except TimeoutError:
        raise _broken(url, f"gave no answer in {timeout_s:g} s") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise _broken(url, f"gave no answer: {error or type(error).__name__}") from error


async def _read(response: httpx.Response) -> bytes:
    body = b""
    async for chunk in response.aiter_raw():
        body += chunk
        if len(body) > MOST_BYTES:
            raise _broken(str(response.url), f"answered more than {MOST_BYTES >> 10} KiB")
    return body


def check_status(answer: Answered, who: str) -> None:
    """Raises: RetryHere; ConfigurationError for a wrong address or key; RewardModelRefused."""
    if 200 <= answer.status < 300:
        return
    said = answer.body[:300].decode("utf-8", "replace")
    problem = f"{who} answered {answer.status}: {said}"
    if answer.status >= 500 or answer.status in PASSING:
        raise RetryHere(problem, retry_after=_pause(answer.headers), boundary=Boundary.GRADER)
    if answer.status in UNREACHABLE:
        raise ConfigurationError(f"{problem}; correct its address or key")
    raise RewardModelRefused(problem)


def parse_object(body: bytes, who: str) -> Any:
    """Raises: RetryHere unless it is JSON."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise _broken(who, f"answered something that is not JSON: {error}") from error


def _pause(headers: Mapping[str, str]) -> float | None:
    """Seconds; None if the server names none, or a date."""
    named = headers.get("retry-after", "")
    return min(float(named), LONGEST_PAUSE_S) if named.isdecimal() and named.isascii() else None


def _broken(who: str, problem: str) -> RetryHere:
    return RetryHere(f"{who} {problem}"[:600], boundary=Boundary.GRADER)

"""What the token endpoints of all servers share: the request, the stream, and how it can break.

Owns the connection and its events; `vllm` and `sglang` read their content, and the pool handles a
broken stream.
"""

import asyncio
import contextlib
import json
from array import array
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

import httpx
import numpy
import orjson

from perdure import tracing
from perdure.dialects.base import Refused
from perdure.engines.clients.vllm_control import version_number
from perdure.engines.clients.wire import TRANSIENT, UNREADABLE, excerpt, refusal, retry_after
from perdure.engines.state import root_of
from perdure.types import VersionSpan

LONGEST_EVENT = 32 << 20
"""Bytes of one server-sent event, above which the stream is broken."""


ENDS_WITHIN_S = 0.2
"""Seconds in which a stream ends after its finish reason, or its connection is not used again."""


class BreakKind(StrEnum):
    """Why a stream ended without a finish reason."""

    LOST = "lost"
    """The connection, the process or the stream's format failed: check whether the engine lives."""
    BUSY = "busy"
    """It answered that it cannot serve now."""
    ABORTED = "aborted"
    """It was stopped on purpose: new weights, or a drain."""
    FENCED = "fenced"
    """Another start answers at its address, or this one was declared dead."""


class StreamBroken(Exception):
    """A stream that ended without a finish reason. Its tokens are in the salvage."""

    def __init__(self, kind: BreakKind, problem: str, retry_after: float | None = None) -> None:
        super().__init__(problem)
        self.kind = kind
        self.retry_after = retry_after


@dataclass(frozen=True)
class EngineRequest:
    """One request to one engine. `model`: the name that this start of it serves."""

    model: str
    prompt_ids: Sequence[int]
    sampling: Mapping[str, Any]
    session_id: str
    request_id: str

    def check_room(self, tokens: int) -> None:
        """Raises: ValueError if an engine returns more tokens than `max_tokens`."""
        if tokens > self.sampling.get("max_tokens", tokens):
            raise ValueError(f"{tokens} tokens of {self.sampling['max_tokens']}")


class TokenServer:
    """One server's token endpoint: its URL, its key, and what a broken connection means."""

    route: ClassVar[str]

    def __init__(
        self,
        name: str,
        url: str,
        client: httpx.AsyncClient,
        *,
        api_key: str = "",
        key_source: str = "",
    ) -> None:
        """`key_source`: the variable the key came from. An error names it and never shows the key."""
        self.name = name
        self._url = f"{root_of(url)}{self.route}"
        self._client = client
        self._key_source = key_source
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"

    @asynccontextmanager
    async def _answer(
        self, body: bytes, headers: Mapping[str, str], *, fence: str = ""
    ) -> AsyncIterator[httpx.Response]:
        """The stream of one completion. `fence`: a name that only this start of the engine serves.

        Raises: StreamBroken if it does not begin, breaks off or cannot be read; Refused.
        """
        try:
            asked = {**self._headers, **headers, **tracing.carrier()}
            async with self._client.stream(
                "POST", self._url, content=body, headers=asked
            ) as answer:
                await self._check(answer, fence)
                yield answer
        except Refused:
            raise
        except UNREADABLE as error:
            raise StreamBroken(BreakKind.LOST, f"a malformed answer: {error!r}") from error
        except httpx.RequestError as error:
            raise StreamBroken(BreakKind.LOST, f"{type(error).__name__} {error}".strip()) from None

    async def _check(self, response: httpx.Response, fence: str) -> None:
        status = response.status_code
        if status == httpx.codes.OK:
            return
        await response.aread()
        if status in TRANSIENT:
            wait = retry_after(response)
            raise StreamBroken(BreakKind.BUSY, f"HTTP {status} {excerpt(response)}", wait)
        if status == httpx.codes.NOT_FOUND and fence and fence in response.text:
            raise StreamBroken(BreakKind.FENCED, f"it no longer serves {fence}")
        raise refusal(self.name, status, response.text, self._key_source)


def body_with_ids(fields: dict[str, Any], name: str, ids: Sequence[int]) -> bytes:
    """`fields`, then the ids as field `name`.

    orjson writes the ids straight from the array's memory: 0.7 ms for 128k of them, where `json` takes
    13 ms. `json` writes the rest, because orjson refuses integers above 64 bits.
    """
    held = ids if isinstance(ids, array) else array("i", ids)
    text = orjson.dumps(numpy.asarray(held), option=orjson.OPT_SERIALIZE_NUMPY)
    head = json.dumps(fields, separators=(",", ":")).encode().removesuffix(b"}")
    return b"".join([head, b',"', name.encode(), b'":', text, b"}"])


async def read_events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events, or the one object of a plain JSON answer."""
    rest = b""
    async for data in response.aiter_bytes():
        *events, rest = (rest + data).split(b"\n\n")
        for event in filter(None, map(_object, events)):
            yield event
        if len(rest) > LONGEST_EVENT:
            raise ValueError(f"an event of more than {LONGEST_EVENT} bytes")
    if (last := _object(rest)) is not None:  # a plain JSON answer ends without a blank line
        yield last


async def read_to_end(events: AsyncIterator[dict[str, Any]]) -> None:
    """What follows the finish reason: `[DONE]`. A connection left in the middle of an answer is closed."""
    with contextlib.suppress(TimeoutError, httpx.RequestError, *UNREADABLE):
        async with asyncio.timeout(ENDS_WITHIN_S):
            async for _ in events:
                pass


def _object(event: bytes) -> dict[str, Any] | None:
    """An event's JSON object; None for `[DONE]`, pings and empty events. Raises: ValueError."""
    content = event.removeprefix(b"data:").strip()
    if not content.startswith(b"{"):
        return None
    found: dict[str, Any] = json.loads(content)
    return found


def version_spans(spans: Sequence[dict[str, Any]], length: int) -> list[VersionSpan]:
    """The spans with a policy version; a label without a number (vLLM's unset `default`) has none."""
    found: list[VersionSpan] = []
    for span in spans:
        number = version_number(span["version"])
        start, end = int(span["start"]), int(span["end"])
        if not 0 <= start <= end <= length:
            raise ValueError(f"version span {start}..{end} outside of {length} tokens")
        if number is not None and end > start:
            found.append(VersionSpan(version=number, start=start, end=end))
    return found

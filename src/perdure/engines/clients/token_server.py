"""A server's token endpoint, whatever its dialect: the request, the stream, and how it can break.

Owns the connection and the events on it; what they say is `vllm` and `sglang`, and what follows a
broken stream is the pool's.
"""

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

import httpx

from perdure.engines.clients.vllm_control import version_number
from perdure.engines.clients.wire import PASSING, excerpt, refusal, retry_after
from perdure.engines.state import root_of
from perdure.types import VersionSpan

LONGEST_EVENT = 32 << 20


class Break(StrEnum):
    """Why a stream ended without an end."""

    LOST = "lost"
    """The connection, the process or the stream's form: whether it lives must be asked."""
    BUSY = "busy"
    """It answered, and not now."""
    ABORTED = "aborted"
    """It was told to stop: new weights, a drain."""
    FENCED = "fenced"
    """Another boot answers there, or ours was declared dead."""


class Broken(Exception):
    """A stream that ended without a finish reason. What it gave is in the salvage."""

    def __init__(self, kind: Break, problem: str, retry_after: float | None = None) -> None:
        super().__init__(problem)
        self.kind = kind
        self.retry_after = retry_after


@dataclass(frozen=True)
class Ask:
    """One request to one engine. `model`: the name this boot serves under."""

    model: str
    prompt_ids: Sequence[int]
    sampling: Mapping[str, Any]
    session_id: str
    request_id: str

    def check_room(self, tokens: int) -> None:
        """Raises: ValueError when an engine gives more than it was asked for."""
        if tokens > self.sampling.get("max_tokens", tokens):
            raise ValueError(f"{tokens} tokens of {self.sampling['max_tokens']}")


class TokenServer:
    """One server's token endpoint: where it is, its key, and what a broken connection means."""

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
        """`key_source` is named, and never shown, when the key is refused."""
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
        """The stream of one completion. `fence`: a name that another boot does not know.

        Raises: Broken when it does not begin or breaks off, Refused.
        """
        try:
            asked = {**self._headers, **headers}
            async with self._client.stream(
                "POST", self._url, content=body, headers=asked
            ) as answer:
                await self._check(answer, fence)
                yield answer
        except httpx.RequestError as error:
            raise Broken(Break.LOST, f"{type(error).__name__} {error}".strip()) from None

    async def _check(self, response: httpx.Response, fence: str) -> None:
        status = response.status_code
        if status == httpx.codes.OK:
            return
        await response.aread()
        if status in PASSING:
            wait = retry_after(response)
            raise Broken(Break.BUSY, f"HTTP {status} {excerpt(response)}", wait)
        if status == httpx.codes.NOT_FOUND and fence and fence in response.text:
            raise Broken(Break.FENCED, f"it no longer serves {fence}")
        raise refusal(self.name, status, response.text, self._key_source)


async def read_events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events; of a whole JSON answer, that one."""
    rest = b""
    async for data in response.aiter_bytes():
        *events, rest = (rest + data).split(b"\n\n")
        for event in filter(None, map(_object, events)):
            yield event
        if len(rest) > LONGEST_EVENT:
            raise ValueError("an event without end")
    if (last := _object(rest)) is not None:  # a whole answer has no blank line behind it
        yield last


def _object(event: bytes) -> dict[str, Any] | None:
    """An event's JSON object; None for `[DONE]`, pings and nothing. Raises: ValueError."""
    content = event.removeprefix(b"data:").strip()
    if not content.startswith(b"{"):
        return None
    found: dict[str, Any] = json.loads(content)
    return found


def version_spans(spans: Sequence[dict[str, Any]], length: int) -> list[VersionSpan]:
    """A label without a number (vLLM's unset label is `default`) names no policy version."""
    found: list[VersionSpan] = []
    for span in spans:
        number = version_number(span["version"])
        start, end = int(span["start"]), int(span["end"])
        if not 0 <= start <= end <= length:
            raise ValueError(f"version span {start}..{end} outside of {length} tokens")
        if number is not None and end > start:
            found.append(VersionSpan(version=number, start=start, end=end))
    return found

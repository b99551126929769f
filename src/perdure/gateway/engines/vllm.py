"""vLLM's token endpoint: token ids in; a stream of token ids, logprobs and weight versions out.

The server must run with `--enable-scale-out`, and with `--logprobs-mode processed_logprobs` for
logprobs of the distribution that was really sampled. Owns one stream of one engine; which engine,
and what follows a broken stream, is the pool's.
"""

import json
import math
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import httpx

from perdure.gateway.base import Refused
from perdure.gateway.engines.salvage import Salvage
from perdure.gateway.engines.wire import PASSING, UNREADABLE, excerpt, refusal, retry_after
from perdure.gateway.prompt_ids import PromptIds
from perdure.serving.control_plane import REFUSALS, version_number
from perdure.serving.state import root_of
from perdure.types import FinishReason, VersionSpan

MISSING_LOGPROB = -9999.0
"""vLLM's stand-in for a logprob that is absent, NaN or minus infinity."""
FENCED = re.compile(r"-g\d+$")
DEATH = "EngineDead"
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


class VllmEngine:
    """The token endpoint of one `vllm serve` replica."""

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
        self._url = f"{root_of(url)}/inference/v1/generate"
        self._client = client
        self._key_source = key_source
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"

    async def sample(
        self, ask: Ask, salvage: Salvage, version: Callable[[], int | None]
    ) -> FinishReason:
        """Stream a completion into `salvage`. `version`: what is known to be loaded, this moment.

        Raises: Broken (what came before it is in `salvage`), Refused.
        """
        headers = {**self._headers, "x-session-id": ask.session_id, "x-request-id": ask.request_id}
        try:
            request = self._client.stream("POST", self._url, content=_body(ask), headers=headers)
            async with request as response:
                await self._check(response, ask)
                return await self._read(response, salvage, version, ask)
        except httpx.TransportError as error:
            raise Broken(Break.LOST, f"{type(error).__name__} {error}".strip()) from None

    async def _check(self, response: httpx.Response, ask: Ask) -> None:
        status = response.status_code
        if status == httpx.codes.OK:
            return
        await response.aread()
        if status in PASSING:
            wait = retry_after(response)
            raise Broken(Break.BUSY, f"HTTP {status} {excerpt(response)}", wait)
        if status == httpx.codes.NOT_FOUND and ask.model in response.text:
            raise Broken(Break.FENCED, f"it no longer serves {ask.model}")
        raise refusal(self.name, status, response.text, self._key_source)

    async def _read(
        self,
        response: httpx.Response,
        salvage: Salvage,
        version: Callable[[], int | None],
        ask: Ask,
    ) -> FinishReason:
        try:
            async for event in read_events(response):
                reason = self._take(event, salvage, version, ask)
                if reason is not None:
                    return reason
        except Refused:
            raise
        except UNREADABLE as error:
            raise Broken(Break.LOST, f"a malformed answer: {error!r}") from error
        raise Broken(Break.LOST, "the stream ended without a finish reason")

    def _take(
        self,
        event: dict[str, Any],
        salvage: Salvage,
        version: Callable[[], int | None],
        ask: Ask,
    ) -> FinishReason | None:
        """One chunk. `[DONE]` ends crashed streams too: only a finish reason is an end."""
        if "error" in event:
            raise self._failed(event["error"], begun=salvage.part > 0)
        # A server with several names echoes its first: only a fenced one tells boots apart.
        if FENCED.search(ask.model) and event.get("model") not in (None, ask.model):
            raise Broken(Break.FENCED, f"{event['model']} answered instead of {ask.model}")
        if not event.get("choices"):
            return None
        choice = event["choices"][0]
        token_ids = choice.get("token_ids") or []
        if token_ids:
            content = choice["logprobs"]["content"]
            salvage.add(token_ids, _logprobs(content, token_ids), version())
        salvage.report(version_spans(choice.get("weight_versions") or (), salvage.part))
        if choice.get("finish_reason") is None:
            return None
        reason = FinishReason(choice["finish_reason"])
        if reason is FinishReason.ABORT:
            raise Broken(Break.ABORTED, "the completion was aborted")
        if not salvage.ids:
            raise ValueError("no sampled token")
        return reason

    def _failed(self, error: object, *, begun: bool) -> Exception:
        """In a stream vLLM refuses by an event, behind a 200; it dies by one, too."""
        told = error if isinstance(error, dict) else {}
        code, message = told.get("code"), str(told.get("message", error))
        if isinstance(code, int) and code in REFUSALS and not begun and DEATH not in message:
            return refusal(self.name, code, message, self._key_source)
        return Broken(Break.LOST, f"the engine failed: {message[:300]}")


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


def _body(ask: Ask) -> bytes:
    """The request as JSON; the ids' text is taken over where it is known already."""
    body = {
        "model": ask.model,
        "request_id": ask.request_id,
        "stream": True,
        "sampling_params": {**ask.sampling, "logprobs": 1, "skip_special_tokens": False},
    }
    ids = ask.prompt_ids
    known = ids if isinstance(ids, PromptIds) else PromptIds.of(ids)
    head = json.dumps(body, separators=(",", ":")).encode().removesuffix(b"}")
    return b"".join([head, b',"token_ids":[', known.text, b"]}"])


def _logprobs(content: list[dict[str, Any]], token_ids: Sequence[int]) -> list[float]:
    """Raises: ValueError unless there is one finite logprob for each sampled id, in order."""
    if len(content) != len(token_ids):
        raise ValueError(f"{len(content)} logprobs for {len(token_ids)} sampled tokens")
    logprobs = [float(entry["logprob"]) for entry in content]
    for position, (entry, token_id) in enumerate(zip(content, token_ids, strict=True)):
        if _token_id(entry) not in (token_id, None):
            raise ValueError(f"logprob {position} belongs to another token than {token_id}")
    if any(not math.isfinite(value) or value == MISSING_LOGPROB for value in logprobs):
        raise ValueError("a logprob is missing")
    return logprobs


def _token_id(entry: dict[str, Any]) -> int | None:
    """vLLM names the token by `token_id`, or in older form by `token: "token_id:N"`."""
    token_id = entry.get("token_id")
    if token_id is None:
        _, found, number = str(entry.get("token", "")).partition("token_id:")
        token_id = int(number) if found else None
    return token_id


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

"""The base of all token endpoints: the request, the stream of events, and how a stream can break.

`connections` delivers the bytes of an answer, this module splits them into events, `vllm` and `sglang`
read the events, and the pool handles a broken stream.
"""

import base64
import io
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

import aiohttp
import httpx
import numpy
import orjson

from perdure import tracing
from perdure.dialects.base import Refused
from perdure.engines.clients.engine_connections import Answer, Connections, target
from perdure.engines.clients.engine_errors import content_refusal, trouble
from perdure.engines.clients.hosted_requests import UNREADABLE
from perdure.engines.clients.rate_limit_headers import reset_in_s
from perdure.engines.clients.sampled_tokens import ImpossibleTokens, check_ids, check_logprobs
from perdure.engines.clients.vllm_control import version_number
from perdure.engines.engine_state import root_of
from perdure.types import ExpertRows, FinishReason, VersionSpan

PREEMPTIONS = "num_preempted"
"""A field of a choice that vLLM does not have: a trainer's generate function adds it."""
TOKENS_AN_EVENT = 32
"""How many tokens an engine should send together. It sends the first token and the end at once. If the
engine dies, at most 31 tokens are lost."""
LONGEST_EVENT = 512 << 20
"""Bytes of one server-sent event above which the stream counts as broken. The experts of 128k tokens of
a model with 48 layers of 8 are 67 MB from vLLM and 268 MB from SGLang."""


Take = Callable[[dict[str, Any]], FinishReason | None]
"""Takes one event of a completion. Returns the finish reason with the event that has one."""


class BreakKind(StrEnum):
    """Why a stream ended without a finish reason."""

    LOST = "lost"
    """The connection, the process or the stream's format failed: check whether the engine is alive."""
    REFUSED = "refused"
    """The engine answered without a completion, and the content of the request is not the cause."""
    ABORTED = "aborted"
    """The call was stopped on purpose, for new weights or a drain."""
    IMPOSSIBLE = "impossible"
    """The answer cannot come from sampling, so none of it is kept."""
    FENCED = "fenced"
    """Another start answers at the engine's address, or this start was declared dead."""


class StreamBroken(Exception):
    """A stream that ended without a finish reason. Its tokens are in the salvage."""

    def __init__(self, kind: BreakKind, problem: str, retry_after: float | None = None) -> None:
        super().__init__(problem)
        self.kind = kind
        self.retry_after = retry_after


@dataclass(frozen=True)
class EngineRequest:
    """One request to one engine. `model`: the name that this start of the engine serves."""

    model: str
    prompt_ids: Sequence[int]
    sampling: Mapping[str, Any]
    session_id: str
    request_id: str
    vocabulary: int | None = None
    """How many token ids the model has; None: not known."""
    routed_from: int = 0
    """The first position whose experts the engine returns. Earlier turns recorded those before
    it."""

    @property
    def truncates(self) -> bool:
        """Whether tokens are sampled from a part of the vocabulary. If not, each kept set is the whole
        vocabulary."""
        told = self.sampling
        return bool(
            told.get("top_p", 1.0) < 1 or told.get("top_k", 0) > 0 or told.get("min_p", 0.0) > 0
        )

    def count_rows(self, tokens: int) -> int:
        """How many rows of experts an engine returns with `tokens` sampled tokens: one for each
        position in [routed_from, length - 1), because no forward pass reads the last token. See
        vLLM 0.32 (`aux_output_connector/connector.py`) and SGLang 0.5
        (`_maybe_collect_routed_experts`)."""
        return max(0, len(self.prompt_ids) + tokens - 1 - self.routed_from)

    def check(self, taken: int, ids: Sequence[Any], logprobs: Sequence[float]) -> None:
        """Check the tokens that an engine sends after the first `taken` ones.

        Raises: ImpossibleTokens, also if there are more tokens than `max_tokens`.
        """
        tokens = taken + len(ids)
        if tokens > self.sampling.get("max_tokens", tokens):
            most = self.sampling["max_tokens"]
            raise ImpossibleTokens(f"{tokens} tokens, but max_tokens is {most}")
        check_ids(ids, self.vocabulary)
        check_logprobs(logprobs)


class TokenServer:
    """One server's token endpoint: its URL, its key, and what a broken connection means."""

    route: ClassVar[str]

    def __init__(
        self,
        name: str,
        url: str,
        connections: Connections,
        *,
        api_key: str = "",
        key_source: str = "",
    ) -> None:
        """`key_source`: the environment variable of the key. Errors name it and never show the key."""
        self.name = name
        self._target = target(f"{root_of(url)}{self.route}")
        self._connections = connections
        self._key_source = key_source
        self._headers = {"content-type": "application/json"}
        if api_key and self._target.url.user is None:  # a user in the URL is sent instead
            self._headers["authorization"] = f"Bearer {api_key}"

    async def _stream(
        self, body: bytes, headers: Mapping[str, str], take: Take, *, fence: str = ""
    ) -> FinishReason:
        """Pass each event of one completion to `take` as it arrives, until `take` returns the finish
        reason. `fence`: a name that only this start of the engine serves.

        Raises: StreamBroken if the stream does not begin, breaks or cannot be read; Refused.
        """
        events = Events(take)
        asked = {**self._headers, **headers, **tracing.carrier()}
        try:
            answer = await self._connections.post(self._target, asked, body, events.feed)
            self._check(answer, fence)
            reason = events.reason or events.last()
        except Refused:
            raise
        except ImpossibleTokens as error:
            raise StreamBroken(BreakKind.IMPOSSIBLE, f"an impossible answer: {error}") from error
        except (OSError, aiohttp.ClientError) as error:
            raise StreamBroken(BreakKind.LOST, f"{type(error).__name__} {error}".strip()) from None
        except UNREADABLE as error:
            raise StreamBroken(BreakKind.LOST, f"a malformed answer: {error!r}") from error
        if reason is None:
            raise StreamBroken(BreakKind.LOST, "the stream ended without a finish reason")
        return reason

    def _check(self, answer: Answer, fence: str) -> None:
        if answer.status == httpx.codes.OK:
            return
        text = answer.content.decode("utf-8", "replace")
        if answer.status == httpx.codes.NOT_FOUND and fence and fence in text:
            raise StreamBroken(BreakKind.FENCED, f"it no longer serves {fence}")
        raise self._refusal(answer.status, text, reset_in_s(answer.headers, time.time()))

    def _refusal(self, status: int, text: str, wait: float | None = None) -> Exception:
        """The exception for an answer without a completion: Refused, or StreamBroken."""
        refused = content_refusal(self.name, status, text)
        told = trouble(self.name, status, text, self._key_source)
        return refused or StreamBroken(BreakKind.REFUSED, told, wait)


def body_with_prompt(fields: dict[str, Any], name: str, ask: EngineRequest) -> bytes:
    """`fields`, then the prompt's ids as field `name`. `json` encodes the fields, because orjson refuses
    integers above 64 bits. orjson encodes the ids, because 128k of them take it a tenth of the time."""
    head = json.dumps(fields, separators=(",", ":")).encode().removesuffix(b"}")
    ids = numpy.asarray(ask.prompt_ids, numpy.intc)
    text = orjson.dumps(ids, option=orjson.OPT_SERIALIZE_NUMPY)
    return b"".join([head, b',"', name.encode(), b'":', text, b"}"])


class Events:
    """Parses a stream of server-sent events, or a plain JSON answer, into JSON objects."""

    def __init__(self, take: Take) -> None:
        self.reason: FinishReason | None = None
        self._take = take
        self._rest = bytearray()

    def feed(self, data: bytes) -> bool:
        """Take all complete events. Returns whether one ended the completion. Raises: UNREADABLE."""
        searched = max(0, len(self._rest) - 1)
        self._rest += data
        while (end := self._rest.find(b"\n\n", searched)) >= 0:
            event = bytes(self._rest[:end])
            del self._rest[: end + 2]
            searched = 0
            found = _object(event)
            if found is not None and (reason := self._take(found)) is not None:
                self.reason = reason
                return True
        if len(self._rest) > LONGEST_EVENT:
            raise ValueError(f"an event of more than {LONGEST_EVENT} bytes")
        return False

    def last(self) -> FinishReason | None:
        """Take the rest at the end of the answer, because no blank line follows plain JSON. Raises:
        UNREADABLE."""
        found = _object(bytes(self._rest))
        return None if found is None else self._take(found)


def experts_of_npy(text: str) -> ExpertRows:
    """Decode vLLM's form: a `.npy` file in base64, uint8 for up to 256 experts, otherwise uint16.
    Shape [rows, layers, top_k]. Raises: ValueError."""
    rows: ExpertRows = numpy.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)
    return rows


def npy_of_experts(rows: ExpertRows) -> str:
    """The inverse of `experts_of_npy`."""
    file = io.BytesIO()
    numpy.save(file, rows, allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode("ascii")


def experts_of_int32(text: str, rows: int) -> ExpertRows:
    """Decode SGLang's form: int32 in base64, without a shape. Returns shape
    [rows, 1, layers * top_k], or [N, 1, 1] if the length does not fit `rows` tokens.
    Raises: ValueError."""
    flat = numpy.frombuffer(base64.b64decode(text), "<i4")
    fits = rows and len(flat) % rows == 0
    return flat.reshape(rows if fits else len(flat), 1, -1 if fits else 1)


def _object(event: bytes) -> dict[str, Any] | None:
    """An event's JSON object; None for `[DONE]`, pings and empty events. Raises: ValueError."""
    content = event.removeprefix(b"data:").strip()
    if not content.startswith(b"{"):
        return None
    try:
        found: dict[str, Any] = orjson.loads(content)
    except orjson.JSONDecodeError:  # engines may send `NaN` and lone surrogates
        found = json.loads(content)
    return found


def version_spans(spans: Sequence[dict[str, Any]], length: int) -> list[VersionSpan]:
    """The spans with a policy version. A label without a number, such as vLLM's `default`, has none."""
    found: list[VersionSpan] = []
    for span in spans:
        try:
            number = version_number(span["version"])
        except ValueError as error:
            raise ImpossibleTokens(str(error)) from None
        start, end = int(span["start"]), int(span["end"])
        if not 0 <= start <= end <= length:
            raise ImpossibleTokens(f"a version span {start}..{end} for {length} tokens")
        if number is not None and end > start:
            found.append(VersionSpan(version=number, start=start, end=end))
    return found

"""A chain: the ordered turns of one agent, whose token sequence only grows.

Owns what "extends" means: canonical messages, request digests, the recorded ids, and the reason
when a request does not extend the newest turn. Sampling and HTTP are elsewhere.
"""

import base64
import contextlib
import hashlib
import json
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from renderers.base import Renderer

from perdure.gateway.base import Answer, ModelRequest
from perdure.types import FinishReason, Turn, VersionSpan

Message = dict[str, Any]


class Miss(NamedTuple):
    """Why a request could not be bridged; counted, recorded, never papered over."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class RequestFacts:
    """What a turn's record says about its request.

    `kept_messages` counts the leading canonical messages equal to those of the previous turn's
    request; `messages` holds the rest.
    """

    index: int
    started_at: float
    request_sha256: str
    tools_sha256: str
    kept_messages: int
    messages: list[Message]


@dataclass(frozen=True, kw_only=True)
class TurnRecord(RequestFacts):
    """One turn as journaled: deltas to the turn before, so that a journal grows with the text.

    `kept_ids` counts the leading ids of the previous turn's prompt + completion that this prompt
    starts with; `prompt` holds the rest.
    """

    kept_ids: int
    prompt: "array[int]"
    completion: "array[int]"
    logprobs: "array[float]"
    versions: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    engine: str
    miss: str | None
    trainable: bool
    engine_seconds: float
    seconds: float
    reasoning_open: bool
    answer: Answer


def to_journal(record: TurnRecord) -> dict[str, Any]:
    fields = dict(vars(record))
    fields.update(
        kind="turn",
        prompt=_pack(record.prompt),
        completion=_pack(record.completion),
        logprobs=_pack(record.logprobs),
        versions=[[span.version, span.start, span.end] for span in record.versions],
        answer=asdict(record.answer),
    )
    return fields


def from_journal(fields: dict[str, Any]) -> TurnRecord:
    known = {name: fields[name] for name in TurnRecord.__dataclass_fields__}
    known.update(
        prompt=_unpack("i", fields["prompt"]),
        completion=_unpack("i", fields["completion"]),
        logprobs=_unpack("d", fields["logprobs"]),
        versions=tuple(VersionSpan(version=v, start=s, end=e) for v, s, e in fields["versions"]),
        finish_reason=FinishReason(fields["finish_reason"]),
        answer=Answer(**fields["answer"]),
    )
    return TurnRecord(**known)


def _pack(values: "array[Any]") -> str:
    """Little-endian int32 or float64, as base64."""
    return base64.b64encode(_little_endian(values).tobytes()).decode("ascii")


def _unpack(code: str, text: str) -> "array[Any]":
    values = array(code)
    values.frombytes(base64.b64decode(text))
    return _little_endian(values)


def _little_endian(values: "array[Any]") -> "array[Any]":
    if sys.byteorder == "big":
        values = array(values.typecode, values)
        values.byteswap()
    return values


def canonical(message: Message) -> Message:
    """The form in which messages are compared: what clients change in passing is taken out.

    Clients re-serialise arguments, drop or keep reasoning, add null fields and trailing newlines.
    """
    form: Message = {"role": message["role"], "content": message["content"].rstrip("\n")}
    if message.get("tool_calls"):
        form["tool_calls"] = [_canonical_call(call) for call in message["tool_calls"]]
    if message["role"] == "tool":
        form["tool_call_id"] = message.get("tool_call_id", "")
    return form


def _canonical_call(call: dict[str, Any]) -> list[Any]:
    arguments = call["function"]["arguments"]
    with contextlib.suppress(ValueError, RecursionError):  # not JSON: compared as text
        arguments = json.loads(arguments)
    return [call["id"], call["function"]["name"], arguments]


def canonical_answer(message: Message) -> Message:
    return canonical({**message, "content": message.get("content") or ""})


def digest_of(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _roll(state: bytes, messages: Iterable[Message]) -> bytes:
    for message in messages:
        text = json.dumps(message, sort_keys=True).encode()
        state = hashlib.sha256(state + text).digest()
    return state


@dataclass(frozen=True)
class Fingerprint:
    """A request reduced to what decides whether it is a retry and what it extends."""

    messages: list[Message]
    kept: int
    """Leading messages equal to those of the newest turn's request."""
    rolled: bytes
    tools_sha256: str
    sha256: str
    after_turns: int
    """Turns the chain had when this was taken."""


@dataclass
class Chain:
    """The newest turn, and all that is needed to extend or repeat it."""

    turns: int = 0
    messages: list[Message] = field(default_factory=list)
    """Canonical messages of the newest request, without its answer."""
    rolled: bytes = b""
    tools_sha256: str = ""
    request_sha256: str = ""
    prompt: "array[int]" = field(default_factory=lambda: array("i"))
    completion: "array[int]" = field(default_factory=lambda: array("i"))
    reasoning_open: bool = False
    answer: Answer | None = None

    def fingerprint(self, request: ModelRequest) -> Fingerprint:
        """Hashing follows the new text: messages we saw in the last request keep their hash."""
        messages = [canonical(message) for message in request.messages]
        kept = len(self.messages)
        start = self.rolled
        if messages[:kept] != self.messages:
            kept, start = 0, b""
        rolled = _roll(start, messages[kept:])
        tools = digest_of(request.tools)
        rest = {
            name: value
            for name, value in request.body.items()
            if name not in ("messages", "tools", "stream", "stream_options")
        }
        digest = digest_of([rolled.hex(), tools, rest])
        return Fingerprint(messages, kept, rolled, tools, digest, self.turns)

    def facts(self, fingerprint: Fingerprint, started_at: float) -> RequestFacts:
        return RequestFacts(
            index=self.turns,
            started_at=started_at,
            request_sha256=fingerprint.sha256,
            tools_sha256=fingerprint.tools_sha256,
            kept_messages=fingerprint.kept,
            messages=fingerprint.messages[fingerprint.kept :],
        )

    def extension(self, fingerprint: Fingerprint) -> int | Miss:
        """Where the new messages of a request begin, if it extends the newest turn."""
        if self.answer is None:
            return Miss("first")
        if fingerprint.tools_sha256 != self.tools_sha256:
            return Miss("tools_changed")
        echo = len(self.messages)
        if fingerprint.kept != echo:
            return Miss("prefix_changed")
        messages = fingerprint.messages
        if len(messages) <= echo or messages[echo]["role"] != "assistant":
            return Miss("answer_dropped")
        if messages[echo] != canonical_answer(self.answer.message):
            return Miss("echo_edited")
        if len(messages) == echo + 1:
            return Miss("no_new_messages")
        if any(message["role"] == "assistant" for message in messages[echo + 1 :]):
            return Miss("foreign_assistant")
        return echo + 1

    def bridge(
        self, renderer: Renderer, request: ModelRequest, fingerprint: Fingerprint
    ) -> list[int] | Miss:
        """The next prompt: the recorded ids, then only the new messages rendered. Shape [P]."""
        start = self.extension(fingerprint)
        if isinstance(start, Miss):
            return start
        if not self.prompt:
            return Miss("no_recorded_ids")
        prompt, completion = self.prompt.tolist(), self.completion.tolist()
        new = request.messages[start:]
        bridged = renderer.bridge_to_next_turn(prompt, completion, new, tools=request.tools)
        if bridged is None:
            return Miss("open_reasoning" if self.reasoning_open else "renderer_unsupported")
        ids = list(bridged.token_ids)
        if ids[: len(prompt)] != prompt or ids[len(prompt) :][: len(completion)] != completion:
            return Miss("prefix_assert")
        return ids

    def apply(self, record: TurnRecord) -> None:
        """Make a journaled turn the newest; the same for a live turn and for one read back."""
        self.prompt = (self.prompt + self.completion)[: record.kept_ids] + record.prompt
        self.completion = record.completion
        self.messages = self.messages[: record.kept_messages] + record.messages
        start = self.rolled if record.kept_messages else b""
        self.rolled = _roll(start, record.messages)
        self.tools_sha256 = record.tools_sha256
        self.request_sha256 = record.request_sha256
        self.reasoning_open = record.reasoning_open
        self.answer = record.answer
        self.turns = record.index + 1


def turns_of(records: Sequence[TurnRecord]) -> list[Turn]:
    """The turns of a chain with their whole prompts."""
    turns: list[Turn] = []
    sequence: array[int] = array("i")
    for record in records:
        prompt = sequence[: record.kept_ids] + record.prompt
        sequence = prompt + record.completion
        turns.append(_turn(record, prompt))
    return turns


def _turn(record: TurnRecord, prompt: "array[int]") -> Turn:
    return Turn(
        index=record.index,
        parent=record.index - 1 if record.trainable and record.miss is None else None,
        prompt_ids=tuple(prompt),
        completion_ids=tuple(record.completion),
        logprobs=tuple(record.logprobs),
        versions=record.versions,
        finish_reason=record.finish_reason,
        engine=record.engine,
        bridged=record.trainable and record.miss is None,
        bridge_miss=record.miss,
        trainable=record.trainable,
        started_at=record.started_at,
        engine_seconds=record.engine_seconds,
        seconds=record.seconds,
        request_sha256=record.request_sha256,
    )

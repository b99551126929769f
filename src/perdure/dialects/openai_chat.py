"""OpenAI Chat Completions: request bytes -> ModelRequest, Answer -> JSON or one well-formed stream.

Owns the wire form and its errors. Unknown fields are ignored, because every client sends some. Fields in
use are checked, and an error names its field.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from perdure.dialects.base import MAIN, Answer, ModelRequest, Refused
from perdure.dialects.json_fields import MAX_MESSAGES, MAX_TOOLS, Fields, bad, name_header
from perdure.dialects.request_body_cache import BODIES, translated
from perdure.types import Purpose

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
SAMPLING = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.0, 100.0),
}
SAMPLING_INTEGERS = {"top_k": (-1, 1 << 31), "seed": (-(1 << 62), 1 << 62)}
MAX_STOPS = 16
MEDIA = ("image_url", "input_audio", "file")
OPENCODE_SESSION, OPENCODE_PARENT = "x-session-affinity", "x-parent-session-id"
OPENCODE_TITLE = "You are a title generator."
OPENCODE_SUMMARY = "You are a context summarization agent."
OPENHANDS_SUMMARY = "You are maintaining a context-aware state summary"
QWEN_CODE, QWEN_SUMMARY = "QwenCode/", "<state_snapshot>"
ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


PING = b": ping\n\n"


@dataclass(frozen=True)
class ParsedRequest:
    """A parsed request, which frames its answer."""

    request: ModelRequest
    stream: bool
    include_usage: bool

    def whole(self, answer: Answer) -> bytes:
        return completion(answer)

    def events(self, answer: Answer) -> bytes:
        return events(answer, include_usage=self.include_usage)


def parse(raw: bytes, headers: Mapping[str, str] = MappingProxyType({})) -> ParsedRequest:
    """Raises: Refused (400), which names the field and what it must be."""
    body = BODIES.read(raw, "messages", headers)
    stream_options = body.object("stream_options")
    if body.get("n") not in (None, 1):
        raise body.bad("n", "must be 1: a call samples one answer")
    stream, found = body.flag("stream"), _messages(body)
    chain, parent_chain = _origin(headers)
    request = ModelRequest(
        model=body.text("model"),
        messages=found,
        tools=_tools(body),
        sampling=_sampling(body),
        max_tokens=_max_tokens(body),
        body=body.values,
        chain=chain,
        parent_chain=parent_chain,
        purpose=_purpose(body, headers, found),
    )
    return ParsedRequest(request, stream, stream_options.flag("include_usage"))


def _origin(headers: Mapping[str, str]) -> tuple[str, str]:
    """Chain and parent chain. opencode runs a sub-agent in a separate session and names the parent.

    Session headers of other clients add nothing to the session key.
    """
    if not name_header(headers, OPENCODE_PARENT):
        return MAIN, ""
    chain = name_header(headers, OPENCODE_SESSION)
    return (chain, MAIN) if chain else (MAIN, "")


def _purpose(body: Fields, headers: Mapping[str, str], found: list[dict[str, Any]]) -> Purpose:
    """Decided only by unambiguous marks, because some agents have no tools and their steps are trained."""
    if body.get("tools"):
        return Purpose.STEP
    if OPENCODE_SESSION in headers and found[0]["role"] == "system":
        return _purpose_of_opencode(found[0]["content"])
    if found[0]["role"] == "system" and found[0]["content"].startswith(OPENHANDS_SUMMARY):
        return Purpose.COMPACTION
    if headers.get("user-agent", "").startswith(QWEN_CODE) and not body.get("stream"):
        return Purpose.COMPACTION if QWEN_SUMMARY in found[-1]["content"] else Purpose.SIDE
    return Purpose.STEP


def _purpose_of_opencode(system: str) -> Purpose:
    """System texts identify opencode's title and summary agents. `reasoning_effort` does not, because it
    depends on how the model is configured."""
    if system.startswith(OPENCODE_TITLE):
        return Purpose.SIDE
    return Purpose.COMPACTION if system.startswith(OPENCODE_SUMMARY) else Purpose.STEP


def _sampling(body: Fields) -> dict[str, Any]:
    found: dict[str, Any] = {name: body.number(name, *bounds) for name, bounds in SAMPLING.items()}
    for name, (low, high) in SAMPLING_INTEGERS.items():
        found[name] = body.integer(name, low, high)
    stop = body.get("stop")
    found["stop"] = body.texts("stop", MAX_STOPS) if stop != "" else body.text("stop")
    return {name: value for name, value in found.items() if value not in (None, [])}


def _max_tokens(body: Fields) -> int | None:
    names = ("max_tokens", "max_completion_tokens")
    limits = [body.integer(name, 1, 1 << 31) for name in names]
    return min((limit for limit in limits if limit is not None), default=None)


def messages(value: Any) -> list[dict[str, Any]]:
    """Messages in the gateway's own form. Raises: Refused (400)."""
    return _messages(Fields({"messages": value}))


def _messages(body: Fields) -> list[dict[str, Any]]:
    found = list(translated(body, "messages", MAX_MESSAGES, _one))
    if not found:
        raise body.bad("messages", "must be a non-empty list")
    return found


def _one(fields: Fields) -> list[dict[str, Any]]:
    return [_message(fields)]


def _message(fields: Fields) -> dict[str, Any]:
    role = fields.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise fields.bad("role", f"must be one of {', '.join(ROLES)}")
    content = _content(fields, "content", in_result=ROLES[role] == "tool")
    message: dict[str, Any] = {"role": ROLES[role], "content": content}
    for name in ("reasoning_content", "tool_call_id", "name"):
        if (text := fields.optional_text(name)) is not None:
            message[name] = text
    if role == "assistant" and fields.get("tool_calls"):
        message["tool_calls"] = [_tool_call(call) for call in fields.objects("tool_calls")]
    return message


def _content(fields: Fields, key: str, *, in_result: bool = False) -> str:
    value = fields.get(key)
    if value is None or isinstance(value, str):
        return value or ""
    return "".join(_part(part, path, in_result) for path, part in fields.items(key))


def _part(part: Any, param: str, in_result: bool) -> str:
    """The part as text. A note replaces an image, so that an image does not end the rollout."""
    if isinstance(part, str):
        return part
    for name in ("text", "refusal"):
        if isinstance(part, dict) and isinstance(part.get(name), str):
            text: str = part[name]
            return text
    if isinstance(part, dict) and (in_result or part.get("type") in MEDIA):
        return f"[{str(part.get('type'))[:40]} not shown: this model reads text]"
    raise bad(param, 'must be a text part {"type": "text", "text": "..."}: this model reads text')


def _tool_call(call: Fields) -> dict[str, Any]:
    function = call.object("function")
    arguments = function.get("arguments")
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments)
    if not isinstance(arguments, str):
        raise function.bad("arguments", "must be a string with JSON")
    return {
        "id": call.optional_text("id") or "",
        "type": "function",
        "function": {"name": function.text("name"), "arguments": arguments},
    }


def _tools(body: Fields) -> list[dict[str, Any]] | None:
    tools = list(body.objects("tools", MAX_TOOLS))
    for tool in tools:
        function = tool.object("function")
        function.text("name")
        function.optional_text("description")
        function.object("parameters")
    return [tool.values for tool in tools] or None


def completion(answer: Answer) -> bytes:
    """The answer as one `chat.completion` object."""
    choice = {
        "index": 0,
        "message": answer.message,
        "logprobs": None,
        "finish_reason": answer.finish_reason,
    }
    return json.dumps({**_head(answer, ""), "choices": [choice], "usage": answer.usage}).encode()


def events(answer: Answer, *, include_usage: bool) -> bytes:
    """The answer as one complete stream: role, reasoning, text, tool calls, finish, usage, [DONE]."""
    chunks = [_event(answer, choices=[_choice(delta)]) for delta in _deltas(answer.message)]
    chunks.append(_event(answer, choices=[_choice({}, answer.finish_reason)]))
    if include_usage:
        chunks.append(_event(answer, choices=[], usage=answer.usage))
    return b"".join([*chunks, b"data: [DONE]\n\n"])


def _head(answer: Answer, suffix: str) -> dict[str, Any]:
    return {
        "id": answer.id,
        "object": f"chat.completion{suffix}",
        "created": answer.created,
        "model": answer.model,
    }


def _event(answer: Answer, **fields: Any) -> bytes:
    return b"data: " + json.dumps({**_head(answer, ".chunk"), **fields}).encode() + b"\n\n"


def _choice(delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


def _deltas(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield {"role": "assistant", "content": ""}
    if message.get("reasoning_content"):
        yield {"reasoning_content": message["reasoning_content"]}
    if message.get("content"):
        yield {"content": message["content"]}
    for index, call in enumerate(message.get("tool_calls") or ()):
        function = call["function"]
        head = {"id": call["id"], "type": "function"}
        yield _call_delta(index, {**head, "function": {"name": function["name"], "arguments": ""}})
        yield _call_delta(index, {"function": {"arguments": function["arguments"]}})


def _call_delta(index: int, fields: dict[str, Any]) -> dict[str, Any]:
    return {"tool_calls": [{"index": index, **fields}]}


def error(refused: Refused) -> bytes:
    """The body of an error answer."""
    fallback = "server_error" if refused.status >= 500 else "invalid_request_error"
    detail = {
        "message": str(refused),
        "type": ERROR_TYPES.get(refused.status, fallback),
        "param": refused.param,
        "code": refused.code,
    }
    return json.dumps({"error": detail}).encode()


def status(refused: Refused) -> int:
    return refused.status


def error_event(refused: Refused) -> bytes:
    """The error as a chunk of the stream, which clients raise as an exception."""
    return b"data: " + error(refused) + b"\n\n"


def models(names: Sequence[str]) -> bytes:
    """The answer to `GET /v1/models`. It is for display only: requests may name any model."""
    data = [{"id": name, "object": "model", "created": 0, "owned_by": "perdure"} for name in names]
    return json.dumps({"object": "list", "data": data}).encode()

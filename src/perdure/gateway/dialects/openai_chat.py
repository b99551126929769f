"""OpenAI Chat Completions: request bytes -> ModelRequest, Answer -> JSON or one well-formed stream.

Owns the wire form and its errors. Unknown fields are accepted and ignored, as every client sends
some; a field we use is checked, and a bad one is refused by name.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from perdure.gateway.base import Answer, ModelRequest, Refused

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
ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


PING = b": ping\n\n"


@dataclass(frozen=True)
class Parsed:
    """A request and how its answer is to be framed."""

    request: ModelRequest
    stream: bool
    include_usage: bool

    def whole(self, answer: Answer) -> bytes:
        return completion(answer)

    def events(self, answer: Answer) -> bytes:
        return events(answer, include_usage=self.include_usage)


def parse(raw: bytes, headers: Mapping[str, str] = MappingProxyType({})) -> Parsed:
    """Raises: Refused (400) naming the field and what it must be."""
    body = _json_object(raw)
    stream_options = _optional(body, "stream_options", dict, "an object") or {}
    if body.get("n") not in (None, 1):
        raise _bad("n", "must be 1: one session samples one answer at a time")
    return Parsed(
        ModelRequest(
            model=_required_text(body, "model"),
            messages=messages(body.get("messages")),
            tools=_tools(body.get("tools")),
            sampling=_sampling(body),
            max_tokens=_max_tokens(body),
            body=body,
        ),
        stream=bool(_optional(body, "stream", bool, "true or false")),
        include_usage=bool(_optional(stream_options, "include_usage", bool, "true or false")),
    )


def _bad(param: str, problem: str) -> Refused:
    return Refused(400, "invalid_value", f"'{param}' {problem}", param=param)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _json_object(raw: bytes) -> dict[str, Any]:
    try:
        body = json.loads(raw, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        message = f"the request body is not valid JSON: {error}"
        raise Refused(400, "invalid_json", message) from None
    if not isinstance(body, dict):
        raise Refused(400, "invalid_json", "the request body must be a JSON object")
    return body


def _optional(fields: dict[str, Any], name: str, kind: type, what: str) -> Any:
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise _bad(name, f"must be {what}")
    return value


def _required_text(fields: dict[str, Any], name: str, param: str | None = None) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or not value:
        raise _bad(param or name, "must be a non-empty string")
    return value


def _number(body: dict[str, Any], name: str, low: float, high: float) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise _bad(name, f"must be a number from {low:g} to {high:g}")
    return value if math.isfinite(value) else None


def _sampling(body: dict[str, Any]) -> dict[str, Any]:
    found = {name: _number(body, name, *bounds) for name, bounds in SAMPLING.items()}
    for name, (low, high) in SAMPLING_INTEGERS.items():
        if (value := _optional(body, name, int, "an integer")) is not None:
            if not low <= value <= high:
                raise _bad(name, f"must be an integer from {low} to {high}")
            found[name] = value
    found["stop"] = _stop(body.get("stop"))
    return {name: value for name, value in found.items() if value is not None}


def _stop(value: Any) -> Any:
    stops = [value] if isinstance(value, str) else value
    if stops is None or stops == []:
        return None
    if not isinstance(stops, list) or len(stops) > 16 or not all(_is_text(stop) for stop in stops):
        raise _bad("stop", "must be a string or a list of at most 16 strings")
    return stops


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _max_tokens(body: dict[str, Any]) -> int | None:
    limits = []
    for name in ("max_tokens", "max_completion_tokens"):
        value = _optional(body, name, int, "an integer")
        if value is not None and value < 1:
            raise _bad(name, "must be at least 1")
        if value is not None:
            limits.append(value)
    return min(limits) if limits else None


def messages(value: Any) -> list[dict[str, Any]]:
    """Messages in the gateway's own form. Raises: Refused (400)."""
    if not isinstance(value, list) or not value:
        raise _bad("messages", "must be a non-empty list")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(value)]


def _message(value: Any, param: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _bad(param, "must be an object")
    role = value.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise _bad(f"{param}.role", f"must be one of {', '.join(ROLES)}")
    message: dict[str, Any] = {
        "role": ROLES[role],
        "content": _content(value.get("content"), f"{param}.content"),
    }
    for name in ("reasoning_content", "tool_call_id", "name"):
        if (text := value.get(name)) is not None:
            if not isinstance(text, str):
                raise _bad(f"{param}.{name}", "must be a string")
            message[name] = text
    if role == "assistant" and value.get("tool_calls"):
        message["tool_calls"] = _tool_calls(value["tool_calls"], f"{param}.tool_calls")
    return message


def _content(value: Any, param: str) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _bad(param, "must be a string or a list of text parts")
    return "".join(_text_part(part, f"{param}[{i}]") for i, part in enumerate(value))


def _text_part(part: Any, param: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        text: str = part["text"]
        return text
    raise _bad(param, 'must be a text part {"type": "text", "text": "..."}: this model reads text')


def _tool_calls(value: Any, param: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise _bad(param, "must be a list")
    return [_tool_call(call, f"{param}[{i}]") for i, call in enumerate(value)]


def _tool_call(call: Any, param: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise _bad(param, "must be an object with a 'function' object")
    arguments = function.get("arguments")
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments)
    if not isinstance(arguments, str):
        raise _bad(f"{param}.function.arguments", "must be a string of JSON")
    name = _required_text(function, "name", f"{param}.function.name")
    call_id = call.get("id")
    if call_id is not None and not isinstance(call_id, str):
        raise _bad(f"{param}.id", "must be a string")
    return {
        "id": call_id or "",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _tools(value: Any) -> list[dict[str, Any]] | None:
    if value is None or value == []:
        return None
    if not isinstance(value, list):
        raise _bad("tools", "must be a list")
    for i, tool in enumerate(value):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict):
            raise _bad(f"tools[{i}]", "must be an object with a 'function' object")
        _required_text(function, "name", f"tools[{i}].function.name")
    return value


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
    """Clients raise the error of a chunk that holds one."""
    return b"data: " + error(refused) + b"\n\n"


def models(names: Sequence[str]) -> bytes:
    """The list of `GET /v1/models`: a courtesy, any name is accepted."""
    data = [{"id": name, "object": "model", "created": 0, "owned_by": "perdure"} for name in names]
    return json.dumps({"object": "list", "data": data}).encode()

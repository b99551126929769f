"""Anthropic Messages: request bytes -> ModelRequest, Answer -> one message or one stream of events.

Owns the wire form, its errors, and the marks of Claude Code: which agent calls, and whether it asks for
something other than its next step. Unknown fields are accepted and ignored.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perdure.dialects.base import MAIN, Answer, ContextExhausted, ModelRequest, Refused
from perdure.dialects.json_fields import (
    MAX_MESSAGES,
    MAX_TOOLS,
    Fields,
    arguments_object,
    joined,
    name_header,
)
from perdure.dialects.request_body_cache import BODIES, translated
from perdure.types import Purpose

AGENT_HEADER = "x-claude-code-agent-id"
PARENT_HEADER = "x-claude-code-parent-agent-id"
COMPACTION_START = "CRITICAL: Respond with TEXT ONLY"
"""The start of Claude Code's instruction to summarize. The request has no other mark."""
TITLE_START = "<session>\n"
"""The start of Claude Code's request for a session's title. It has no tools."""
BILLING_START = "x-anthropic-billing-header"
"""A system block about the client that differs in each version. It is not shown to the model."""
NOTHING_VISIBLE = "[no visible output]"
"""Claude Code drops a reply without text or tool use, and repeats the request forever."""
PING = b'event: ping\ndata: {"type": "ping"}\n\n'
STATUS = {503: 529}
ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
STOP_REASONS = {"length": "max_tokens"}
TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
NO_PARAMETERS = {"type": "object", "properties": {}}
MEDIA = frozenset({"image", "document"})
NOT_SHOWN = "[{kind} not shown: this model reads text]"


@dataclass(frozen=True)
class ParsedRequest:
    """A parsed request, which frames its answer."""

    request: ModelRequest
    stream: bool

    def whole(self, answer: Answer) -> bytes:
        return _json(_message(answer, _blocks(answer), _stop_reason(answer)))

    def events(self, answer: Answer) -> bytes:
        return b"".join(_event(event) for event in _events(answer))


def parse(raw: bytes, headers: Mapping[str, str]) -> ParsedRequest:
    """Raises: Refused (400), which names the field and what it must be."""
    body = BODIES.read(raw, "messages", headers)
    messages = [*_system(body), *_messages(body)]
    tools = [_tool(tool) for tool in body.objects("tools", MAX_TOOLS)]
    chat = _chat_body(body, messages, tools)
    chain = name_header(headers, AGENT_HEADER) or MAIN
    parent = name_header(headers, PARENT_HEADER) or MAIN
    request = ModelRequest(
        model=chat["model"],
        messages=messages,
        tools=tools or None,
        sampling=_sampling(body),
        max_tokens=chat.get("max_tokens"),
        body=chat,
        chain=chain,
        parent_chain="" if chain == MAIN else parent,
        purpose=_purpose(body),
    )
    return ParsedRequest(request, body.flag("stream"))


def _chat_body(
    body: Fields, messages: list[dict[str, Any]], tools: list[dict[str, Any]]
) -> dict[str, Any]:
    """The request as a Chat Completions body, for hosted engines."""
    chat = {"model": body.text("model"), "messages": messages, **_sampling(body)}
    if (most := body.integer("max_tokens", 1, 1 << 31)) is not None:
        chat["max_tokens"] = most
    choice = _tool_choice(body.object("tool_choice"))
    if tools:
        chat["tools"] = tools
    if tools and choice is not None:
        chat["tool_choice"] = choice
    output = body.object("output_config").object("format")
    if output.get("type") == "json_schema":
        schema = {"name": "answer", "schema": output.object("schema").values}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif output.values:
        raise output.bad("type", "must be json_schema")
    return chat


def _tool_choice(choice: Fields) -> Any:
    if not choice.values:
        return None
    kind = choice.text("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.text("name")}}
    if kind not in TOOL_CHOICES:
        raise choice.bad("type", "must be auto, any, tool or none")
    return TOOL_CHOICES[kind]


def _sampling(body: Fields) -> dict[str, Any]:
    found = {
        "temperature": body.number("temperature", 0.0, 100.0),
        "top_p": body.number("top_p", 0.0, 1.0),
        "top_k": body.integer("top_k", -1, 1 << 31),
        "stop": body.texts("stop_sequences", 16) or None,
    }
    return {name: value for name, value in found.items() if value is not None}


def _purpose(body: Fields) -> Purpose:
    """Decided only by unambiguous marks, so that a step never counts as a side request."""
    output = body.object("output_config").object("format")
    last = _last_user_text(body)
    is_title = output.get("type") == "json_schema" or last.startswith(TITLE_START)
    if body.get("tools") == [] and is_title:
        return Purpose.SIDE
    return Purpose.COMPACTION if last.startswith(COMPACTION_START) else Purpose.STEP


def _last_user_text(body: Fields) -> str:
    last = next((m for m in reversed(body.get("messages")) if m["role"] == "user"), None)
    content = last["content"] if last else ""
    if isinstance(content, list):
        texts = [block.get("text") for block in content if block.get("type") == "text"]
        content = texts[-1] if texts else ""
    return str(content or "")


def _system(body: Fields) -> list[dict[str, Any]]:
    value = body.get("system")
    if value is None or isinstance(value, str):
        texts = [value or ""]
    else:
        texts = [_text(block) for block in body.objects("system")]
    text = "\n\n".join(t for t in texts if t and not t.startswith(BILLING_START))
    return [{"role": "system", "content": text}] if text else []


def _text(block: Fields) -> str:
    if block.get("type") not in ("text", None):
        raise block.bad("type", "must be text")
    return block.optional_text("text") or ""


def _messages(body: Fields) -> Sequence[dict[str, Any]]:
    if body.get("messages") in (None, []):
        raise body.bad("messages", "must be a non-empty list")
    return translated(body, "messages", MAX_MESSAGES, _read)


def _read(message: Fields) -> list[dict[str, Any]]:
    match message.get("role"):
        case "user":
            return list(_user(message))
        case "assistant":
            return [assistant_message(message)]
        case "system":
            return [{"role": "system", "content": joined([_text(b) for b in _content(message)])}]
        case _:
            raise message.bad("role", "must be user, assistant or system")


def _content(message: Fields) -> list[Fields]:
    """A message's blocks; a string is one text block."""
    value = message.get("content")
    if isinstance(value, str):
        return [Fields({"type": "text", "text": value}, message.name("content"))]
    if not isinstance(value, list):
        raise message.bad("content", "must be a string or a list of content blocks")
    return list(message.objects("content"))


def _user(message: Fields) -> Iterator[dict[str, Any]]:
    """One message for each tool result, and one user message for the texts between them."""
    blocks = _content(message)
    texts: list[str] = []
    for block in blocks:
        if block.get("type") == "tool_result":
            if texts:
                yield {"role": "user", "content": joined(texts)}
                texts = []
            yield _tool_result(block)
        else:
            texts.append(_user_text(block))
    if texts or not blocks:
        yield {"role": "user", "content": joined(texts)}


def _user_text(block: Fields) -> str:
    kind = block.text("type")
    if kind == "text":
        return block.optional_text("text") or ""
    if kind == "tool_reference":
        return _reference(block)
    if kind in MEDIA:
        return NOT_SHOWN.format(kind=kind)
    raise block.bad(
        "type", f"is {kind[:40]!r}: this model reads only text, so send text or tool_result"
    )


def _reference(block: Fields) -> str:
    return f"Tool {block.text('tool_name')} is available."


def _tool_result(block: Fields) -> dict[str, Any]:
    block.flag("is_error")
    call_id = block.text("tool_use_id")
    has_content = block.get("content") is not None
    texts = [_result_text(part) for part in _content(block)] if has_content else []
    return {"role": "tool", "tool_call_id": call_id, "content": joined(texts)}


def _result_text(block: Fields) -> str:
    """The block as text. A note replaces an image, so that an image does not end the rollout."""
    kind = block.text("type")
    if kind == "text":
        return block.optional_text("text") or ""
    if kind == "tool_reference":
        return _reference(block)
    return NOT_SHOWN.format(kind=kind[:40])


def assistant_message(message: Fields) -> dict[str, Any]:
    """An assistant's content blocks as one message in the gateway's own form."""
    texts, thoughts, calls = [], [], []
    for block in _content(message):
        match block.text("type"):
            case "text":
                texts.append(block.optional_text("text") or "")
            case "thinking":
                thoughts.append(block.optional_text("thinking") or "")
            case "redacted_thinking":
                continue
            case "tool_use" | "server_tool_use":
                calls.append(_tool_use(block))
            case kind:
                raise block.bad("type", f"is {kind[:40]!r}: must be text, thinking or tool_use")
    content = "" if texts == [NOTHING_VISIBLE] else joined(texts)
    found: dict[str, Any] = {"role": "assistant", "content": content}
    if any(thoughts):
        found["reasoning_content"] = joined(thoughts)
    if calls:
        found["tool_calls"] = calls
    return found


def _tool_use(block: Fields) -> dict[str, Any]:
    arguments = json.dumps(block.object("input").values, ensure_ascii=False)
    function = {"name": block.text("name"), "arguments": arguments}
    return {"id": block.text("id"), "type": "function", "function": function}


def _tool(tool: Fields) -> dict[str, Any]:
    """A function tool. Anthropic's built-in tools come without a schema, so they take any parameters."""
    name, kind = tool.text("name"), tool.optional_text("type") or "custom"
    description = tool.optional_text("description")
    if description is None:
        description = "" if kind == "custom" else f"The built-in tool {kind}."
    parameters = tool.object("input_schema").values or NO_PARAMETERS
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


# --- answers ---------------------------------------------------------------------------------


def _stop_reason(answer: Answer) -> str:
    """`tool_use` if there is a complete call, even if sampling was cut off after it."""
    if answer.message.get("tool_calls"):
        return "tool_use"
    if answer.stop_sequence is not None:
        return "stop_sequence"
    return STOP_REASONS.get(answer.finish_reason, "end_turn")


def _blocks(answer: Answer) -> list[dict[str, Any]]:
    """Thinking, text and tool use, in the order in which clients send them back."""
    message, blocks = answer.message, []
    if thinking := message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": thinking, "signature": ""})
    calls = message.get("tool_calls") or ()
    text = message.get("content") or ""
    if text.strip() or not calls:
        blocks.append({"type": "text", "text": text if text.strip() else NOTHING_VISIBLE})
    for call in calls:
        use = {"type": "tool_use", "id": call["id"], "name": call["function"]["name"]}
        blocks.append({**use, "input": arguments_object(call["function"]["arguments"])})
    return blocks


def _message(
    answer: Answer, content: list[dict[str, Any]], stop_reason: str | None
) -> dict[str, Any]:
    sampled = _tokens(answer, "completion_tokens") if stop_reason else 1
    return {
        "id": f"msg_{answer.id.removeprefix('chatcmpl-')}",
        "type": "message",
        "role": "assistant",
        "model": answer.model,
        "content": content,
        "stop_reason": stop_reason,
        "stop_sequence": answer.stop_sequence if stop_reason else None,
        "usage": {**_input_usage(answer), "output_tokens": sampled},
    }


def _input_usage(answer: Answer) -> dict[str, Any]:
    """Token counts, by which Claude Code decides when to compact."""
    return {
        "input_tokens": _tokens(answer, "prompt_tokens"),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }


def _tokens(answer: Answer, name: str) -> int:
    value = answer.usage.get(name)
    return value if isinstance(value, int) else 0


def _events(answer: Answer) -> Iterator[dict[str, Any]]:
    yield {"type": "message_start", "message": _message(answer, [], None)}
    for index, block in enumerate(_blocks(answer)):
        start, delta = _start_and_delta(block)
        yield {"type": "content_block_start", "index": index, "content_block": start}
        yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    usage = {**_input_usage(answer), "output_tokens": _tokens(answer, "completion_tokens")}
    delta = {"stop_reason": _stop_reason(answer), "stop_sequence": answer.stop_sequence}
    yield {"type": "message_delta", "delta": delta, "usage": usage}
    yield {"type": "message_stop"}


def _start_and_delta(block: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    if block["type"] == "tool_use":
        delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        return {**block, "input": {}}, delta
    kind = block["type"]
    return {**block, kind: ""}, {"type": f"{kind}_delta", kind: block[kind]}


def _event(event: dict[str, Any]) -> bytes:
    return f"event: {event['type']}\n".encode() + b"data: " + _json(event) + b"\n\n"


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def token_count(count: int) -> bytes:
    """The answer to `POST /v1/messages/count_tokens`."""
    return _json({"input_tokens": count})


# --- errors ----------------------------------------------------------------------------------


def status(refused: Refused) -> int:
    return STATUS.get(refused.status, refused.status)


def error(refused: Refused) -> bytes:
    return _json(_error(refused))


def error_event(refused: Refused) -> bytes:
    return _event(_error(refused))


def _error(refused: Refused) -> dict[str, Any]:
    fallback = "api_error" if refused.status >= 500 else "invalid_request_error"
    kind = ERROR_TYPES.get(refused.status, fallback)
    return {"type": "error", "error": {"type": kind, "message": _error_text(refused)}}


def _error_text(refused: Refused) -> str:
    """Claude Code compacts its history only if the error for a long prompt has this exact text."""
    if isinstance(refused, ContextExhausted):
        return f"prompt is too long: {refused.prompt_tokens} tokens > {refused.limit} maximum"
    if refused.code == "context_length_exceeded":
        return f"prompt is too long: {refused}"
    return str(refused)


def models(names: Sequence[str]) -> bytes:
    data = [
        {"type": "model", "id": name, "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
        for name in names
    ]
    first, last = (names[0], names[-1]) if names else (None, None)
    return _json({"data": data, "has_more": False, "first_id": first, "last_id": last})

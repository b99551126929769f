"""OpenAI Responses: request bytes -> ModelRequest, Answer -> one response or one stream of events.

Owns the wire form as codex uses it: items, namespaced tools, and reasoning items that clients send back.
The gateway stores nothing for the client, so every request must carry its whole input.
"""

import base64
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

from perdure.dialects import openai_chat
from perdure.dialects.base import MAIN, Answer, ModelRequest, Refused
from perdure.dialects.json_fields import (
    MAX_MESSAGES,
    MAX_TOOLS,
    Fields,
    joined,
    name_header,
    read_json,
)
from perdure.dialects.request_body_cache import BODIES, translated
from perdure.types import Purpose

KIND_HEADER, THREAD_HEADER = "x-openai-subagent", "thread-id"
PARENT_HEADER, SESSION_HEADER = "x-codex-parent-thread-id", "session-id"
TURN_HEADER = "x-codex-turn-metadata"
KIND_PURPOSES = {"compact": Purpose.COMPACTION, "memory_consolidation": Purpose.SIDE}
PING = b'event: keepalive\ndata: {"type": "keepalive"}\n\n'
"""An event instead of a comment, because comments do not reset codex's timeout."""
OURS = "perdure1:"
"""Marks reasoning that the gateway puts into `encrypted_content`, which clients send back unchanged."""
ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
MEDIA = ("input_image", "input_file", "input_audio")
TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
NO_PARAMETERS = {"type": "object", "properties": {}}
CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}
error, models = openai_chat.error, openai_chat.models


class Tool(NamedTuple):
    """A tool as the client names it. The model knows it by one flat name."""

    name: str
    namespace: str = ""
    custom: bool = False
    """Whether it takes free text, which the model gives as the argument `input`."""


@dataclass(frozen=True)
class ParsedRequest:
    """A parsed request, which frames its answer. `tools`: by the name that the model knows."""

    request: ModelRequest
    stream: bool
    tools: Mapping[str, Tool]

    def whole(self, answer: Answer) -> bytes:
        return _json(_response(answer, list(_items(answer, self.tools))))

    def events(self, answer: Answer) -> bytes:
        numbers = count()
        events = _events(answer, list(_items(answer, self.tools)))
        return b"".join(_event({**event, "sequence_number": next(numbers)}) for event in events)


def parse(raw: bytes, headers: Mapping[str, str]) -> ParsedRequest:
    """Raises: Refused (400), which names the field and what it must be."""
    body = BODIES.read(raw, "input", headers)
    for name in ("previous_response_id", "conversation"):
        if body.get(name) is not None:
            raise body.bad(name, "is not supported: nothing is stored, so send the whole input")
    if body.flag("background"):
        raise body.bad("background", "is not supported: leave it out and wait for the answer")
    messages = [*_instructions(body), *_messages(body)]
    named = list(_named_tools(body))
    tools = [_function(tool, fields) for tool, fields in named]
    sampling = _sampling(body)
    max_tokens = body.integer("max_output_tokens", 1, 1 << 31)
    chat = {"model": body.text("model"), "messages": messages, **sampling}
    chat |= {"tools": tools} if tools else {}
    chat |= {"max_tokens": max_tokens} if max_tokens else {}
    chat |= _tool_choice(body, bool(tools)) | _response_format(body)
    request = ModelRequest(
        model=chat["model"],
        messages=messages,
        tools=tools or None,
        sampling=sampling,
        max_tokens=max_tokens,
        body=chat,
        **_origin(headers),
    )
    return ParsedRequest(request, body.flag("stream"), {_flat(tool): tool for tool, _ in named})


def _origin(headers: Mapping[str, str]) -> dict[str, Any]:
    """Chain, parent chain and purpose, from codex's headers for sub-agent kind, thread and purpose."""
    kind = name_header(headers, KIND_HEADER)
    purpose = KIND_PURPOSES.get(kind, Purpose.STEP)
    if _request_kind(headers) == "compaction":
        purpose = Purpose.COMPACTION
    if not kind or kind == "compact":
        return {"purpose": purpose}
    parent = name_header(headers, PARENT_HEADER)
    if parent == name_header(headers, SESSION_HEADER):
        parent = MAIN
    chain = name_header(headers, THREAD_HEADER) or kind
    return {"chain": chain, "parent_chain": parent or MAIN, "purpose": purpose}


def _request_kind(headers: Mapping[str, str]) -> Any:
    """The kind that codex's metadata names. A compaction by the main agent has no other mark, because it
    runs in the thread that it summarizes."""
    try:
        metadata = read_json(headers.get(TURN_HEADER, ""))
    except (ValueError, RecursionError):  # the metadata is another client's
        return None
    return metadata.get("request_kind") if isinstance(metadata, dict) else None


def _sampling(body: Fields) -> dict[str, Any]:
    found = {
        "temperature": body.number("temperature", 0.0, 100.0),
        "top_p": body.number("top_p", 0.0, 1.0),
    }
    return {name: value for name, value in found.items() if value is not None}


def _tool_choice(body: Fields, has_tools: bool) -> dict[str, Any]:
    """The tool choice as Chat Completions writes it."""
    choice = body.get("tool_choice")
    if choice is None or not has_tools:
        return {}
    if not isinstance(choice, dict):
        return {"tool_choice": choice}
    named = body.object("tool_choice")
    if named.get("type") not in ("function", "custom"):
        raise named.bad("type", "must be function or custom: other tools are not supported")
    return {"tool_choice": {"type": "function", "function": {"name": named.text("name")}}}


def _response_format(body: Fields) -> dict[str, Any]:
    """The response format as Chat Completions writes it."""
    wished = body.object("text").object("format")
    if wished.get("type") != "json_schema":
        return {"response_format": wished.values} if wished.values else {}
    schema = {name: v for name, v in wished.values.items() if name != "type"}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


# --- input -----------------------------------------------------------------------------------


def _instructions(body: Fields) -> list[dict[str, Any]]:
    text = body.optional_text("instructions")
    return [{"role": "system", "content": text}] if text else []


def _messages(body: Fields) -> list[dict[str, Any]]:
    """Items as messages. Adjacent items of one answer become one assistant message."""
    if isinstance(text := body.get("input"), str):
        return [{"role": "user", "content": text}]
    messages: list[dict[str, Any]] = []
    for message in translated(body, "input", MAX_MESSAGES, _one):
        if message["role"] == "assistant" and messages and _goes_on(messages[-1], message):
            messages[-1] = _merged(messages[-1], message)
        else:
            messages.append(message)
    if not messages:
        raise body.bad("input", "must be a string or a non-empty list")
    return messages


def _goes_on(last: dict[str, Any], item: dict[str, Any]) -> bool:
    """Whether the item continues the answer `last`. An answer is reasoning, then text, then calls; an
    item out of this order begins a new answer."""
    if last["role"] != "assistant" or "reasoning_content" in item:
        return False
    return "tool_calls" in item or not (last["content"] or "tool_calls" in last)


def _merged(answer: dict[str, Any], item: dict[str, Any]) -> dict[str, Any]:
    """A new message, because later requests share the two given ones."""
    calls = [*answer.get("tool_calls", ()), *item.get("tool_calls", ())]
    text = answer["content"] or item["content"]
    return answer | {"content": text} | ({"tool_calls": calls} if calls else {})


def _one(item: Fields) -> list[dict[str, Any]]:
    return [_message(item)]


def _message(item: Fields) -> dict[str, Any]:
    match item.get("type"):
        case "message" | None:
            role = item.text("role")
            if role not in ROLES:
                raise item.bad("role", f"must be one of {', '.join(ROLES)}")
            return {"role": ROLES[role], "content": _content(item, "content")}
        case "reasoning":
            return {"role": "assistant", "content": "", "reasoning_content": _reasoning(item)}
        case "function_call":
            tool = Tool(item.text("name"), item.optional_text("namespace") or "")
            return _call(item, tool, item.optional_text("arguments") or "")
        case "custom_tool_call":
            arguments = {"input": item.optional_text("input") or ""}
            return _call(item, Tool(item.text("name")), json.dumps(arguments, ensure_ascii=False))
        case "function_call_output" | "custom_tool_call_output":
            content = _content(item, "output", in_result=True)
            return {"role": "tool", "tool_call_id": item.text("call_id"), "content": content}
        case kind:
            raise item.bad("type", f"is {str(kind)[:40]!r}: must be message, reasoning, "
                           "function_call(_output) or custom_tool_call(_output)")  # fmt: skip


def _call(item: Fields, tool: Tool, arguments: str) -> dict[str, Any]:
    function = {"name": _flat(tool), "arguments": arguments}
    call = {"id": item.text("call_id"), "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _content(item: Fields, key: str, *, in_result: bool = False) -> str:
    value = item.get(key)
    if value is None or isinstance(value, str):
        return value or ""
    return joined([_part(part, in_result) for part in item.objects(key)])


def _part(part: Fields, in_result: bool) -> str:
    """The part as text. A note replaces an image, so that an image does not end the rollout."""
    kind = part.text("type")
    if kind in TEXT_PARTS:
        return part.optional_text("text") or ""
    if kind == "refusal":
        return part.optional_text("refusal") or ""
    if in_result or kind in MEDIA:
        return f"[{kind[:40]} not shown: this model reads text]"
    raise part.bad("type", f"is {kind[:40]!r}: this model reads only text, so send input_text")


def _reasoning(item: Fields) -> str:
    """Reasoning that this gateway sampled, or the text that the client kept of another model's."""
    sealed = item.optional_text("encrypted_content") or ""
    if sealed.startswith(OURS):
        try:
            return base64.b64decode(sealed.removeprefix(OURS), validate=True).decode()
        except ValueError:
            raise item.bad("encrypted_content", "is not what this gateway sent") from None
    return _content(item, "content") or _content(item, "summary")


# --- tools -----------------------------------------------------------------------------------


def _named_tools(body: Fields) -> Iterator[tuple[Tool, Fields]]:
    """Tools that the client runs. Tools that are built into OpenAI's service are left out."""
    for fields in body.objects("tools", MAX_TOOLS):
        match fields.text("type"):
            case "function":
                yield Tool(fields.text("name")), fields
            case "custom":
                yield Tool(fields.text("name"), custom=True), fields
            case "namespace":
                namespace = fields.text("name")
                for inner in fields.objects("tools", MAX_TOOLS):
                    if inner.get("type") == "function":
                        yield Tool(inner.text("name"), namespace), inner


def _flat(tool: Tool) -> str:
    return f"{tool.namespace}__{tool.name}" if tool.namespace else tool.name


def _function(tool: Tool, fields: Fields) -> dict[str, Any]:
    parameters = fields.object("parameters").values or NO_PARAMETERS
    function = {
        "name": _flat(tool),
        "description": fields.optional_text("description") or "",
        "parameters": CUSTOM_PARAMETERS if tool.custom else parameters,
    }
    return {"type": "function", "function": function}


# --- answers ---------------------------------------------------------------------------------


def _suffix(answer: Answer) -> str:
    return answer.id.removeprefix("chatcmpl-")


def _items(answer: Answer, tools: Mapping[str, Tool]) -> Iterator[dict[str, Any]]:
    """The answer as items: reasoning, text, calls. At least one of them is visible."""
    message, suffix = answer.message, _suffix(answer)
    if reasoning := message.get("reasoning_content"):
        part = {"type": "reasoning_text", "text": reasoning}
        sealed = OURS + base64.b64encode(reasoning.encode()).decode()
        item = {"type": "reasoning", "id": f"rs_{suffix}", "status": "completed", "summary": []}
        yield {**item, "content": [part], "encrypted_content": sealed}
    calls = message.get("tool_calls") or ()
    if message.get("content") or not calls:
        text = message.get("content") or ""
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        item = {"type": "message", "id": f"msg_{suffix}", "status": "completed"}
        yield {**item, "role": "assistant", "content": [part]}
    for call in calls:
        function = call["function"]
        tool = tools.get(function["name"], Tool(function["name"]))
        yield _call_item(call["id"], tool, function["arguments"])


def _call_item(call_id: str, tool: Tool, arguments: str) -> dict[str, Any]:
    ids = {"id": f"fc_{call_id.removeprefix('call_')}", "call_id": call_id}
    if tool.custom:
        known = {"type": "custom_tool_call", "status": "completed", "name": tool.name}
        return {**known, **ids, "input": _input(arguments)}
    known = {"type": "function_call", "status": "completed", "name": tool.name}
    known |= {"namespace": tool.namespace} if tool.namespace else {}
    return {**known, **ids, "arguments": arguments}


def _input(arguments: str) -> str:
    try:
        value = read_json(arguments)
    except (ValueError, RecursionError):
        return arguments
    text = value.get("input") if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


def _response(answer: Answer, items: list[dict[str, Any]], status: str = "") -> dict[str, Any]:
    cut = answer.finish_reason == "length"
    status = status or ("incomplete" if cut else "completed")
    return {
        "id": f"resp_{_suffix(answer)}",
        "object": "response",
        "created_at": answer.created,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": None,
        "metadata": {},
        "model": answer.model,
        "output": items,
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "store": False,
        "temperature": None,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "truncation": "disabled",
        "usage": None if status == "in_progress" else _usage(answer),
    }


def _usage(answer: Answer) -> dict[str, Any]:
    prompt, sampled = (
        value if isinstance(value := answer.usage.get(name), int) else 0
        for name in ("prompt_tokens", "completion_tokens")
    )
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + sampled,
    }


def _events(answer: Answer, items: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    started = _response(answer, [], "in_progress")
    yield {"type": "response.created", "response": started}
    yield {"type": "response.in_progress", "response": started}
    for index, item in enumerate(items):
        opened = {**item, "status": "in_progress", **_emptied(item)}
        yield {"type": "response.output_item.added", "output_index": index, "item": opened}
        place = {"item_id": item["id"], "output_index": index}
        yield from ({**event, **place} for event in _inner_events(item))
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    # codex takes `response.incomplete` for a broken stream and repeats the request. So the event says
    # `completed`, and only `status` says `incomplete`.
    yield {"type": "response.completed", "response": _response(answer, items)}


def _emptied(item: dict[str, Any]) -> dict[str, Any]:
    empty: dict[str, Any] = {"content": [], "arguments": "", "input": "", "encrypted_content": None}
    return {name: value for name, value in empty.items() if name in item}


def _inner_events(item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if item["type"] == "custom_tool_call":
        yield {"type": "response.custom_tool_call_input.delta", "delta": item["input"]}
        yield {"type": "response.custom_tool_call_input.done", "input": item["input"]}
    elif item["type"] == "function_call":
        call, arguments = "response.function_call_arguments", item["arguments"]
        yield {"type": f"{call}.delta", "delta": arguments}
        yield {"type": f"{call}.done", "name": item["name"], "arguments": arguments}
    else:
        yield from _part_events(item["content"][0])


def _part_events(part: dict[str, Any]) -> Iterator[dict[str, Any]]:
    at: dict[str, Any] = {"content_index": 0}
    kind = f"response.{part['type']}"
    logprobs: dict[str, Any] = {"logprobs": []} if "logprobs" in part else {}
    yield {"type": "response.content_part.added", **at, "part": {**part, "text": ""}}
    if part["text"]:
        yield {"type": f"{kind}.delta", **at, "delta": part["text"], **logprobs}
    yield {"type": f"{kind}.done", **at, "text": part["text"], **logprobs}
    yield {"type": "response.content_part.done", **at, "part": part}


def _event(event: dict[str, Any]) -> bytes:
    return f"event: {event['type']}\n".encode() + b"data: " + _json(event) + b"\n\n"


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


# --- errors ----------------------------------------------------------------------------------


def status(refused: Refused) -> int:
    """503 instead of 429: codex gives up at once on 429, but repeats the request on 503."""
    return 503 if refused.status == 429 else refused.status


def error_event(refused: Refused) -> bytes:
    failure = {"code": refused.code, "message": str(refused)}
    response = {"id": "resp_failed", "object": "response", "status": "failed", "output": []}
    event = {"type": "response.failed", "response": {**response, "error": failure}}
    return _event({**event, "sequence_number": 0})

"""Google's generateContent: request bytes -> ModelRequest, Answer -> one response or one stream.

Owns the wire form as Gemini CLI and Google's clients use it: parts, function calls, and thought
signatures, which clients send back. Unknown fields and hints (thinking budgets, safety settings) are
ignored; what changes the answer and cannot be done is refused.
"""

import base64
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perdure.dialects.base import MAIN, Answer, ContextExhausted, ModelRequest, Refused
from perdure.dialects.json_fields import (
    MAX_MESSAGES,
    MAX_TOOLS,
    Fields,
    arguments_object,
    as_fields,
    bad,
    joined,
)
from perdure.dialects.request_body_cache import BODIES, translated
from perdure.types import Purpose

GENERATE, STREAM, COUNT = "generateContent", "streamGenerateContent", "countTokens"
PATH = re.compile(rf"/v1(?:beta)?/models/(.+):({GENERATE}|{STREAM}|{COUNT})")
GEMINI_CLI, GEMINI_CLI_SUMMARY = "GeminiCLI", "<state_snapshot>"
SUB_AGENTS_TOOL = "complete_task"
"""The tool with which Gemini CLI's sub-agents end. The main agent does not have it."""
SIGNATURE_PREFIX = b"perdure1:"
"""Marks reasoning that the gateway puts into `thoughtSignature`, which clients send back unchanged."""
URL_SAFE = str.maketrans("-_", "+/")
NOT_SHOWN = "[{kind} not shown: this model reads text]"
NO_PARAMETERS = {"type": "object", "properties": {}}
SAMPLING = {
    "temperature": ("temperature", 0.0, 100.0),
    "topP": ("top_p", 0.0, 1.0),
    "presencePenalty": ("presence_penalty", -2.0, 2.0),
    "frequencyPenalty": ("frequency_penalty", -2.0, 2.0),
}
SAMPLING_INTEGERS = {"topK": ("top_k", -1, 1 << 31), "seed": ("seed", -(1 << 62), 1 << 62)}
UNSUPPORTED = ("responseLogprobs", "logprobs", "speechConfig", "imageConfig")
MODES = {"MODE_UNSPECIFIED": "auto", "AUTO": "auto", "ANY": "required", "NONE": "none"}
FINISH_REASONS = {"length": "MAX_TOKENS", "content_filter": "SAFETY"}
ERROR_STATUSES = {
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    408: "DEADLINE_EXCEEDED",
    409: "ABORTED",
    429: "RESOURCE_EXHAUSTED",
    503: "UNAVAILABLE",
}


@dataclass(frozen=True)
class ParsedRequest:
    """A parsed request, which frames its answer. `thoughts`: whether the client wants to see the
    reasoning."""

    request: ModelRequest
    stream: bool
    thoughts: bool = False

    def whole(self, answer: Answer) -> bytes:
        return _json(_response(answer, list(_answer_parts(answer, self.thoughts)), ends=True))

    def events(self, answer: Answer) -> bytes:
        *parts, last = _answer_parts(answer, self.thoughts)
        responses = [_response(answer, [part], ends=False) for part in parts]
        responses.append(_response(answer, [last], ends=True))
        return b"".join(b"data: " + _json(response) + b"\n\n" for response in responses)


@dataclass(frozen=True)
class Gemini:
    """The dialect for one URL, because the URL names the model and the method."""

    model: str = ""
    method: str = ""
    is_sse: bool = False

    @property
    def PING(self) -> bytes:
        """White space, because Google's client takes a comment for a broken event."""
        return b"\n"

    def parse(self, raw: bytes, headers: Mapping[str, str]) -> ParsedRequest:
        """Raises: Refused (400), which names the field and what it must be."""
        if self.method == STREAM and not self.is_sse:
            raise bad("alt", f"must be sse: call {STREAM}?alt=sse")
        body = _camel_case_keys(BODIES.read(raw, "contents", headers))
        if self.method == COUNT and body.get("generateContentRequest") is not None:
            body = _camel_case_keys(body.object("generateContentRequest"))
        if body.get("cachedContent") is not None:
            raise body.bad("cachedContent", "is not supported: send the whole contents")
        config = _camel_case_keys(body.object("generationConfig"))
        messages = [*_system(body), *_messages(body)]
        tools = list(_tools(body))
        sampling = _sampling(config)
        max_tokens = _integer(config, "maxOutputTokens", 1, 1 << 31)
        chat = {"model": self.model, "messages": messages, **sampling}
        chat |= {"tools": tools} if tools else {}
        chat |= {"max_tokens": max_tokens} if max_tokens else {}
        chat |= _tool_choice(body, tools) | _response_format(config)
        request = ModelRequest(
            model=self.model,
            messages=messages,
            tools=tools or None,
            sampling=sampling,
            max_tokens=max_tokens,
            body=chat,
            **self._origin(headers, messages, tools),
        )
        thoughts = _camel_case_keys(config.object("thinkingConfig")).flag("includeThoughts")
        return ParsedRequest(request, self.method == STREAM, thoughts)

    def _origin(
        self,
        headers: Mapping[str, str],
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]],
    ) -> dict[str, Any]:
        """Chain, parent chain and purpose. Gemini CLI and its sub-agents stream all their steps and
        nothing else. Sub-agents have no names, so a digest of the task names the chain."""
        if not headers.get("user-agent", "").startswith(GEMINI_CLI):
            return {}
        if self.method != STREAM:
            is_summary = GEMINI_CLI_SUMMARY in messages[-1]["content"]
            return {"purpose": Purpose.COMPACTION if is_summary else Purpose.SIDE}
        if not any(tool["function"]["name"] == SUB_AGENTS_TOOL for tool in tools):
            return {}
        task = next(message["content"] for message in messages if message["role"] != "system")
        name = hashlib.sha256(task.encode()).hexdigest()[:12]
        return {"chain": f"sub-agent-{name}", "parent_chain": MAIN}

    def status(self, refused: Refused) -> int:
        return refused.status

    def error(self, refused: Refused) -> bytes:
        fallback = "INTERNAL" if refused.status >= 500 else "INVALID_ARGUMENT"
        message = _error_text(refused)
        detail: dict[str, Any] = {
            "code": refused.status,
            "message": message,
            "status": ERROR_STATUSES.get(refused.status, fallback),
        }
        if refused.param is not None:
            violation = {"field": refused.param, "description": message}
            kind = "type.googleapis.com/google.rpc.BadRequest"
            detail["details"] = [{"@type": kind, "fieldViolations": [violation]}]
        return _json({"error": detail})

    def error_event(self, refused: Refused) -> bytes:
        """Plain JSON, because Google's clients take an event with an error for an empty answer."""
        return self.error(refused) + b"\n"

    def models(self, names: Sequence[str]) -> bytes:
        methods = [GENERATE, COUNT]
        models = [
            {"name": f"models/{name}", "displayName": name, "supportedGenerationMethods": methods}
            for name in names
        ]
        return _json({"models": models})

    def token_count(self, count: int) -> bytes:
        """The answer to `countTokens`."""
        return _json({"totalTokens": count})


def dialect_of_url(path: str, query: str = "") -> Gemini | None:
    """The dialect of a URL of Google's API; None for another URL."""
    if (found := PATH.fullmatch(path)) is not None:
        return Gemini(found[1], found[2], "alt=sse" in query.split("&"))
    return Gemini() if path.startswith("/v1beta/") else None


def is_completion_path(path: str) -> bool:
    """Whether calls to this path sample an answer."""
    found = PATH.fullmatch(path)
    return found is not None and found[2] != COUNT


# --- requests --------------------------------------------------------------------------------


def _camel_case_keys(fields: Fields) -> Fields:
    """The object with its own keys in camel case. Google accepts both spellings of a field."""
    if not any("_" in key for key in fields.values):
        return fields
    values = {
        re.sub("_([a-z])", lambda found: found[1].upper(), key): value
        for key, value in fields.values.items()
    }
    return Fields(values, fields.path)


def _integer(fields: Fields, key: str, low: int, high: int) -> int | None:
    """Google's Python client sends some integers as 64.0."""
    value = fields.get(key)
    if isinstance(value, float) and value.is_integer():
        fields = Fields({key: int(value)}, fields.path)
    return fields.integer(key, low, high)


def _sampling(config: Fields) -> dict[str, Any]:
    for name in UNSUPPORTED:
        if config.get(name) not in (None, False):
            raise config.bad(name, "is not supported: leave it out")
    if config.get("candidateCount") not in (None, 1):
        raise config.bad("candidateCount", "must be 1: a call samples one answer")
    if any(kind != "TEXT" for kind in config.texts("responseModalities", 8)):
        raise config.bad("responseModalities", "must be TEXT")
    found: dict[str, Any] = {
        name: config.number(key, low, high) for key, (name, low, high) in SAMPLING.items()
    }
    for key, (name, least, most) in SAMPLING_INTEGERS.items():
        found[name] = _integer(config, key, least, most)
    found["stop"] = config.texts("stopSequences", 16) or None
    return {name: value for name, value in found.items() if value is not None}


def _response_format(config: Fields) -> dict[str, Any]:
    """The response format as Chat Completions writes it."""
    kind = config.optional_text("responseMimeType") or "text/plain"
    schema = config.object("responseJsonSchema").values
    schema = schema or _json_schema(config.object("responseSchema"))
    if kind == "application/json":
        if not schema:
            return {"response_format": {"type": "json_object"}}
        named = {"name": "answer", "schema": schema}
        return {"response_format": {"type": "json_schema", "json_schema": named}}
    if kind != "text/plain" or schema:
        allowed = "application/json" if schema else "text/plain or application/json"
        raise config.bad("responseMimeType", f"must be {allowed}")
    return {}


def _system(body: Fields) -> list[dict[str, Any]]:
    parts = _parts(body.object("systemInstruction"))
    text = joined([_text(part) for part in parts])
    return [{"role": "system", "content": text}] if text else []


def _messages(body: Fields) -> list[dict[str, Any]]:
    found = list(translated(body, "contents", MAX_MESSAGES, _chat_messages))
    if not found:
        raise body.bad("contents", "must be a non-empty list")
    return found if all(map(_has_ids, found)) else list(_with_ids(found))


def _has_ids(message: dict[str, Any]) -> bool:
    if message["role"] == "tool":
        return bool(message["tool_call_id"])
    return all(call["id"] for call in message.get("tool_calls", ()))


def _with_ids(messages: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Clients may leave ids out. Then a result belongs to the next call of the same name."""
    waiting: list[dict[str, Any]] = []
    for number, message in enumerate(messages):
        if message.get("tool_calls"):
            calls = enumerate(message["tool_calls"])
            waiting = [{**call, "id": call["id"] or f"call_{number}_{i}"} for i, call in calls]
            yield {**message, "tool_calls": list(waiting)}
        elif message["role"] == "tool" and not message["tool_call_id"]:
            name = message["name"]
            call = next((call for call in waiting if call["function"]["name"] == name), None)
            if call is not None:
                waiting.remove(call)
            call_id = call["id"] if call is not None else name
            yield {"role": "tool", "tool_call_id": call_id, "content": message["content"]}
        else:
            yield message


def _chat_messages(content: Fields) -> list[dict[str, Any]]:
    match content.get("role"):
        case "user" | "function" | None:
            return list(_user_messages(content))
        case "model":
            return [_assistant_message(content)]
        case _:
            raise content.bad("role", "must be user or model")


def _parts(content: Fields) -> list[Fields]:
    """A content's parts; Google accepts a single part without a list."""
    value = content.get("parts")
    if isinstance(value, dict):
        return [_camel_case_keys(Fields(value, content.name("parts")))]
    return [_camel_case_keys(part) for part in content.objects("parts")]


def _user_messages(content: Fields) -> Iterator[dict[str, Any]]:
    """One tool message for each function response, and one user message for the texts between
    them."""
    parts = _parts(content)
    texts: list[str] = []
    for part in parts:
        if part.get("functionResponse") is None:
            texts.append(_text(part))
            continue
        if texts:
            yield {"role": "user", "content": joined(texts)}
            texts = []
        yield _tool_message(_camel_case_keys(part.object("functionResponse")))
    if texts or not parts:
        yield {"role": "user", "content": joined(texts)}


def _text(part: Fields) -> str:
    """The part as text. A note replaces an image, so that an image does not end the rollout."""
    for name in ("inlineData", "fileData"):
        if part.get(name) is not None:
            kind = _camel_case_keys(part.object(name)).optional_text("mimeType") or "file"
            return NOT_SHOWN.format(kind=kind[:40])
    if part.get("text") is None:
        raise bad(
            part.path, "must have text, inlineData, fileData or a function's call or response"
        )
    return part.optional_text("text") or ""


def _tool_message(response: Fields) -> dict[str, Any]:
    name, call_id = response.text("name"), response.optional_text("id") or ""
    given = response.object("response").values
    output = given.get("output") if len(given) == 1 else None
    content = output if isinstance(output, str) else json.dumps(given, ensure_ascii=False)
    shown = [_text(_camel_case_keys(part)) for part in response.objects("parts")]
    message = {"role": "tool", "tool_call_id": call_id, "content": joined([content, *shown])}
    return message if call_id else {**message, "name": name}


def _assistant_message(content: Fields) -> dict[str, Any]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    signed = ""
    for part in _parts(content):
        signed = signed or _signed_reasoning(part)
        if part.get("functionCall") is not None:
            calls.append(_tool_call(_camel_case_keys(part.object("functionCall"))))
        elif part.get("text") is not None or part.get("thoughtSignature") is None:
            (thoughts if part.flag("thought") else texts).append(_text(part))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if reasoning := signed or "".join(thoughts):
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _tool_call(call: Fields) -> dict[str, Any]:
    arguments = json.dumps(call.object("args").values, ensure_ascii=False)
    function = {"name": call.text("name"), "arguments": arguments}
    return {"id": call.optional_text("id") or "", "type": "function", "function": function}


def _signed_reasoning(part: Fields) -> str:
    """Reasoning that this gateway sampled; "" for a signature of another model or client."""
    signature = part.optional_text("thoughtSignature") or ""
    try:
        data = base64.b64decode(signature.translate(URL_SAFE), validate=True)
    except ValueError:
        return ""
    return (
        data.removeprefix(SIGNATURE_PREFIX).decode(errors="replace")
        if data.startswith(SIGNATURE_PREFIX)
        else ""
    )


# --- tools -----------------------------------------------------------------------------------


def _tools(body: Fields) -> Iterator[dict[str, Any]]:
    for tool in map(_camel_case_keys, body.objects("tools", MAX_TOOLS)):
        for name, value in tool.values.items():
            if name != "functionDeclarations" and value is not None:
                raise tool.bad(name, "is not supported: this gateway runs none of Google's tools")
        for declared in map(_camel_case_keys, tool.objects("functionDeclarations", MAX_TOOLS)):
            schema = declared.object("parametersJsonSchema").values
            schema = schema or _json_schema(declared.object("parameters"))
            function = {
                "name": declared.text("name"),
                "description": declared.optional_text("description") or "",
                "parameters": schema or NO_PARAMETERS,
            }
            yield {"type": "function", "function": function}


def _json_schema(schema: Fields) -> dict[str, Any]:
    """Google's own schema as JSON Schema: types in lower case, `nullable` as a type."""
    schema = _camel_case_keys(schema)
    found: dict[str, Any] = {}
    for name, value in schema.values.items():
        match name:
            case "type":
                found[name] = schema.text(name).lower()
            case "nullable" | "propertyOrdering":
                continue
            case "properties":
                inner = schema.object(name)
                found[name] = {
                    key: _json_schema(as_fields(one, inner.name(key)))
                    for key, one in inner.values.items()
                }
            case "items":
                found[name] = _json_schema(schema.object(name))
            case "anyOf" | "prefixItems":
                found[name] = [_json_schema(one) for one in schema.objects(name)]
            case _:
                is_count = name.startswith(("min", "max")) and isinstance(value, str)
                found[name] = int(value) if is_count and value.isdecimal() else value
    if schema.flag("nullable") and "type" in found:
        found["type"] = [found["type"], "null"]
    return found


def _tool_choice(body: Fields, tools: list[dict[str, Any]]) -> dict[str, Any]:
    """The tool choice as Chat Completions writes it."""
    config = _camel_case_keys(
        _camel_case_keys(body.object("toolConfig")).object("functionCallingConfig")
    )
    mode = config.optional_text("mode") or "AUTO"
    names = config.texts("allowedFunctionNames", MAX_TOOLS)
    if mode not in MODES:
        raise config.bad("mode", "must be AUTO, ANY or NONE")
    if not tools:
        return {}
    if names and (mode != "ANY" or len(names) > 1):
        raise config.bad("allowedFunctionNames", "must be one name, with mode ANY")
    choice: Any = MODES[mode]
    if names:
        choice = {"type": "function", "function": {"name": names[0]}}
    return {"tool_choice": choice} if choice != "auto" else {}


# --- answers ---------------------------------------------------------------------------------


def _answer_parts(answer: Answer, thoughts: bool) -> Iterator[dict[str, Any]]:
    """Thoughts, then text, then calls. As in Google's answers, the first call has the signature, or
    the text if there is no call."""
    message = answer.message
    reasoning = message.get("reasoning_content") or ""
    if reasoning and thoughts:
        yield {"text": reasoning, "thought": True}
    signature: dict[str, str] = {}
    if reasoning:
        signature["thoughtSignature"] = base64.b64encode(
            SIGNATURE_PREFIX + reasoning.encode()
        ).decode()
    calls = message.get("tool_calls") or ()
    text = message.get("content") or ""
    if text or not calls:
        yield {"text": text, **(signature if not calls else {})}
    for number, call in enumerate(calls):
        function = call["function"]
        arguments = arguments_object(function["arguments"])
        called = {"id": call["id"], "name": function["name"], "args": arguments}
        yield {"functionCall": called, **(signature if number == 0 else {})}


def _response(answer: Answer, parts: list[dict[str, Any]], *, ends: bool) -> dict[str, Any]:
    candidate: dict[str, Any] = {"content": {"role": "model", "parts": parts}, "index": 0}
    if ends:
        candidate["finishReason"] = _finish_reason(answer)
    return {
        "candidates": [candidate],
        "usageMetadata": _usage(answer),
        "modelVersion": answer.model,
        "responseId": answer.id.removeprefix("chatcmpl-"),
    }


def _finish_reason(answer: Answer) -> str:
    """`STOP` if there is a complete call, even if sampling was cut off after it."""
    if answer.message.get("tool_calls"):
        return "STOP"
    return FINISH_REASONS.get(answer.finish_reason, "STOP")


def _usage(answer: Answer) -> dict[str, int]:
    prompt, sampled = (
        value if isinstance(value := answer.usage.get(name), int) else 0
        for name in ("prompt_tokens", "completion_tokens")
    )
    return {
        "promptTokenCount": prompt,
        "candidatesTokenCount": sampled,
        "totalTokenCount": prompt + sampled,
    }


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def _error_text(refused: Refused) -> str:
    """Google's text for a long prompt, by which clients recognize it."""
    if isinstance(refused, ContextExhausted):
        return (
            f"The input token count ({refused.prompt_tokens}) exceeds the maximum number of tokens "
            f"allowed ({refused.limit})."
        )
    if refused.code == "context_length_exceeded":
        return f"The input token count exceeds the maximum number of tokens allowed: {refused}"
    return str(refused)

"""Tool calls in the text of a model whose format is known only by its chat template.

Reads the four notations that open models are trained on. A call that does not parse is kept with the
reason and never repaired.
"""

import json
import re
from typing import Any

from renderers.base import ParsedToolCall, ToolCallParseStatus

_BLOCK = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.S)
_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*?)</function>\s*", re.S)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.S)
_MISTRAL = re.compile(r"\[TOOL_CALLS\](.*)", re.S)
_MISTRAL_NAMED = re.compile(r"\s*([\w.-]+)\[ARGS\](.*?)(?=\[TOOL_CALLS\]|\Z)", re.S)
_PYTHON_TAG = "<|python_tag|>"

Tools = list[dict[str, Any]] | None
Split = tuple[str, list[ParsedToolCall]]


def split_calls(text: str, tools: Tools) -> Split:
    """The text without its tool calls, and the calls in order.

    Example: split_calls('ok<tool_call>{"name": "ls", "arguments": {}}</tool_call>', None)
    """
    for notation in (_tagged, _mistral, _bare):
        if (found := notation(text, tools)) is not None:
            return found
    return text, []


def _tagged(text: str, tools: Tools) -> Split | None:
    """`<tool_call>` around JSON (Hermes, Qwen) or around `<function=...>` (Qwen3-Coder)."""
    blocks = list(_BLOCK.finditer(text))
    if not blocks:
        return None
    calls = [_block(found[1], closed=bool(found[2]), tools=tools) for found in blocks]
    return _BLOCK.sub("", text).strip(), calls


def _block(raw: str, *, closed: bool, tools: Tools) -> ParsedToolCall:
    if not closed:
        return _bad(raw, ToolCallParseStatus.UNCLOSED_BLOCK)
    if (found := _FUNCTION.fullmatch(raw)) is not None:
        kinds = _kinds(found[1], tools)
        arguments = {
            name: _value(value, kinds.get(name)) for name, value in _PARAMETER.findall(found[2])
        }
        return ParsedToolCall(raw=raw, name=found[1], arguments=arguments)
    return _json_call(raw)


def _kinds(function: str, tools: Tools) -> dict[str, Any]:
    """Parameter -> its type as the tool declares it."""
    for tool in tools or ():
        declared = tool.get("function", {})
        if declared.get("name") == function:
            properties = (declared.get("parameters") or {}).get("properties") or {}
            return {
                name: schema.get("type")
                for name, schema in properties.items()
                if isinstance(schema, dict)
            }
    return {}


def _value(text: str, kind: Any) -> Any:
    """Verbatim if the tool declares a string; otherwise JSON if it parses, else verbatim."""
    if kind == "string":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _mistral(text: str, tools: Tools) -> Split | None:
    """`[TOOL_CALLS]` before a JSON list, or before `name[ARGS]{...}`."""
    found = _MISTRAL.search(text)
    if found is None:
        return None
    named = _MISTRAL_NAMED.findall(found[1])
    calls = [_named(*call) for call in named] or _list(found[1])
    return text[: found.start()].strip(), calls


def _named(name: str, arguments: str) -> ParsedToolCall:
    raw = f"{name}[ARGS]{arguments}"
    parsed = _object(arguments)
    if parsed is None:
        return _bad(raw, ToolCallParseStatus.INVALID_JSON)
    return ParsedToolCall(raw=raw, name=name, arguments=parsed)


def _list(raw: str) -> list[ParsedToolCall]:
    try:
        items = json.loads(raw)
    except (ValueError, RecursionError):
        return [_bad(raw, ToolCallParseStatus.INVALID_JSON)]
    if not isinstance(items, list):
        return [_bad(raw, ToolCallParseStatus.MALFORMED_STRUCTURE)]
    return [_json_call(json.dumps(item)) for item in items]


def _bare(text: str, tools: Tools) -> Split | None:
    """Llama 3: the whole answer is one JSON call of a tool that was offered."""
    body = text.strip().removeprefix(_PYTHON_TAG)
    parsed = _object(body) if tools else None
    if parsed is None or parsed.get("name") not in {
        tool.get("function", {}).get("name") for tool in tools or ()
    }:
        return None
    return "", [_json_call(body)]


def _json_call(raw: str) -> ParsedToolCall:
    parsed = _object(raw)
    if parsed is None:
        return _bad(raw, ToolCallParseStatus.INVALID_JSON)
    name = parsed.get("name")
    if not isinstance(name, str) or not name:
        return _bad(raw, ToolCallParseStatus.MISSING_NAME)
    arguments = parsed.get("arguments", parsed.get("parameters", {}))
    if not isinstance(arguments, dict | str):
        return _bad(raw, ToolCallParseStatus.MALFORMED_STRUCTURE)
    return ParsedToolCall(raw=raw, name=name, arguments=arguments)


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _bad(raw: str, status: ToolCallParseStatus) -> ParsedToolCall:
    return ParsedToolCall(raw=raw, status=status)

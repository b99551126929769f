"""`{"name": ..., "parameters": {...}}` as the whole answer: Llama 3.1, 3.2, 3.3, and Llama 4 with Meta's
template. `;` separates parallel calls."""

import json

from perdure.gateway.rendering.parsed_response import ParsedToolCall
from perdure.gateway.rendering.tool_call_parsers.base import (
    Split,
    ToolCallParser,
    Tools,
    json_call,
    offered,
)

_TAGS = ("<|python_tag|>", "<|python_start|>", "<|python_end|>")
_JSON = json.JSONDecoder()


class Llama3Json(ToolCallParser):
    name = "llama3_json"
    stops = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|eot|>", "<|eom|>")

    def split(self, text: str, tools: Tools) -> Split:
        body = text.strip()
        for tag in _TAGS:
            body = body.removeprefix(tag).removesuffix(tag)
        calls = _objects(body.strip())
        names = {name for name, _ in offered(tools)}
        known = calls and all(call.name in names for call in calls)
        return Split("", calls) if known else Split(text, [])


def _objects(text: str) -> list[ParsedToolCall]:
    """The calls of a text that consists only of calls; otherwise none."""
    calls, at = [], 0
    while at < len(text):
        try:
            _, end = _JSON.raw_decode(text, at)
        except (ValueError, RecursionError):
            return []
        calls.append(json_call(text[at:end], text[at:end]))
        rest = text[end:].lstrip(" \n;")
        at = len(text) - len(rest)
    return calls

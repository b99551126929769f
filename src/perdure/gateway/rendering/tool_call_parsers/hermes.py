"""`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen2.5, Qwen3."""

import re

from perdure.gateway.rendering.parsed_response import ParsedToolCall, ToolCallParseStatus
from perdure.gateway.rendering.tool_call_parsers.base import (
    Split,
    ToolCallParser,
    Tools,
    bad,
    json_call,
)

_OPENING = "<tool_call>"
_BLOCK = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.S)


class Hermes(ToolCallParser):
    name = "hermes"
    stops = ("<|im_end|>", "<|endoftext|>")

    def _reasoning(self, text: str, opened: bool) -> tuple[str | None, bool, str]:
        """A call also ends the reasoning, because the model often omits `</think>` before it."""
        reasoning, complete, rest = super()._reasoning(text, opened)
        if complete or reasoning is None or (at := reasoning.find(_OPENING)) < 0:
            return reasoning, complete, rest
        return reasoning[:at].strip("\n"), True, reasoning[at:]

    def split(self, text: str, tools: Tools) -> Split:
        calls = [_call(found) for found in _BLOCK.finditer(text)]
        return Split(_BLOCK.sub("", text).strip() if calls else text, calls)


def _call(found: re.Match[str]) -> ParsedToolCall:
    if not found[2]:
        return bad(found[0], ToolCallParseStatus.UNCLOSED_BLOCK)
    return json_call(found[0], found[1])

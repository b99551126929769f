"""`<TOOLCALL>[{"name": ..., "arguments": {...}}]</TOOLCALL>`: Nemotron Nano v2, Llama-Nemotron.
Nemotron 3 writes calls as Qwen3-Coder does."""

import re

from perdure.gateway.rendering.parsed_response import ParsedToolCall, ToolCallParseStatus
from perdure.gateway.rendering.tool_call_parsers.base import (
    Split,
    ToolCallParser,
    Tools,
    bad,
    json_calls,
)

_BLOCK = re.compile(r"<TOOLCALL>(.*?)(</TOOLCALL>|\Z)", re.S)


class Nemotron(ToolCallParser):
    name = "nemotron_json"
    stops = ("<SPECIAL_12>", "<|eot_id|>")

    def split(self, text: str, tools: Tools) -> Split:
        found = list(_BLOCK.finditer(text))
        calls = [call for block in found for call in _calls(block)]
        return Split(_BLOCK.sub("", text).strip() if found else text, calls)


def _calls(block: re.Match[str]) -> list[ParsedToolCall]:
    if not block[2]:
        return [bad(block[0], ToolCallParseStatus.UNCLOSED_BLOCK)]
    return json_calls(block[0], block[1])

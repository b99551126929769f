"""DeepSeek's tool-call parser, which puts calls between special tokens.

V3, R1: `<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME`, a newline and a block of fenced JSON.
V3.1, V3.2-Exp: `<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`.
"""

import re

from perdure.gateway.rendering.parsed_response import ParsedToolCall, ToolCallParseStatus
from perdure.gateway.rendering.tool_call_parsers.base import (
    Split,
    ToolCallParser,
    Tools,
    bad,
    named_call,
)

_SECTION = re.compile(r"<｜tool▁calls▁begin｜>(.*?)(?:<｜tool▁calls▁end｜>|\Z)", re.S)
_CALL = re.compile(
    r"<｜tool▁call▁begin｜>(?P<head>.*?)<｜tool▁sep｜>(?P<body>.*?)(?P<end><｜tool▁call▁end｜>|\Z)",
    re.S,
)
_FENCED = re.compile(r"(?P<name>[^\n]*)\n```(?:json)?\n(?P<json>.*?)\n?```\s*", re.S)


class DeepSeekV31(ToolCallParser):
    name = "deepseek_v31"
    stops = ("<｜end▁of▁sentence｜>",)

    def split(self, text: str, tools: Tools) -> Split:
        sections = list(_SECTION.finditer(text))
        if not sections:
            return Split(text, [])
        calls = [call for section in sections for call in self._section(section)]
        return Split(_SECTION.sub("", text).strip(), calls)

    def _section(self, section: re.Match[str]) -> list[ParsedToolCall]:
        found = [
            self._call(call) if call["end"] else bad(call[0], ToolCallParseStatus.UNCLOSED_BLOCK)
            for call in _CALL.finditer(section[1])
        ]
        return found or [bad(section[0], ToolCallParseStatus.MALFORMED_STRUCTURE)]

    def _call(self, found: re.Match[str]) -> ParsedToolCall:
        return named_call(found[0], found["head"].strip(), found["body"].strip())


class DeepSeekV3(DeepSeekV31):
    name = "deepseek_v3"

    def _call(self, found: re.Match[str]) -> ParsedToolCall:
        fenced = _FENCED.fullmatch(found["body"])
        if fenced is None:
            return bad(found[0], ToolCallParseStatus.MALFORMED_STRUCTURE)
        return named_call(found[0], fenced["name"].strip(), fenced["json"])

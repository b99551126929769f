"""`<invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>` inside a block.

MiniMax M2, M2.1, M2.5: the block is `<minimax:tool_call>`, and the tool's schema gives a value's type.
DeepSeek V3.2: every tag carries `｜DSML｜`, and `string="true"` or `"false"` gives the type.
"""

import json
import re

from perdure.gateway.rendering.parsed_response import ParsedToolCall, ToolCallParseStatus
from perdure.gateway.rendering.tool_call_parsers.base import (
    Split,
    ToolCallParser,
    Tools,
    bad,
    parameters_of,
    typed,
)


class MinimaxM2(ToolCallParser):
    name = "minimax_m2"
    stops = ("[e~[",)
    _block, _prefix = "minimax:tool_call", ""

    def split(self, text: str, tools: Tools) -> Split:
        block = re.compile(f"<{self._block}>(.*?)(</{self._block}>|\\Z)", re.S)
        found = list(block.finditer(text))
        calls = [call for one in found for call in self._calls(one, tools)]
        return Split(block.sub("", text).strip() if found else text, calls)

    def _calls(self, block: re.Match[str], tools: Tools) -> list[ParsedToolCall]:
        p = self._prefix
        invoke = re.compile(f"<{p}invoke name=(.*?)>(.*?)(</{p}invoke>|\\Z)", re.S)
        found = [self._call(one, tools) for one in invoke.finditer(block[1])]
        unread = ToolCallParseStatus.MALFORMED_STRUCTURE
        return found or [bad(block[0], unread if block[2] else ToolCallParseStatus.UNCLOSED_BLOCK)]

    def _call(self, found: re.Match[str], tools: Tools) -> ParsedToolCall:
        name = found[1].strip().strip("\"'")
        if not found[3]:
            return bad(found[0], ToolCallParseStatus.UNCLOSED_BLOCK)
        if not name:
            return bad(found[0], ToolCallParseStatus.MISSING_NAME)
        p, schemas = self._prefix, parameters_of(name, tools)
        parameter = re.compile(
            f'<{p}parameter name="?([^">]+)"?(?: string="(true|false)")?>(.*?)</{p}parameter>', re.S
        )
        pairs = parameter.findall(found[2])
        arguments = {key: _value(text, said, schemas.get(key)) for key, said, text in pairs}
        return ParsedToolCall(raw=found[0], name=name, arguments=arguments)


class DeepSeekV32(MinimaxM2):
    name = "deepseek_v32"
    stops = ("<｜end▁of▁sentence｜>",)
    _block, _prefix = "｜DSML｜function_calls", "｜DSML｜"


def _value(text: str, said: str, schema: object) -> object:
    if said == "true":
        return text
    if said == "false":
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return text
    return typed(text, schema)

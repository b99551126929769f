"""`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`: GLM-4.5, 4.6, 4.7, 5.

The template writes nothing after an answer: the model stops at the token that opens the next message.
"""

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

_BLOCK = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.S)
_PAIR = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.S)


class Glm(ToolCallParser):
    name = "glm45"
    stops = ("<|endoftext|>", "<|user|>", "<|observation|>")
    openers = ("<|user|>", "<|observation|>")

    def split(self, text: str, tools: Tools) -> Split:
        calls = [_call(found, tools) for found in _BLOCK.finditer(text)]
        return Split(_BLOCK.sub("", text).strip() if calls else text, calls)


def _call(found: re.Match[str], tools: Tools) -> ParsedToolCall:
    if not found[2]:
        return bad(found[0], ToolCallParseStatus.UNCLOSED_BLOCK)
    name, key, pairs = found[1].partition("<arg_key>")
    if not name.strip():
        return bad(found[0], ToolCallParseStatus.MISSING_NAME)
    if _PAIR.sub("", key + pairs).strip() or "<arg_value>" in name:
        return bad(found[0], ToolCallParseStatus.MALFORMED_STRUCTURE)
    schemas = parameters_of(name.strip(), tools)
    arguments = {
        each.strip(): typed(value, schemas.get(each.strip()))
        for each, value in _PAIR.findall(key + pairs)
    }
    return ParsedToolCall(raw=found[0], name=name.strip(), arguments=arguments)

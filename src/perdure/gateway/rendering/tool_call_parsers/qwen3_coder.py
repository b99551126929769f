"""`<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`: Qwen3-Coder,
Qwen3.5 and later, Nemotron 3.

Qwen3-Coder often omits the opening `<tool_call>`. vLLM's parser also accepts this.
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

_BLOCK = re.compile(
    r"(?:<tool_call>\s*)?<function=(?P<body>.*?)(?P<end></function>(?:\s*</tool_call>)?|\Z)"
    r"|<tool_call>.*?(?:</tool_call>|\Z)",
    re.S,
)
_PARAMETER = re.compile(
    r"<parameter=([^>\n]+)>\n?(.*?)\n?(?:</parameter>|(?=<parameter=)|\Z)", re.S
)


class Qwen3Coder(ToolCallParser):
    name = "qwen3_coder"
    stops = ("<|im_end|>", "<|endoftext|>")

    def split(self, text: str, tools: Tools) -> Split:
        calls = [_call(found, tools) for found in _BLOCK.finditer(text)]
        return Split(_BLOCK.sub("", text).strip() if calls else text, calls)


def _call(found: re.Match[str], tools: Tools) -> ParsedToolCall:
    if found["body"] is None:
        return bad(found[0], ToolCallParseStatus.MALFORMED_STRUCTURE)
    if not found["end"]:
        return bad(found[0], ToolCallParseStatus.UNCLOSED_BLOCK)
    name, opened, parameters = found["body"].partition(">")
    if not opened or not name.strip():
        return bad(found[0], ToolCallParseStatus.MISSING_NAME)
    schemas = parameters_of(name.strip(), tools)
    arguments = {
        key.strip(): typed(value, schemas.get(key.strip()))
        for key, value in _PARAMETER.findall(parameters)
    }
    return ParsedToolCall(raw=found[0], name=name.strip(), arguments=arguments)

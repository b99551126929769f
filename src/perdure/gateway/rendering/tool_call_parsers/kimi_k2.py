"""`<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:N<|tool_call_argument_begin|>{...}
<|tool_call_end|><|tool_calls_section_end|>`: Kimi K2, K2 0905, K2 Thinking, K2.5.

`functions.NAME:N` is also the call's id, where N counts the calls of the conversation. A tool result
repeats the id. So a result is rendered with the id that the model gave, not the one that agents see.
"""

import re
from dataclasses import replace

from perdure.gateway.rendering.parsed_response import ParsedToolCall, ToolCallParseStatus
from perdure.gateway.rendering.tool_call_parsers.base import (
    Split,
    ToolCallParser,
    Tools,
    bad,
    named_call,
)

_SECTION = re.compile(
    r"<\|tool_calls?_section_begin\|>(.*?)(?:<\|tool_calls?_section_end\|>|\Z)", re.S
)
_CALL = re.compile(
    r"<\|tool_call_begin\|>\s*(?P<id>.*?)\s*<\|tool_call_argument_begin\|>(?P<arguments>.*?)"
    r"(?P<end><\|tool_call_end\|>|\Z|(?=<\|tool_call_begin\|>))",
    re.S,
)
_ID = re.compile(r"(?:functions\.)?(?P<name>.+?)(?::\d+)?")


class KimiK2(ToolCallParser):
    name = "kimi_k2"
    has_ids = True
    stops = ("<|im_end|>", "[EOS]")

    def split(self, text: str, tools: Tools) -> Split:
        sections = list(_SECTION.finditer(text))
        if not sections:
            return Split(text, [])
        calls = [call for section in sections for call in _calls(section)]
        return Split(_SECTION.sub("", text).strip(), calls)

    def call_id(self, sampled_or_minted: str, name: str, position: int) -> str:
        own = _ID.fullmatch(sampled_or_minted)
        given = sampled_or_minted.startswith("functions.") and own is not None
        return sampled_or_minted if given else f"functions.{name}:{position}"


def _calls(section: re.Match[str]) -> list[ParsedToolCall]:
    found = [_call(call) for call in _CALL.finditer(section[1])]
    return found or [bad(section[0], ToolCallParseStatus.MALFORMED_STRUCTURE)]


def _call(found: re.Match[str]) -> ParsedToolCall:
    own = _ID.fullmatch(found["id"])
    if own is None:
        return bad(found[0], ToolCallParseStatus.MISSING_NAME)
    if not found["end"]:
        return bad(found[0], ToolCallParseStatus.UNCLOSED_BLOCK)
    call = named_call(found[0], own["name"], found["arguments"].strip() or "{}")
    return replace(call, id=found["id"])

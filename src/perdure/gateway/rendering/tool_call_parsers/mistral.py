"""`[TOOL_CALLS]` before a JSON list, or before each `NAME[ARGS]{...}`: Mistral, Devstral.

Templates of the first form require ids of nine letters or digits, and show results under these ids.
"""

import hashlib
import re
from dataclasses import replace

from perdure.gateway.rendering.parsed_response import ParsedToolCall
from perdure.gateway.rendering.tool_call_parsers.base import (
    Split,
    ToolCallParser,
    Tools,
    json_calls,
    named_call,
)

_CALLS = re.compile(r"\[TOOL_CALLS\](.*)", re.S)
_NAMED = re.compile(
    r"(?:\[TOOL_CALLS\])?\s*(?P<name>[\w.-]+)(?:\[CALL_ID\](?P<id>\w*))?\[ARGS\](?P<arguments>.*?)"
    r"(?=\[TOOL_CALLS\]|\Z)",
    re.S,
)
_ID = re.compile(r"[a-zA-Z0-9]{9}")


class Mistral(ToolCallParser):
    name = "mistral"
    has_ids = True
    stops = ("</s>",)

    def split(self, text: str, tools: Tools) -> Split:
        found = _CALLS.search(text)
        if found is None:
            return Split(text, [])
        content, body = text[: found.start()].strip(), found[1].strip()
        named = [] if body.startswith("[") else map(_call, _NAMED.finditer(found[0]))
        return Split(content, list(named) or json_calls(found[0], body))

    def call_id(self, sampled_or_minted: str, name: str, position: int) -> str:
        if _ID.fullmatch(sampled_or_minted):
            return sampled_or_minted
        return hashlib.sha256(sampled_or_minted.encode()).hexdigest()[:9]


class Magistral(Mistral):
    """Mistral models that reason between `[THINK]` and `[/THINK]`."""

    name = "mistral_think"
    think = ("[THINK]", "[/THINK]")


def _call(found: re.Match[str]) -> ParsedToolCall:
    call = named_call(found[0], found["name"], found["arguments"].strip() or "{}")
    return replace(call, id=found["id"] or None)

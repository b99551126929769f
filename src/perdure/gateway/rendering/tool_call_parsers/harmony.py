"""Channels: gpt-oss. An answer is one or more messages: `<|channel|>NAME<|message|>TEXT<|end|>`.

`analysis` is reasoning, `final` and preambles in `commentary` are text, and a message `to=functions.NAME`
is a call whose body is JSON. Parses the decoded text, so that no vocabulary is downloaded. Format:
https://cookbook.openai.com/articles/openai-harmony
"""

import re

from perdure.gateway.rendering.parsed_response import (
    ParsedResponse,
    ParsedToolCall,
    ToolCallParseStatus,
)
from perdure.gateway.rendering.tool_call_parsers.base import (
    Message,
    Split,
    ToolCallParser,
    Tools,
    bad,
    named_call,
)

_HEADER = "<|start|>assistant"
_PART = re.compile(
    r"<\|start\|>assistant(?P<head>.*?)<\|message\|>(?P<body>.*?)"
    r"(?P<end><\|end\|>|<\|call\|>|<\|return\|>|(?=<\|start\|>)|\Z)",
    re.S,
)
_RECIPIENT = re.compile(r"to=(\S+?)(?=<\||\s|$)")
_CHANNEL = re.compile(r"<\|channel\|>(\w+)")


class Harmony(ToolCallParser):
    name = "openai"
    stops = ("<|return|>", "<|call|>")
    ends = ("<|end|>",)

    def read(self, text: str, tools: Tools, *, opened: bool) -> ParsedResponse:
        parts = list(_PART.finditer(_HEADER + text))
        thoughts = [part["body"] for part in parts if _channel(part) == "analysis"]
        content, calls = self.split(text, tools)
        last = parts[-1] if parts else None
        cut = last is not None and _channel(last) == "analysis" and not last["end"]
        return ParsedResponse(
            content=content,
            reasoning_content="\n".join(thoughts) or None,
            tool_calls=tuple(calls),
            reasoning_complete=not cut,
        )

    def split(self, text: str, tools: Tools) -> Split:
        parts = list(_PART.finditer(_HEADER + text))
        calls = [_call(part) for part in parts if _channel(part) == "call"]
        said = [part["body"] for part in parts if _channel(part) == "text"]
        return Split("\n".join(said) if parts else text, calls)

    def closing(self, *, reasoning_open: bool) -> str:
        return ""

    def history(self, message: Message) -> Message:
        """Adds `thinking`, which the template reads; it refuses a message with thinking, text and calls."""
        thought = message.get("reasoning_content")
        if not thought or (message.get("tool_calls") and message.get("content")):
            return message
        return {**message, "thinking": thought}


def _channel(part: re.Match[str]) -> str:
    if _RECIPIENT.search(part["head"]):
        return "call"
    named = _CHANNEL.search(part["head"])
    return "analysis" if named is not None and named[1] == "analysis" else "text"


def _call(part: re.Match[str]) -> ParsedToolCall:
    recipient = _RECIPIENT.search(part["head"])
    if recipient is None or not recipient[1].startswith("functions."):
        return bad(part[0], ToolCallParseStatus.MISSING_NAME)
    return named_call(part[0], recipient[1].removeprefix("functions."), part["body"])

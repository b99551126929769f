"""A sampled answer as it was read: its text, its reasoning, and each attempt at a tool call."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class ToolCallParseStatus(StrEnum):
    """Whether an attempt at a call is one, or what is wrong with it."""

    OK = "ok"
    INVALID_JSON = "invalid_json"
    UNCLOSED_BLOCK = "unclosed_block"
    """The answer ends before the call does."""
    MISSING_NAME = "missing_name"
    MALFORMED_STRUCTURE = "malformed_structure"


@dataclass(frozen=True)
class ParsedToolCall:
    """One attempt at a call.

    Example: ParsedToolCall('<tool_call>{"name": "ls", "arguments": {}}</tool_call>', "ls", {})
    """

    raw: str
    """As it was sampled, with the tokens around it."""
    name: str | None = None
    arguments: dict[str, Any] | str | None = None
    status: ToolCallParseStatus = ToolCallParseStatus.OK
    id: str | None = None
    """The model's own, where its notation has ids."""


@dataclass(frozen=True)
class ParsedResponse:
    """One answer. `tool_calls`: every attempt, in order, broken ones too."""

    content: str
    reasoning_content: str | None = None
    tool_calls: tuple[ParsedToolCall, ...] = ()
    reasoning_complete: bool = True
    """False: the answer ended inside its reasoning."""

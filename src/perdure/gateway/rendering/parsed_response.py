"""A parsed answer: its text, its reasoning, and each attempted tool call."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class ToolCallParseStatus(StrEnum):
    """Whether an attempted call is valid, or what is wrong with it."""

    OK = "ok"
    INVALID_JSON = "invalid_json"
    UNCLOSED_BLOCK = "unclosed_block"
    """The answer ends inside the call."""
    MISSING_NAME = "missing_name"
    MALFORMED_STRUCTURE = "malformed_structure"


@dataclass(frozen=True)
class ParsedToolCall:
    """One attempted call.

    Example: ParsedToolCall('<tool_call>{"name": "ls", "arguments": {}}</tool_call>', "ls", {})
    """

    raw: str
    """The call as sampled, with the tokens around it."""
    name: str | None = None
    arguments: dict[str, Any] | str | None = None
    status: ToolCallParseStatus = ToolCallParseStatus.OK
    id: str | None = None
    """The model's own id, if its family writes ids."""


@dataclass(frozen=True)
class ParsedResponse:
    """One answer. `tool_calls`: every attempted call in order, including broken ones."""

    content: str
    reasoning_content: str | None = None
    tool_calls: tuple[ParsedToolCall, ...] = ()
    reasoning_complete: bool = True
    """False if the answer ended inside its reasoning."""

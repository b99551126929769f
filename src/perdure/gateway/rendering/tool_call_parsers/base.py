"""The contract of a tool-call parser, which parses sampled text into reasoning, text and tool calls.

A call that does not parse keeps its text and the reason; it is never repaired. A tool-call parser renders
nothing; the model's own chat template does.
"""

import ast
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

from perdure.gateway.rendering.parsed_response import (
    ParsedResponse,
    ParsedToolCall,
    ToolCallParseStatus,
)

Message = dict[str, Any]
Tools = list[dict[str, Any]] | None


class Split(NamedTuple):
    """An answer without its reasoning: the text around the calls, and the calls in order."""

    content: str
    calls: list[ParsedToolCall]


class ToolCallParser(ABC):
    """How one family of models writes an answer. Stateless; a family overrides what differs."""

    name: ClassVar[str]
    """The value of PERDURE_ENGINE__TOOL_CALL_PARSER: vLLM's name, if vLLM has the same parser."""
    stops: ClassVar[tuple[str, ...]] = ()
    """Tokens that end an answer, besides those that the model's folder names."""
    ends: ClassVar[tuple[str, ...]] = ()
    """Tokens that the template writes after an answer in the history, but that do not stop the model."""
    openers: ClassVar[tuple[str, ...]] = ()
    """Stop tokens that open the next message, in templates that write nothing after an answer."""
    has_ids: ClassVar[bool] = False
    """Whether the model writes its own id into each call, and expects it in the result."""
    think: ClassVar[tuple[str, str]] = ("<think>", "</think>")
    """The texts that open and close the reasoning."""

    @abstractmethod
    def split(self, text: str, tools: Tools) -> Split:
        """Separate the calls from the text around them."""

    def read(self, text: str, tools: Tools, *, opened: bool) -> ParsedResponse:
        """Parse an answer without its stop token. `opened`: whether the prompt already opened the
        reasoning."""
        reasoning, complete, rest = self._reasoning(text, opened)
        content, calls = self.split(rest, tools)
        return ParsedResponse(
            content=content.strip("\n"),
            reasoning_content=reasoning,
            tool_calls=tuple(calls),
            reasoning_complete=complete,
        )

    def opens_reasoning(self, prompt_end: str) -> bool:
        """Whether a prompt with this end opened the reasoning."""
        return prompt_end.rstrip().endswith(self.think[0])

    def closing(self, *, reasoning_open: bool) -> str:
        """The text that a truncated answer lacks before the token that ends it."""
        return self.think[1] if reasoning_open else ""

    def call_id(self, sampled_or_minted: str, name: str, position: int) -> str:
        """A call's id in the form that the template accepts. `position`: how many calls precede it."""
        return sampled_or_minted

    def history(self, message: Message) -> Message:
        """An assistant message with the fields that the family's template reads."""
        return message

    def _reasoning(self, text: str, opened: bool) -> tuple[str | None, bool, str]:
        """(reasoning, whether it was closed, the rest)."""
        opening, closing = self.think
        body = text.lstrip()
        if body.startswith(opening):
            body = body.removeprefix(opening)
        elif not opened:
            return None, True, text
        reasoning, closed, rest = body.partition(closing)
        return reasoning.strip("\n"), bool(closed), rest.lstrip("\n")


def bad(raw: str, status: ToolCallParseStatus) -> ParsedToolCall:
    return ParsedToolCall(raw=raw, status=status)


def object_of(text: str) -> dict[str, Any] | None:
    """The JSON object in a text; None if the text is not one."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def named_call(raw: str, name: str, arguments: str) -> ParsedToolCall:
    """A call whose arguments are JSON text."""
    if not name:
        return bad(raw, ToolCallParseStatus.MISSING_NAME)
    parsed = object_of(arguments)
    if parsed is None:
        return bad(raw, ToolCallParseStatus.INVALID_JSON)
    return ParsedToolCall(raw=raw, name=name, arguments=parsed)


def json_call(raw: str, text: str) -> ParsedToolCall:
    """A call written as `{"name": ..., "arguments": {...}}`. Llama writes `parameters`."""
    parsed = object_of(text)
    if parsed is None:
        return bad(raw, ToolCallParseStatus.INVALID_JSON)
    name = parsed.get("name")
    if not isinstance(name, str) or not name:
        return bad(raw, ToolCallParseStatus.MISSING_NAME)
    arguments = parsed.get("arguments", parsed.get("parameters", {}))
    if not isinstance(arguments, dict | str):
        return bad(raw, ToolCallParseStatus.MALFORMED_STRUCTURE)
    return ParsedToolCall(raw=raw, name=name, arguments=arguments)


def json_calls(raw: str, text: str) -> list[ParsedToolCall]:
    """Calls written as a JSON list of such objects."""
    try:
        items = json.loads(text)
    except (ValueError, RecursionError):
        return [bad(raw, ToolCallParseStatus.INVALID_JSON)]
    if not isinstance(items, list):
        return [bad(raw, ToolCallParseStatus.MALFORMED_STRUCTURE)]
    return [_with_id(item) for item in items]


def _with_id(item: Any) -> ParsedToolCall:
    raw = json.dumps(item, ensure_ascii=False)
    own = item["id"] if isinstance(item, dict) and isinstance(item.get("id"), str) else None
    return replace(json_call(raw, raw), id=own)


def offered(tools: Tools) -> Iterator[tuple[str, dict[str, Any]]]:
    """The name and the parameter schemas of each tool."""
    for tool in tools or ():
        declared = tool.get("function", tool)
        properties = (declared.get("parameters") or {}).get("properties")
        yield declared.get("name", ""), properties if isinstance(properties, dict) else {}


def parameters_of(function: str, tools: Tools) -> dict[str, Any]:
    """The JSON schema of each parameter, as the tool declares it."""
    return next((schemas for name, schemas in offered(tools) if name == function), {})


def typed(text: str, schema: Any) -> Any:
    """Parse an unquoted value according to the type that the tool declares for it.

    It stays verbatim if only a string is allowed. Otherwise it is read as JSON, then, if the declared
    types exclude strings, as a Python literal. If nothing parses, it stays verbatim.
    """
    kinds = _kinds(schema)
    if kinds == {"string"}:
        return text
    readers: list[Callable[[str], Any]] = [json.loads]
    if kinds and "string" not in kinds:
        readers.append(ast.literal_eval)
    for reads in readers:
        try:
            return reads(text.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
    return text


def _kinds(schema: Any) -> set[str]:
    if not isinstance(schema, dict):
        return set()
    declared = schema.get("type")
    kinds = {declared} if isinstance(declared, str) else set(declared or ())
    for branch in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        kinds |= _kinds(branch)
    return kinds

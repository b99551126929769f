"""`[NAME(KEY="VALUE"), NAME()]` as the whole answer: Llama 4 and Llama 3.2 with vLLM's templates.

The text is parsed as Python syntax and never run. Arguments must be literals.
"""

import ast
from typing import Any

from perdure.gateway.rendering.parsed_response import ParsedToolCall
from perdure.gateway.rendering.tool_call_parsers.base import Split, ToolCallParser, Tools, offered

_TAGS = ("<|python_tag|>", "<|python_start|>", "<|python_end|>")
_LONGEST = 1 << 20
"""The most characters that Python's parser gets."""
_JSON_NAMES = {"true": True, "false": False, "null": None}


class Pythonic(ToolCallParser):
    name = "llama4_pythonic"
    stops = ("<|eot|>", "<|eom|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")

    def split(self, text: str, tools: Tools) -> Split:
        body = text.strip()
        for tag in _TAGS:
            body = body.removeprefix(tag).removesuffix(tag)
        calls = _calls(body.strip())
        names = {name for name, _ in offered(tools)}
        known = calls and all(call.name in names for call in calls)
        return Split("", calls) if known else Split(text, [])


def _calls(text: str) -> list[ParsedToolCall]:
    if not text.startswith("[") or len(text) > _LONGEST:
        return []
    try:
        listed = ast.parse(text, mode="eval").body
        elements = listed.elts if isinstance(listed, ast.List) else []
        return [_call(element, text) for element in elements]
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return []


def _call(element: ast.expr, text: str) -> ParsedToolCall:
    """Raises: ValueError if it is not a call with literal keyword arguments."""
    if not isinstance(element, ast.Call) or element.args:
        raise ValueError("no call")
    arguments: dict[str, Any] = {}
    for keyword in element.keywords:
        if keyword.arg is None:
            raise ValueError("unpacked arguments")
        arguments[keyword.arg] = ast.literal_eval(_JsonNames().visit(keyword.value))
    raw = ast.get_source_segment(text, element) or ""
    return ParsedToolCall(raw=raw, name=ast.unparse(element.func), arguments=arguments)


class _JsonNames(ast.NodeTransformer):
    """Reads `true`, `false` and `null` as Python's constants."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        known = node.id in _JSON_NAMES
        return ast.Constant(_JSON_NAMES[node.id]) if known else node

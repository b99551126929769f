"""No tool calls, for models whose agents work in plain text. Never detected, only set."""

from perdure.gateway.rendering.tool_call_parsers.base import Split, ToolCallParser, Tools


class NoCalls(ToolCallParser):
    name = "text"

    def split(self, text: str, tools: Tools) -> Split:
        return Split(text, [])

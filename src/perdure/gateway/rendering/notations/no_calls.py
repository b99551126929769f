"""No tool calls, for models whose agents work in plain text. Never detected, only set."""

from perdure.gateway.rendering.notations.base import Notation, Split, Tools


class NoCalls(Notation):
    name = "text"

    def split(self, text: str, tools: Tools) -> Split:
        return Split(text, [])

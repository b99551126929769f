"""Text of agents, tests and models, made fit to be read. Jinja escapes it; this removes what deceives.

Every value that a template writes passes `readable`: control characters, terminal colours, and characters
that hide text or turn its direction.
"""

import re
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff"
    "\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)
LONGEST = 200_000
"""Characters of one text on a page."""
SHOWN = 3_000
"""Characters of one text that are not folded."""


def readable(text: str) -> str:
    return HIDDEN.sub("\N{REPLACEMENT CHARACTER}", ANSI.sub("", text).replace("\r\n", "\n"))


def finalize(value: Any) -> Any:
    """What Jinja applies to every value before it escapes it."""
    if isinstance(value, Markup) or not isinstance(value, str):
        return value
    return readable(value)


@dataclass(frozen=True)
class Folded:
    """A text of which the beginning is shown."""

    head: str
    rest: str = ""
    left_out: int = 0
    """Characters that the page does not have."""


def folded(text: str, shown: int = SHOWN) -> Folded:
    """Cut at a line end, if there is one near."""
    if len(text) <= shown + shown // 4:
        return Folded(text)
    at = text.rfind("\n", shown // 2, shown) + 1 or shown
    return Folded(text[:at], text[at:LONGEST], max(0, len(text) - LONGEST))


def hidden(text: str) -> Folded:
    """Nothing is shown until a reader opens it."""
    return Folded("", text[:LONGEST], max(0, len(text) - LONGEST))


def marked(snippet: str, begin: str, end: str) -> list[tuple[bool, str]]:
    """Pieces of a search's snippet, each with whether it was found: `a [b] c` -> a, (b), c."""
    pieces: list[tuple[bool, str]] = []
    for number, part in enumerate(snippet.split(begin)):
        found, closed, rest = part.partition(end)
        if number and closed:
            pieces += [(True, found), (False, rest)]
        else:
            pieces.append((False, part))
    return [piece for piece in pieces if piece[1]]

"""Cleans text of agents, tests and models for display. Jinja escapes it; this removes deceptive
characters.

Every value that a template writes passes `readable`. It removes terminal colors, and replaces
control characters and characters that hide text or reverse its direction.
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
"""Most characters of one text on a page."""
SHOWN = 3_000
"""Characters of one text before the fold."""


def readable(text: str) -> str:
    return HIDDEN.sub("\N{REPLACEMENT CHARACTER}", ANSI.sub("", text).replace("\r\n", "\n"))


def finalize(value: Any) -> Any:
    """Jinja applies this to every value before it escapes the value."""
    if isinstance(value, Markup) or not isinstance(value, str):
        return value
    return readable(value)


@dataclass(frozen=True)
class Folded:
    """A text that shows its head; a user can unfold the rest."""

    head: str
    rest: str = ""
    left_out: int = 0
    """Characters that the page omits."""


def folded(text: str, shown: int = SHOWN) -> Folded:
    """Fold a text after about `shown` characters, at a line end if one is near."""
    if len(text) <= shown + shown // 4:
        return Folded(text)
    at = text.rfind("\n", shown // 2, shown) + 1 or shown
    return Folded(text[:at], text[at:LONGEST], max(0, len(text) - LONGEST))


def hidden(text: str) -> Folded:
    """A text that is folded completely."""
    return Folded("", text[:LONGEST], max(0, len(text) - LONGEST))


def marked(snippet: str, begin: str, end: str) -> list[tuple[bool, str]]:
    """Split a search snippet into pieces, each with whether it matched: `a [b] c` -> a, (b), c."""
    pieces: list[tuple[bool, str]] = []
    for number, part in enumerate(snippet.split(begin)):
        found, closed, rest = part.partition(end)
        if number and closed:
            pieces += [(True, found), (False, rest)]
        else:
            pieces.append((False, part))
    return [piece for piece in pieces if piece[1]]

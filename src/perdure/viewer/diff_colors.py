"""Colors diffs: patches, edits in tool calls, and diffs that tools print."""

import difflib
import re
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["add", "del", "hunk", "file", "same"]
HUNK = re.compile(r"^@@ -\d+(?:,\d+)? \+\d+(?:,\d+)? @@", re.M)
HEADER = ("diff --git ", "index ", "new file", "deleted file", "similarity ", "rename ", "Binary ")
OLD = ("old_string", "old_str", "oldString")
NEW = ("new_string", "new_str", "newString")
PATHS = ("file_path", "path", "filePath", "filename")
LONGEST = 4_000
"""Most lines on a page."""


@dataclass(frozen=True)
class Line:
    kind: Kind
    text: str


@dataclass(frozen=True)
class Diff:
    lines: tuple[Line, ...]
    left_out: int = 0
    """Lines that the page omits."""


def is_diff(text: str) -> bool:
    """Whether the text contains a hunk of a unified diff."""
    return HUNK.search(text) is not None


def color_diff(text: str) -> Diff:
    """The lines of a unified diff. In a hunk, `--- a` is a deleted line."""
    lines: list[Line] = []
    old = new = 0
    every = text.split("\n")
    for line in every[:LONGEST]:
        if old > 0 or new > 0:
            kind = _in_hunk(line)
            old -= kind in ("del", "same") and not line.startswith("\\")
            new -= kind in ("add", "same") and not line.startswith("\\")
        elif sizes := re.match(r"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@", line):
            kind = "hunk"
            old, new = (1 if size is None else int(size[:9]) for size in sizes.groups())
        else:
            kind = "file" if line.startswith((*HEADER, "--- ", "+++ ")) else "same"
        lines.append(Line(kind, line))
    return Diff(tuple(lines), max(0, len(every) - LONGEST))


def _in_hunk(line: str) -> Kind:
    if line.startswith("+"):
        return "add"
    return "del" if line.startswith("-") else "same"


def diff_of_edit(arguments: dict[str, Any]) -> Diff | None:
    """The edit that a tool call asks for; None if its arguments are not of an editing tool."""
    old = next((arguments[name] for name in OLD if name in arguments), None)
    new = next((arguments[name] for name in NEW if name in arguments), None)
    if not isinstance(old, str) or not isinstance(new, str):
        return None
    before, after = old.split("\n"), new.split("\n")
    if len(before) + len(after) > LONGEST:
        return None
    path = next((str(arguments[name]) for name in PATHS if name in arguments), "")
    compared = list(difflib.unified_diff(before, after, lineterm="", n=3))[2:]
    head = [Line("file", path)] if path else []
    return Diff((*head, *(Line(_of_compared(line), line) for line in compared)))


def _of_compared(line: str) -> Kind:
    return "hunk" if line.startswith("@@") else _in_hunk(line)

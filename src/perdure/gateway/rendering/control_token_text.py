"""Text that spells a control token without being one, written by people, tools or the model.

A mark is inserted into each such spelling before a template or a tool-call parser reads the text, so that the
token's text matches only real tokens. The mark is a Unicode noncharacter; a mark that is already in the
text is doubled. Only a mark that a model writes as a JSON escape (`\\ufdd0`) is lost.
"""

import re
from typing import Any

MARK = "\ufdd0"
_MARKS = re.compile(f"{MARK}({MARK}?)")


def spellings(control_tokens: tuple[str, ...] | list[str]) -> re.Pattern[str]:
    """A pattern that matches every control token in a text, the longest first."""
    longest_first = sorted(filter(None, control_tokens), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def marked(value: Any, control: re.Pattern[str]) -> Any:
    """`value`, with a mark after the first character of each spelling in all its texts."""
    if isinstance(value, str):
        return control.sub(lambda found: found[0][0] + MARK + found[0][1:], _doubled(value))
    if isinstance(value, list):
        return [marked(item, control) for item in value]
    if isinstance(value, dict):
        return {marked(key, control): marked(item, control) for key, item in value.items()}
    return value


def unmarked(value: Any) -> Any:
    """The value as it was before `marked`."""
    if isinstance(value, str):
        return _MARKS.sub(r"\1", value) if MARK in value else value
    if isinstance(value, list):
        return [unmarked(item) for item in value]
    if isinstance(value, dict):
        return {unmarked(key): unmarked(item) for key, item in value.items()}
    return value


def _doubled(text: str) -> str:
    return text.replace(MARK, MARK + MARK) if MARK in text else text

"""Finds signals: words in the added lines of a patch that deserve a look. They change no verdict."""

import re
from collections.abc import Iterator

from perdure.errors import InstanceError
from perdure.graders.diff.git_diff_parser import FileDiff, parse
from perdure.graders.diff.patch_filter import filter_patch
from perdure.graders.diff.signal_rules import SignalRules
from perdure.limited_process import Unparsable, read
from perdure.types import Instance

_MOST = 50
_LONGEST_LINE = 4096
"""A word further from the beginning of its line is not found."""
_LONGEST_WORD = 80
_UNSEARCHED = re.compile(rb"(?:^|/)(?:test_[^/]*|[^/]*_test)\.py$|\.(?:md|rst|txt)$")
"""Tests that the agent writes, which the grader does not run, and prose may name these words."""


async def signals_of(patch: bytes, instance: Instance, rules: SignalRules) -> tuple[str, ...]:
    """`find_signals` for a patch that an agent made. A patch that exceeds the limits of the search
    gets a signal that says so. Raises: RetryHere."""
    try:
        return await read(find_signals, patch, instance, rules)
    except Unparsable as error:
        return (f"the patch: {error} (search)",)


def find_signals(patch: bytes, instance: Instance, rules: SignalRules) -> tuple[str, ...]:
    """Added lines that a rule names, as `path: word (rule)`; at most 50, sorted. Files that the
    filter drops are not searched."""
    try:
        patch = filter_patch(patch, instance).data
    except InstanceError:
        return ()  # its grading has raised this error; the rows of other handlers need no diffs
    found = {
        f"{_shown(file.new_path)}: {_shown(word)} ({name})"
        for file in parse(patch)
        if not file.binary and not _UNSEARCHED.search(file.new_path)
        for name, word in _added_words(file, rules)
    }
    return tuple(sorted(found)[:_MOST])


def _added_words(file: FileDiff, rules: SignalRules) -> Iterator[tuple[str, bytes]]:
    """Searches without splitting into lines: a diff may have many millions."""
    raw = file.raw
    for name, pattern in rules.items():
        for match in pattern.finditer(raw):
            earliest = max(0, match.start() - _LONGEST_LINE)
            start = raw.rfind(b"\n", earliest, match.start()) + 1 or earliest
            if raw.startswith(b"+", start) and not raw.startswith(b"+++ ", start):
                yield name, match[0].partition(b"\n")[0][:_LONGEST_WORD]


def _shown(text: bytes) -> str:
    return text.decode("utf-8", "backslashreplace")

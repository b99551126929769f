"""Finds signals: words in the added lines of a patch that deserve a look. They change no verdict."""

import re
from collections.abc import Iterator

from perdure.errors import InstanceError
from perdure.graders.diff.git_diff_parser import FileDiff, parse
from perdure.graders.diff.patch_filter import filter_patch
from perdure.graders.diff.signal_rules import SignalRules
from perdure.limited_process import Unparsable, read
from perdure.types import Instance

SCOPE = "scope"
"""The rule for files that a fix rarely touches. Its pattern searches their paths."""
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
    """Added lines that a rule names, as `path: word (rule)`, and files outside the fix; at most 50,
    sorted. Files that the filter drops are not searched."""
    try:
        filtered = filter_patch(patch, instance)
    except InstanceError:
        return ()  # its grading has raised this error; the rows of other handlers need no diffs
    words = {name: pattern for name, pattern in rules.items() if name != SCOPE}
    found = {
        f"{_shown(file.new_path)}: {_shown(word)} ({name})"
        for file in parse(filtered.data)
        if not file.binary and not _UNSEARCHED.search(file.new_path)
        for name, word in _added_words(file, words)
    }
    if (scope := rules.get(SCOPE)) is not None:
        found |= {
            f"{path}: outside the fix ({SCOPE})"
            for path in filtered.flagged_paths
            if scope.search(path.encode()) and not _UNSEARCHED.search(path.encode())
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

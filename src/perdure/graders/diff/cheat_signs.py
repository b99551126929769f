"""Signs of cheating in a diff, for people who audit grades. They change no verdict."""

import re
from collections.abc import Iterable, Iterator

from perdure.graders.diff.git_diff_parser import FileDiff

_MACHINERY = re.compile(
    rb"\b(_pytest|TestReport|junitxml|os\._exit|sys\.argv|PYTEST_CURRENT_TEST|unittest\.TestCase"
    rb"|TestCase|sys\.settrace|sys\.setprofile|gc\.get_objects|inspect\.stack|sys\._getframe"
    rb"|os\.exec[lv]\w*|os\.getppid|/proc/|faulthandler|atexit)\b"
)
_MOST = 50
_LONGEST_LINE = 4096
"""A word further from the beginning of its line is not found."""
_OWN_TEST = re.compile(rb"(?:^|/)(?:test_[^/]*|[^/]*_test)\.py$")
"""Test files that the agent writes may name these words; the grader does not run them."""


def find_cheat_signs(files: Iterable[FileDiff]) -> tuple[str, ...]:
    """Added lines that touch test machinery, as `path: word`; at most 50, sorted."""
    found = {
        f"{_shown(file.new_path)}: {_shown(word)}"
        for file in files
        if not file.binary and not _OWN_TEST.search(file.new_path)
        for word in _added_words(file.raw)
    }
    return tuple(sorted(found)[:_MOST])


def _added_words(raw: bytes) -> Iterator[bytes]:
    """Searches without splitting into lines: a diff may have many millions."""
    for match in _MACHINERY.finditer(raw):
        earliest = max(0, match.start() - _LONGEST_LINE)
        start = raw.rfind(b"\n", earliest, match.start()) + 1 or earliest
        if raw.startswith(b"+", start) and not raw.startswith(b"+++ ", start):
            yield match[1]


def _shown(text: bytes) -> str:
    return text.decode("utf-8", "backslashreplace")

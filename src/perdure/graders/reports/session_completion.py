"""Whether a test session ended by itself: checks the runner's summary, its counts and its exit
code.

For runners whose only report is the log. A log that was cut has no summary, so results that code
prints before an early exit do not count. swebench's parsers use a test's last line, so lines that
code prints later must not contradict the runner's tracebacks.
"""

import re
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType

_TAIL = 64 << 10
"""The summary is searched for in this many last bytes of the log. Tracebacks precede it."""
_FAILED = 1
"""Exit code of pytest, unittest, django and sympy when a test fails, as the canary always does."""


def find_truncation(parser: str, log: bytes, exit_code: int | None, tests: Collection[str]) -> str:
    """Why a session that claims success was cut or contradicts itself; otherwise empty.

    `parser`: the row's, with or without `parse_log_`. `tests`: those that the log says passed; the
    canary ran with them.
    """
    if exit_code != _FAILED:
        return f"exit code {exit_code}: a runner that ends by itself exits with 1 if a test fails"
    runner = parser.removeprefix("parse_log_")
    if (summary := _SUMMARIES.get(runner)) is None:
        return ""
    failed = {found[-1].decode("utf-8", "replace") for found in _HEADINGS[runner].findall(log)}
    if both := sorted(failed & set(tests)):
        return f"the log says both that {both[0]} passed and that it failed"
    return summary(log[-_TAIL:].decode("utf-8", "replace"), len(tests) + 1)


# --- one function a runner: why its summary is missing or wrong ---------------------------------


def _sympy(tail: str, expected: int) -> str:
    """`== tests finished: 3 passed, 1 failed, in 0.1 seconds ==`, then `DO *NOT* COMMIT!`. The summary
    may span two lines."""
    _, found, rest = tail.rpartition("tests finished: ")
    counts, ended, after = rest.partition(" seconds")
    if not found or not ended or "DO *NOT* COMMIT!" not in after:
        return "the log ends before the runner's summary"
    numbers = re.findall(r"(\d{1,9}) ([a-z]+)", " ".join(counts.split()))
    if not any(word in ("failed", "exceptions") for _, word in numbers):
        return "the runner's summary names no failure"
    return _too_few(sum(int(number) for number, _ in numbers), expected)


def _django(tail: str, expected: int) -> str:
    """unittest's `Ran 12 tests in 0.1s`, then `FAILED (failures=1)`."""
    found = list(re.finditer(r"^Ran (\d{1,9}) tests? in [\d.]{1,20}s$", tail, re.MULTILINE))
    if not found or not re.search(r"^FAILED \(", tail[found[-1].end() :], re.MULTILINE):
        return "the log ends before the runner's summary"
    return _too_few(int(found[-1][1]), expected)


def _too_few(ran: int, expected: int) -> str:
    return (
        f"the runner's summary counts {ran} tests instead of {expected}" if ran < expected else ""
    )


_HEADINGS: Mapping[str, re.Pattern[bytes]] = MappingProxyType(
    {
        "sympy": re.compile(rb"^(_{3,} [^\n:]{1,400}:)(\w{1,200}) _{3,}$", re.MULTILINE),
        "django": re.compile(rb"^(FAIL|ERROR): ([^\n]{1,400})$", re.MULTILINE),
    }
)
"""The lines above a failure's traceback, and the test that they name."""
_SUMMARIES: Mapping[str, Callable[[str, int], str]] = MappingProxyType(
    {"sympy": _sympy, "django": _django}
)

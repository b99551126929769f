"""Shows the output of the hidden tests around the report of a failing test."""

import re
from dataclasses import dataclass

BEFORE, AFTER = 20, 180
"""Lines shown before and after the report's first line."""
LINE = 2_000
"""Characters shown of one line."""
OPENS = re.compile(r"_{3,} |={3,} |-{3,} |(?:FAIL|ERROR)(?:ED)?: |not ok |✖|--- FAIL")
"""Matches the start of a line that opens the report of a failure."""
FAILS = re.compile(r"\b(?:FAIL(?:ED|URE)?|ERROR|Error)\b|Traceback|panicked")


@dataclass(frozen=True)
class LogLine:
    number: int
    text: str
    names: bool
    """The line names the test."""


@dataclass(frozen=True)
class Window:
    lines: tuple[LogLine, ...]
    total: int
    start: int
    """Number of the first line; the log starts at 1."""
    found: int | None
    """Number of the line that reports the test; None if the log does not name it."""


def window(log: str, test: str = "", start: int | None = None) -> Window:
    """The lines around the report of `test`, or from line `start` on, or the end of the log."""
    every = log.split("\n")
    names = short_names(test)
    found = None if start is not None else _place(every, names)
    if start is None:
        start = max(1, found - BEFORE) if found else max(1, len(every) - BEFORE - AFTER + 1)
    shown = every[start - 1 : start - 1 + BEFORE + AFTER]
    lines = tuple(
        LogLine(number, line[:LINE], any(_has(line[:LINE], name) for name in names))
        for number, line in enumerate(shown, start)
    )
    return Window(lines, len(every), start, found)


def short_names(test: str) -> list[str]:
    """The names of a test in logs: `a/test_b.py::TestC::test_d[x]` is also `TestC.test_d[x]` and
    `test_d[x]`; `test_d (pkg.TestC)` is also `test_d`."""
    if not test:
        return []
    parts = test.split("::")
    names = [test, ".".join(parts[1:]), parts[-1], test.split(" (", maxsplit=1)[0]]
    return [name for name in dict.fromkeys(names) if name]


def _place(every: list[str], names: list[str]) -> int | None:
    """The number of the line that opens the failure's report; otherwise of one that says that the
    test failed; otherwise of the first that names it."""
    mentions = {
        name: [number for number, line in enumerate(every, 1) if _has(line[:LINE], name)]
        for name in names
    }
    for says in (OPENS.match, FAILS.search):
        for numbers in mentions.values():
            for number in numbers:
                if says(every[number - 1][:LINE].lstrip()):
                    return number
    return next((numbers[0] for numbers in mentions.values() if numbers), None)


def _has(line: str, name: str) -> bool:
    """Whether the line contains the whole name: `test_ab` does not contain `test_a`."""
    at = line.find(name)
    end = at + len(name)
    return at >= 0 and not (line[at - 1 : at] + line[end : end + 1]).replace("_", "a").isalnum()

"""Reads `rows/*.txt`: rows as listings, in which the first sign of a line says which version has it.

space: all versions. `-`: the base. `+`: the gold patch, or the hidden tests. `*`: the honest variant.
`|`: the base and the gold patch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from perdure.testing.grader_contract import Edits

ROWS = Path(__file__).parent / "rows"
_BASE, _GOLD, _HONEST = " -|", " +|", " *"


@dataclass(frozen=True)
class Listing:
    """A row, before a framework renders it. Each version maps a path to its text."""

    name: str
    problem: str
    fails: tuple[str, ...]
    passes: tuple[str, ...]
    source: str
    """The path of the code under test; any other path is a test."""
    base: Edits
    gold: Edits
    honest: Edits
    tests: Edits


def listings(language: str) -> Iterator[Listing]:
    for text in (ROWS / f"{language}.txt").read_text().split("\n=== "):
        yield _listing(text.removeprefix("=== "))


def _listing(text: str) -> Listing:
    head, *sections = text.split("\n--- ")
    title, *lists = head.splitlines()
    name, _, problem = title.partition(": ")
    fails, passes = (_names(line) for line in lists or ("fails:", "passes:"))
    files = dict(section.split("\n", 1) for section in sections)
    source, *tests = files
    return Listing(
        name,
        problem,
        fails,
        passes,
        source,
        base={path: made for path, marked in files.items() if (made := _version(marked, _BASE))},
        gold={source: _version(files[source], _GOLD)},
        honest={source: _version(files[source], _HONEST)},
        tests={path: _version(files[path], _GOLD) for path in tests},
    )


def _names(line: str) -> tuple[str, ...]:
    return tuple(name for part in line.partition(":")[2].split(";") if (name := part.strip()))


def _version(marked: str, marks: str) -> str:
    """Empty if this version has only blank lines."""
    lines = [line[1:] for line in marked.splitlines() if (line or " ")[0] in marks]
    return "\n".join(lines) + "\n" if any(lines) else ""

"""Copies tests within their file, so that one run tries many twins: `test_x` and `test_x__t7`."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from perdure.graders.twins import wrong_literals
from perdure.graders.twins.expectation_mutation import Candidate
from perdure.graders.twins.failure_locations import Place
from perdure.graders.twins.parsed_test_file import Edit, Function, Source

MOST_EXCHANGES = 16
"""Most exchanges that calibration tries on one twin."""


@dataclass(frozen=True)
class Copy:
    """A function with some of its lines replaced; line -> text."""

    function: Function
    lines: tuple[tuple[int, bytes], ...] = ()


def with_copies(
    source: Source, copies: Sequence[Copy], prefix: str
) -> tuple[bytes, dict[Copy, Place]]:
    """The file with each copy after its function, and the place of each copy."""
    after: defaultdict[int, list[tuple[Copy, bytes, str]]] = defaultdict(list)
    for number, copy in enumerate(copies):
        name = f"{copy.function.name}__{prefix}{number}"
        after[copy.function.last].append((copy, _text(source, copy, name), name))
    lines: list[bytes] = []
    places = {}
    for number, line in enumerate(source.data.split(b"\n"), 1):
        lines.append(line)
        for copy, text, name in after.get(number, ()):
            lines.append(b"")
            first = len(lines) + 1
            lines += text.split(b"\n")
            places[copy] = Place(source.path, name, first, len(lines))
    return b"\n".join(lines), places


def _text(source: Source, copy: Copy, name: str) -> bytes:
    function, changed = copy.function, dict(copy.lines)
    lines = [
        changed.get(number, source.line(number))
        for number in range(function.first, function.last + 1)
    ]
    at = function.node.lineno - function.first
    pattern = rb"(\bdef\s+)" + re.escape(function.name.encode()) + rb"\b"
    lines[at] = re.sub(pattern, rb"\g<1>" + name.encode(), lines[at], count=1)
    return b"\n".join(lines)


def exchanges(source: Source, function: Function, twin: Candidate | None) -> list[Copy]:
    """The function (or a twin of it) with one literal exchanged for another literal of the file.

    A forger can run these in the base to find an exchange that makes a test pass there. If only the
    twin has such an exchange, the forger recognizes it.
    """
    changed = {twin.line: twin.after} if twin is not None else {}
    edits = _spread(_edits(source, function, frozenset(changed)))
    made = []
    for edit in edits:
        text = source.line(edit.line)
        line = text[: edit.start] + edit.text + text[edit.end :]
        made.append(Copy(function, tuple({**changed, edit.line: line}.items())))
    return made[:MOST_EXCHANGES]


def _edits(
    source: Source, function: Function, without: frozenset[int]
) -> Iterator[tuple[int, Edit]]:
    for node in ast.walk(function.node):
        place = source.place(node)
        if not isinstance(node, ast.Constant) or place is None or place.line in without:
            continue
        own = source.text(node)
        for step, text in enumerate(
            wrong_literals.literals_of_type(source, function, type(node.value))[:6]
        ):
            if text != own:
                yield step, place.with_text(text)


def _spread(edits: Iterable[tuple[int, Edit]]) -> list[Edit]:
    return [edit for _, edit in sorted(edits, key=lambda one: one[0])]

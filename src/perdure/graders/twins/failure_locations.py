"""Finds how tests failed in a calibration run: the exception and the line of the test file.

pytest's junit file has this for each test; other runners print Python's tracebacks. The line of the
test file identifies the function that failed, because every copy of a test has its own lines.
"""

import posixpath
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple
from xml.etree import ElementTree

from perdure.graders.protocols.test_lists import SuiteRun, reading_of
from perdure.graders.twins.published_test_ids import named
from perdure.types import TestStatus


class Place(NamedTuple):
    """A function of a file, with its first and last line."""

    path: str
    name: str
    first: int
    last: int


class Behaviour(NamedTuple):
    """How a function behaved: the statuses of all its ids, and each (exception, line) of its
    failures. Lines count from the function's first."""

    statuses: frozenset[TestStatus]
    failures: frozenset[tuple[str, int]]


NOT_RUN = Behaviour(frozenset(), frozenset())


def behaviours(suite: SuiteRun, places: Sequence[Place]) -> dict[Place, Behaviour]:
    """The behavior of each place; NOT_RUN for a place without ids. Call this through `read`."""
    statuses: defaultdict[str, set[TestStatus]] = defaultdict(set)
    for test, status in reading_of(suite).statuses.items():
        statuses[named(test).name].add(status)
    failures: defaultdict[Place, set[tuple[str, int]]] = defaultdict(set)
    tellings = _junit(suite.run.junit) if suite.run.junit else _tracebacks(suite.run.log)
    for kind, text in tellings:
        for place, line in _lines(text, places):
            failures[place].add((kind, line))
    return {
        place: Behaviour(frozenset(statuses[place.name]), frozenset(failures[place]))
        for place in places
    }


def _lines(text: str, places: Sequence[Place]) -> Iterator[tuple[Place, int]]:
    """For each function that a traceback names, the last line named."""
    found: dict[Place, int] = {}
    for file in {place.path for place in places}:
        base = re.escape(posixpath.basename(file))
        for match in re.finditer(base + r'(?:", line |:)(\d+)', text):
            for place in places:
                if place.path == file and place.first <= int(match[1]) <= place.last:
                    found[place] = int(match[1]) - place.first
    yield from found.items()


def _junit(data: bytes) -> Iterator[tuple[str, str]]:
    try:
        tree = ElementTree.fromstring(data)
    except ElementTree.ParseError:
        return
    for case in tree.iter("testcase"):
        for said in (*case.findall("failure"), *case.findall("error")):
            yield _kind(said.get("message") or ""), said.text or ""


def _kind(message: str) -> str:
    """`pkg.errors.Bad: text` -> `Bad`. pytest shows a bare assert without its exception."""
    if message.startswith("assert "):
        return "AssertionError"
    match = re.match(r"[\w.]+", message)
    return match[0].rpartition(".")[2] if match else ""


def _tracebacks(log: bytes) -> Iterator[tuple[str, str]]:
    """Python's own tracebacks, from `Traceback` to the first line that is not indented."""
    frames: list[str] | None = None
    for line in log.decode("utf-8", "replace").splitlines():
        if line.startswith("Traceback (most recent call last)"):
            frames = []
        elif frames is not None and line.startswith((" ", "\t")):
            frames.append(line)
        elif frames is not None and line.strip():
            yield _kind(line), "\n".join(frames)
            frames = None

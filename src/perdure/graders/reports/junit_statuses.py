"""Reads pytest's junit file: one status per test, under the keys that pytest derives from ids.

Hostile code can write this file. So the parser bounds its size and depth, refuses DTDs and builds
no tree, and a result counts only if the log agrees.
"""

import re
from collections import defaultdict
from collections.abc import Callable
from xml.parsers import expat

from perdure.graders.reports.log_parsers import worst
from perdure.types import TestStatus

Key = tuple[str, str]
"""(class name, test name), as in the file."""

MAX_BYTES = 64 << 20
MAX_DEPTH = 64
"""pytest's own files have depth 5."""


class UnusableJunit(ValueError):
    """The file is not a complete junit file of pytest."""


class JunitReport:
    """Statuses by test id, under the names that pytest gives tests in junit."""

    def __init__(self, statuses: dict[Key, TestStatus], rename: Callable[[str], str]) -> None:
        self._statuses = statuses
        self._rename = rename
        self._by_name: dict[str, list[str]] = defaultdict(list)
        for place, name in statuses:
            self._by_name[name].append(place)

    def get(self, test: str) -> TestStatus | None:
        """The status of a test, given its id in the log; None if the file lacks it."""
        place, name = _key(test)
        name = self._rename(name)
        if (place, name) in self._statuses:
            return self._statuses[place, name]
        # Paths in the log start at the working directory, paths in junit at pytest's rootdir.
        similar = [p for p in self._by_name[name] if _tail_of(p, place) or _tail_of(place, p)]
        return self._statuses[similar[0], name] if len(similar) == 1 else None


def parse_junit(data: bytes, rename: Callable[[str], str] = str) -> JunitReport:
    """Raises: UnusableJunit."""
    if len(data) > MAX_BYTES:
        raise UnusableJunit(f"{len(data)} bytes")
    if not data.startswith(b"<?xml") or b"<!DOCTYPE" in data or b"<!ENTITY" in data:
        raise UnusableJunit("not a junit file")
    if b"utf-8" not in data[:100].lower():
        raise UnusableJunit("not in UTF-8")
    cases = _Cases(rename)
    parser = expat.ParserCreate("utf-8", "}")  # whatever the file declares
    parser.StartElementHandler, parser.EndElementHandler = cases.start, cases.end
    try:
        parser.Parse(data, True)
    except expat.ExpatError as error:
        if error.code == expat.errors.codes[expat.errors.XML_ERROR_NO_MEMORY]:
            raise MemoryError from error
        raise UnusableJunit(f"incomplete: {error}") from error
    return JunitReport(cases.found, rename)


class _Cases:
    """Collects the status of each `testcase` while expat reads the file."""

    def __init__(self, rename: Callable[[str], str]) -> None:
        self.found: dict[Key, TestStatus] = {}
        self._rename = rename
        self._depth = 0
        self._open: list[tuple[int, Key, dict[str, TestStatus]]] = []
        """Depth, key, and status by child, of each test case that has not ended."""

    def start(self, name: str, attributes: dict[str, str]) -> None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise UnusableJunit(f"deeper than {MAX_DEPTH} elements")
        if self._open and self._open[-1][0] == self._depth - 1 and name in _MEANINGS:
            self._open[-1][2].setdefault(name, _meaning(name, attributes))
        if name == "testcase":
            key = (attributes.get("classname", ""), self._rename(attributes.get("name", "")))
            self._open.append((self._depth, key, {}))

    def end(self, name: str) -> None:
        if name == "testcase":
            _, key, said = self._open.pop()
            status = next((said[kind] for kind in _MEANINGS if kind in said), TestStatus.PASSED)
            self.found[key] = worst((self.found.get(key, TestStatus.PASSED), status))
        self._depth -= 1


_MEANINGS = ("error", "failure", "skipped")
"""Elements of a test case; the first one present gives the status."""


def _meaning(name: str, attributes: dict[str, str]) -> TestStatus:
    if name != "skipped":
        return TestStatus.ERROR if name == "error" else TestStatus.FAILED
    return TestStatus.XFAIL if attributes.get("type") == "pytest.xfail" else TestStatus.SKIPPED


def _key(test: str) -> Key:
    """`tests/a.py::C::t[p]` -> (`tests.a.C`, `t[p]`)."""
    path, bracket, params = test.partition("[")
    names = path.split("::")
    names[0] = re.sub(r"\.py$", "", names[0].replace("/", "."))
    return ".".join(names[:-1]), _escaped(names[-1] + bracket + params)


def _escaped(name: str) -> str:
    """Replace characters that XML cannot hold as pytest does: `#x1B`."""
    return re.sub(
        r"[^\t\n\r\x20-\x7e\x80-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]",
        lambda match: f"#x{ord(match[0]):02X}" if ord(match[0]) <= 0xFF else f"#x{ord(match[0]):04X}",
        name,
    )  # fmt: skip


def _tail_of(short: str, long: str) -> bool:
    return long.endswith("." + short)

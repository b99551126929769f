"""From pytest's junit file to one status per test, under the keys that pytest derives from ids.

Hostile code can write this file, so its size is bounded, DTDs are refused, and a result counts only
if the log agrees.
"""

import re
from collections import defaultdict
from collections.abc import Callable
from xml.etree import ElementTree

from perdure.graders.log_parsers import worst
from perdure.types import TestStatus

Key = tuple[str, str]
"""(class name, test name), as in the file."""

MAX_BYTES = 64 << 20


class UnusableJunit(ValueError):
    """The file is not one that pytest wrote to its end."""


class JunitReport:
    """Statuses by test id, under the names that pytest gives tests in junit."""

    def __init__(self, statuses: dict[Key, TestStatus], rename: Callable[[str], str]) -> None:
        self._statuses = statuses
        self._rename = rename
        self._by_name: dict[str, list[str]] = defaultdict(list)
        for place, name in statuses:
            self._by_name[name].append(place)

    def get(self, test: str) -> TestStatus | None:
        """The status of a test id from the log; None if the file lacks it."""
        place, name = _key(test)
        name = self._rename(name)
        if (place, name) in self._statuses:
            return self._statuses[place, name]
        # The log's paths start at the working directory, junit's at pytest's rootdir.
        similar = [p for p in self._by_name[name] if _tail_of(p, place) or _tail_of(place, p)]
        return self._statuses[similar[0], name] if len(similar) == 1 else None


def parse_junit(data: bytes, rename: Callable[[str], str] = str) -> JunitReport:
    """Raises: UnusableJunit."""
    if not data.startswith(b"<?xml") or b"<!DOCTYPE" in data or b"<!ENTITY" in data:
        raise UnusableJunit("not a junit file")
    if b"utf-8" not in data[:100].lower():
        raise UnusableJunit("not in UTF-8")
    try:
        root = ElementTree.fromstring(data)
    except ElementTree.ParseError as error:
        raise UnusableJunit(f"incomplete: {error}") from error
    found: dict[Key, TestStatus] = {}
    for case in root.iter("testcase"):
        key = (case.get("classname", ""), rename(case.get("name", "")))
        found[key] = worst((found.get(key, TestStatus.PASSED), _status(case)))
    return JunitReport(found, rename)


def _status(case: ElementTree.Element) -> TestStatus:
    if case.find("error") is not None:
        return TestStatus.ERROR
    if case.find("failure") is not None:
        return TestStatus.FAILED
    skipped = case.find("skipped")
    if skipped is None:
        return TestStatus.PASSED
    return TestStatus.XFAIL if skipped.get("type") == "pytest.xfail" else TestStatus.SKIPPED


def _key(test: str) -> Key:
    """`tests/a.py::C::t[p]` -> (`tests.a.C`, `t[p]`)."""
    path, bracket, params = test.partition("[")
    names = path.split("::")
    names[0] = re.sub(r"\.py$", "", names[0].replace("/", "."))
    return ".".join(names[:-1]), _escaped(names[-1] + bracket + params)


def _escaped(name: str) -> str:
    """Characters that XML cannot hold, as pytest writes them: `#x1B`."""
    return re.sub(
        r"[^\t\n\r\x20-\x7e\x80-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]",
        lambda match: f"#x{ord(match[0]):02X}" if ord(match[0]) <= 0xFF else f"#x{ord(match[0]):04X}",
        name,
    )  # fmt: skip


def _tail_of(short: str, long: str) -> bool:
    return long.endswith("." + short)

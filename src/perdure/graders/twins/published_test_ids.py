"""Finds the function that a test id of pytest, unittest, django or sympy names."""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from perdure.graders.twins.parsed_test_file import Function, Source


class Named(NamedTuple):
    """The parts of an id; empty if the id lacks one."""

    path: str
    owner: str
    name: str


class Target(NamedTuple):
    """A function that only FAIL_TO_PASS tests run."""

    source: Source
    function: Function
    tests: tuple[str, ...]


def named(test: str) -> Named:
    """`a/test_b.py::C::test_d[p]`, `test_d (a.tests.C)`, `test_d (a.tests.C.test_d)`, `test_d`."""
    plain = test.split("[", 1)[0]
    if "::" in plain:
        path, *names = plain.split("::")
        return Named(path, names[-2] if len(names) > 1 else "", names[-1])
    if match := re.fullmatch(r"(\w+) \(([\w.]+)\)", test.strip()):
        place = match[2].removesuffix("." + match[1]).split(".")
        return Named("/".join(place[:-1]) + ".py", place[-1], match[1])
    path, colon, name = plain.rpartition(".py:")
    return Named(path + ".py" if colon else "", "", name if colon else plain)


def targets(
    sources: Sequence[Source], fail_to_pass: Iterable[str], pass_to_pass: Iterable[str]
) -> tuple[list[Target], dict[str, str]]:
    """The functions to make twins of, and why each other FAIL_TO_PASS id can have none."""
    reasons: dict[str, str] = {}
    tests: defaultdict[tuple[Source, Function], list[str]] = defaultdict(list)
    for test in fail_to_pass:
        found = matching(sources, test)
        if len(found) == 1:
            tests[found[0]].append(test)
        elif found:
            reasons[test] = "several functions have its name"
        else:
            reasons[test] = "no Python file that the test patch changes contains its function"
    kept = {place for test in pass_to_pass for place in matching(sources, test)}
    found_targets = []
    for (source, function), ids in tests.items():
        if (source, function) in kept:
            reasons |= dict.fromkeys(ids, "PASS_TO_PASS tests run the same function")
        elif not source.added.intersection(range(function.first, function.last + 1)):
            reasons |= dict.fromkeys(ids, "the test patch adds no line to its function")
        else:
            found_targets.append(Target(source, function, tuple(ids)))
    return found_targets, reasons


def matching(sources: Sequence[Source], test: str) -> list[tuple[Source, Function]]:
    """The functions that an id may name. The id of an inherited test names the subclass, so if no
    owner matches, functions of any class count."""
    path, owner, name = named(test)
    found = [
        (source, function)
        for source in sources
        if _same_path(path, source.path)
        for function in source.functions
        if function.name == name
    ]
    return [one for one in found if one[1].owner == owner] or (found if owner else [])


def _same_path(said: str, path: str) -> bool:
    """Compare by suffix: an id's path may be relative to a subfolder, such as django's `tests/`."""
    return not said or f"/{path}".endswith(f"/{said}") or f"/{said}".endswith(f"/{path}")

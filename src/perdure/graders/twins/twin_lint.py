"""Finds twins that a reader would recognize without running them.

Calibration never uses `refused` twins, and prefers clean ones to `weak` ones. A forger who knows
such a rule recognizes weak twins, but they still catch a forger who does not.
"""

import ast
import re
from enum import StrEnum

from perdure.graders.twins.expectation_mutation import Candidate
from perdure.graders.twins.parsed_test_file import Source


class Lint(StrEnum):
    CLEAN = "clean"
    WEAK = "weak"
    REFUSED = "refused"


def lint(source: Source, candidate: Candidate) -> tuple[Lint, str]:
    """The candidate's worst flaw and its description."""
    function = candidate.function
    twin = ast.parse(source.function_text(function, (candidate.line, candidate.after)))
    if _repeats(twin) - _repeats(ast.parse(source.function_text(function))):
        return Lint.REFUSED, "a repeated element or key"
    if _stutters(candidate.after) and not _stutters(candidate.before):
        return Lint.REFUSED, "a repeated word"
    test = source.function_text(function)
    if candidate.rule.startswith("raises") and _fits(test, candidate.old, candidate.new) < 0:
        return Lint.WEAK, "an exception whose name fits the test less than the original"
    others = source.data.replace(candidate.before, b"", 1)
    if _inner(candidate.old) in others and _inner(candidate.new) not in others:
        return Lint.WEAK, "a literal that occurs nowhere else, in place of one that does"
    if candidate.rule.startswith("truth"):
        return Lint.WEAK, "a predicate compared with a constant"
    if candidate.rule == "negation":
        return Lint.WEAK, "a negation"
    return Lint.CLEAN, ""


def _repeats(tree: ast.AST) -> set[tuple[int, str]]:
    """Line and source of each set element or dict key that repeats an earlier one."""
    found = set()
    for node in ast.walk(tree):
        parts = node.elts if isinstance(node, ast.Set) else ()
        parts = [key for key in node.keys if key] if isinstance(node, ast.Dict) else parts
        seen: set[str] = set()
        for part in parts:
            text = ast.dump(part)
            if text in seen:
                found.add((part.lineno, text))
            seen.add(text)
    return found


def _stutters(line: bytes) -> bool:
    return re.search(rb"\b([A-Za-z]{3,})\W+\1\b", line) is not None


def _fits(test: bytes, old: bytes, new: bytes) -> int:
    """How many more words of the new name than of the old one occur in the test."""
    text = re.sub(rb"\b(?:%s|%s)\b" % (re.escape(old), re.escape(new)), b"", test).lower()
    return _found(new, text) - _found(old, text)


_COMMON = frozenset((b"error", b"exception", b"invalid", b"value", b"type", b"key", b"runtime"))


def _found(name: bytes, text: bytes) -> int:
    words = {word.lower() for word in re.findall(rb"[A-Z][a-z]+", name)}
    return sum(word in text for word in words - _COMMON)


def _inner(expression: bytes) -> bytes:
    """The expression without quotes, because the same text may be written with other quotes."""
    return expression.strip(b"\"'")

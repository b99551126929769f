"""Finds twins that a reader would recognize without running them.

Calibration never uses `refused` twins, and uses `weak` ones only for a test that has no other. A
forger who judges as `plausibility_judge` does recognizes them, but they still catch other forgers.
"""

import ast
import re
from enum import StrEnum

from perdure.graders.twins.expectation_mutation import Candidate
from perdure.graders.twins.parsed_test_file import Source
from perdure.graders.twins.plausibility_judge import is_told_apart


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
    if stutters(candidate.after) and not stutters(candidate.before):
        return Lint.REFUSED, "a repeated word"
    if is_told_apart(source, candidate):
        return Lint.WEAK, "more or less plausible than the original"
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


def stutters(line: bytes) -> bool:
    """Whether a word follows itself."""
    return re.search(rb"\b([A-Za-z]{3,})\W+\1\b", line) is not None

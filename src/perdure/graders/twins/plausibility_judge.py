"""Judges whether a reader could tell a twin from its original.

A forger who holds one of the two can list its neighbors by the public rules and trust the most
plausible. If calibration only dropped twins that are less plausible, the forger could trust the
least plausible. So calibration prefers twins that are as plausible as their original, and marks
others as weak. The judge uses only text: the test, its file, and arithmetic on the literals next to
the expectation.
"""

import ast
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

from perdure.graders.twins.changed_line import ChangedLine, TestFile

MARGIN = 0.1
"""Smaller differences of points say nothing."""
LONGEST = 300
"""Bytes of a text that is compared with others."""

_CONSTANT = re.compile(
    rb"'(?:[^'\\\n]|\\.)*'|\"(?:[^\"\\\n]|\\.)*\"|(?<![\w.])-?\d+(?:\.\d+)?(?!\w)"
)
_WORD = re.compile(rb"[A-Za-z]{3,}")
_CLASS_WORD = re.compile(rb"[A-Z][a-z]+")
_COMMON = frozenset((b"error", b"exception", b"invalid", b"value", b"type", b"key", b"runtime"))


def is_told_apart(source: TestFile, candidate: ChangedLine) -> bool:
    """Whether a reader could tell which of the two is the original."""
    return candidate.changes_form or abs(advantage(source, candidate)) > MARGIN


def advantage(source: TestFile, candidate: ChangedLine) -> float:
    """Points of the original over those of the twin."""
    around = Surroundings.of(source, candidate)
    original, twin = (around.points(one, candidate.rule) for one in (candidate.old, candidate.new))
    return original - twin


@dataclass(frozen=True)
class Surroundings:
    """The file without the expectation that differs."""

    line: bytes
    """The rest of its line."""
    function: bytes
    """The rest of the test, with that line."""
    file: bytes
    """The rest of the file, with the test."""

    @classmethod
    def of(cls, source: TestFile, candidate: ChangedLine) -> "Surroundings":
        function = candidate.function
        lines = [source.line(n) for n in range(1, source.data.count(b"\n") + 2)]
        start = _start(candidate)
        before = candidate.before
        rest = before[:start] + b" " + before[start + len(candidate.old) :]
        lines[candidate.line - 1] = rest
        own = b"\n".join(lines[function.first - 1 : function.last])
        return cls(rest, own, b"\n".join(lines))

    def points(self, expression: bytes, rule: str) -> float:
        """How well the expression fits here as an expectation."""
        if rule.startswith("raises"):
            return self._of_class(expression)
        value = value_of(expression)
        known = 0.5 * _occurs(expression, self.file) + 0.5 * _occurs(expression, self.function)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return known + 2.0 * (value in self._computed())
        if isinstance(value, str | bytes):
            return known + self._of_text(expression.strip(b"\"'")[:LONGEST])
        return known

    def _of_class(self, name: bytes) -> float:
        words = {word.lower() for word in _CLASS_WORD.findall(name)} - _COMMON
        said = self.function.lower()
        return sum(word in said for word in words) + 0.5 * _occurs(name, self.file)

    def _of_text(self, text: bytes) -> float:
        """Its words occur elsewhere, and it resembles a text on its line or is made from one."""
        words = _WORD.findall(text)
        share = sum(_occurs(word, self.file) for word in words) / len(words) if words else 0.0
        texts = [one.encode() for one in self._constants() if isinstance(one, str)]
        alike = max((SequenceMatcher(None, text, one).ratio() for one in texts), default=0.0)
        made = any(text in _made_from(one) for one in texts if one != text)
        return share + alike + 3.0 * made

    def _constants(self) -> list[Any]:
        return [value_of(match[0][:LONGEST]) for match in _CONSTANT.finditer(self.line)]

    def _computed(self) -> set[float]:
        """Numbers that a reader would compute from the literals on the line."""
        constants = self._constants()
        numbers = [one for one in constants if isinstance(one, int | float)]
        found = {float(len(one)) for one in constants if isinstance(one, str)}
        found |= {float(len(numbers)), float(sum(numbers))}
        for one, other in itertools.permutations(numbers, 2):
            found |= {float(one + other), float(one - other), float(one * other)}
            found |= {one / other} if other else set()
        return found


def _start(candidate: ChangedLine) -> int:
    """Where the exchanged expression begins: the same text may occur earlier on its line."""
    before, after, old, new = candidate.before, candidate.after, candidate.old, candidate.new
    places = (match.start() for match in re.finditer(re.escape(old), before))
    return next((p for p in places if after.startswith(before[:p] + new)), 0)


def value_of(text: bytes) -> Any:
    """The value of a literal; the text itself where it is none, such as a word inside a string."""
    try:
        return ast.literal_eval(text.decode())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text.decode("utf-8", "replace")


def _occurs(text: bytes, within: bytes) -> bool:
    inner = re.escape(text.strip(b"\"'"))
    return re.search(rb"(?<!\w)" + inner + rb"(?!\w)", within) is not None


def _made_from(text: bytes) -> Iterator[bytes]:
    yield from (text.lower(), text.upper(), text.title(), text.strip(), text[::-1])

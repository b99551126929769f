"""What a reader can measure of a line: how its expressions fit, and how their neighbors would."""

import re
from difflib import SequenceMatcher
from functools import cache
from typing import Any

import numpy
from numpy.typing import NDArray

from benchmarks.judge.twin_pools import Shown
from perdure.graders.twins.expectation_mutation import Candidate
from perdure.graders.twins.plausibility_judge import Surroundings, value_of

Vector = NDArray[numpy.float64]

_WORD = re.compile(rb"[A-Za-z]{3,}")
_NUMBER = re.compile(rb"(?<![\w.])\d{1,9}(?![\w.])")
_TEXT = re.compile(rb"'(?:[^'\\\n]|\\.)*'|\"(?:[^\"\\\n]|\\.)*\"")
_SHAPES = (
    *(b" is None", b" is not ", b" != ", b" not in ", b" in ", b" == 1", b" == ", b"assertIsNone"),
    *(b"match=", b"'^", b'"^', b"False", b"True", b"None", b"[]", b"{}", b"raises", b"isinstance"),
)
_RULES = (
    *("literal", "literal of", "another", "raises"),
    *("negation", "truth", "match", "in:", "order", "outcomes"),
)
_SUMMARIES = (numpy.mean, numpy.max, numpy.min)


@cache
def features(shown: Shown) -> Vector:
    """The line's form, and how much better or worse its neighbors fit."""
    changes = numpy.array([_change(shown, one) for one in shown.neighbors])
    rules = [one.rule for one in shown.neighbors]
    shares = [sum(rule.startswith(kind) for rule in rules) / len(rules) for kind in _RULES]
    form = [float(shape in shown.text) for shape in _SHAPES]
    parts = (form, shares, [numpy.log(len(rules))], *(f(changes, 0) for f in _SUMMARIES))
    return numpy.concatenate(parts)


def _change(shown: Shown, one: Candidate) -> Vector:
    around, name = Surroundings.of(shown.source, one), one.function.name.lower().encode()
    old, new = (
        [around.points(text, one.rule), *_of_text(text, around, name)]
        for text in (one.old, one.new)
    )
    return numpy.subtract(new, old, dtype=numpy.float64)


def _of_text(text: bytes, around: Surroundings, name: bytes) -> list[float]:
    inner = text.strip(b"\"'")[:200]
    words = [word.lower() for word in _WORD.findall(inner)]
    line, function = around.line.lower(), around.function.lower()
    texts = [one[1:-1][:200] for one in _TEXT.findall(around.line)]
    alike = [SequenceMatcher(None, inner, one).ratio() for one in texts]
    return [
        *(_share(words, place) for place in (name, line, function, around.file.lower())),
        *(numpy.log1p(place.count(inner)) for place in (around.line, around.function, around.file)),
        float(any(inner in one for one in texts)),
        float(any(one in inner for one in texts if one)),
        max(alike, default=0.0),
        numpy.log1p(len(text)),
        sum(48 <= byte < 58 for byte in text) / (len(text) or 1),
        sum(65 <= byte < 91 for byte in text) / (len(text) or 1),
        float(text[:1] in b"'\""),
        *_of_number(value_of(text), around),
    ]


def _share(words: list[bytes], place: bytes) -> float:
    return sum(word in place for word in words) / len(words) if words else 0.0


def _of_number(value: Any, around: Surroundings) -> list[float]:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return [0.0] * 10
    places = (around.line, around.function)
    near, far = ({int(one) for one in _NUMBER.findall(place)} for place in places)
    sizes = {len(one) - 2 for one in _TEXT.findall(around.function)}
    commas = (around.line.count(b","), around.line.count(b",") + 1)
    form = (True, value % 10 == 0, value % 2 == 0, value in (0, 1), value in sizes, value in commas)
    next_to = (value - 1 in near or value + 1 in near, value - 1 in far, value + 1 in far)
    return [*map(float, form + next_to), float(numpy.log1p(abs(value)))]

"""Finds plausible wrong literals of the same type, those of the same test first."""

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from perdure.graders.twins.parsed_test_file import Edit, Function, Source

LONGEST = 200
"""A literal of more bytes never replaces another."""

WORD = re.compile(rb"(?<![\\\w])[A-Za-z]{3,}(?!\w)")
_TOKEN = re.compile(rb"[bBrRuU]{0,2}(?:'(?:[^'\\\n]|\\.)+'|\"(?:[^\"\\\n]|\\.)+\")")
_NUMBER = re.compile(rb"(?<![\\\w.])\d{1,6}(?![\w.])")


def replacements(source: Source, function: Function, leaf: ast.expr) -> Iterator[Edit]:
    """Edits that change the value of a literal, the most plausible first."""
    place = source.place(leaf)
    if not isinstance(leaf, ast.Constant):
        if place is not None:
            yield place.with_text(_other_empty(leaf))
        return
    value = leaf.value
    if isinstance(value, str | bytes):
        yield from _other_text(source, function, leaf, place)
    elif place is not None:
        for text in (*_other_value(value), *literals_of_type(source, function, type(value))):
            if text != source.text(leaf):
                yield place.with_text(text)


def _other_empty(leaf: ast.expr) -> bytes:
    return b"[]" if isinstance(leaf, ast.Dict | ast.Tuple) else b"{}"


def _other_value(value: Any) -> tuple[bytes, ...]:
    if isinstance(value, bool):
        return (b"None",)
    if value is None:
        return (b"False", b"0")
    if isinstance(value, int):
        return tuple(str(other).encode() for other in (value + 1, value - 1) if other >= 0)
    return (repr(value + 1).encode(),)


def _other_text(
    source: Source, function: Function, leaf: ast.Constant, place: Edit | None
) -> Iterator[Edit]:
    """Exchange a word or number in the text, or the whole text (first, if it is short)."""
    inner = [*_within(source, function, leaf)]
    whole: list[Edit] = []
    if place is not None and _is_one_token(source.text(leaf) or b""):
        texts = literals_of_type(source, function, type(leaf.value))[:40]
        near = nearest(texts, source.text(leaf) or b"")
        whole = [place.with_text(text) for text in near]
    short = isinstance(leaf.value, str | bytes) and len(leaf.value) <= 12
    first, second = (whole, inner) if short else (inner, whole)
    yield from first[:3]
    yield from second[:3]
    yield from first[3:6]


def nearest(texts: Iterable[bytes], own: bytes) -> list[bytes]:
    """The other texts, those that look most like `own` first."""
    others = [text for text in texts if text != own]
    shape, size = _shape(own), len(own)
    return sorted(others, key=lambda text: (_shape(text) != shape, abs(len(text) - size)))


def _shape(text: bytes) -> tuple[bool, bool, bool]:
    """Whether it is uppercase, has spaces, has punctuation: what a reader notices first."""
    return text.isupper(), b" " in text, re.search(rb"[^\w\s\"'-]", text) is not None


def _within(source: Source, function: Function, leaf: ast.Constant) -> Iterator[Edit]:
    words = _words(source, function)
    for line in range(leaf.lineno, (leaf.end_lineno or leaf.lineno) + 1):
        start = leaf.col_offset if line == leaf.lineno else 0
        end = leaf.end_col_offset if line == leaf.end_lineno else None
        text = source.line(line)[start:end]
        for first, last, new in word_exchanges(text, words):
            yield Edit(line, start + first, start + last, new)


def word_exchanges(text: bytes, words: Sequence[bytes]) -> Iterator[tuple[int, int, bytes]]:
    """Start, end and replacement of each number and word of a text that can be exchanged."""
    for match in _NUMBER.finditer(text):
        yield match.start(), match.end(), str(int(match[0]) + 1).encode()
    for match in WORD.finditer(text):
        others = [w for w in words if w.lower() not in text.lower()]
        same = [w for w in others if len(w) == len(match[0])]
        near = [w for w in others if abs(len(w) - len(match[0])) == 1]
        for word in (*same[:1], *near[:1]):
            if word.islower() == match[0].islower():
                yield match.start(), match.end(), word


def _words(source: Source, function: Function) -> list[bytes]:
    """Words of strings: in the function first, then in added lines, then in the file."""
    found: list[tuple[int, bytes]] = []
    for line, value, _ in source.texts_and_values:
        if isinstance(value, str):
            far = _distance(source, function, line)
            found += [(far, word) for word in WORD.findall(value[:4096].encode("utf-8", "ignore"))]
    return list(dict.fromkeys(word for _, word in sorted(found, key=lambda one: one[0])))


def literals_of_type(source: Source, function: Function, kind: type) -> list[bytes]:
    """Literals of this type: of the function first, then of added lines, then of the file."""
    found: list[tuple[int, bytes]] = []
    for line, value, text in source.texts_and_values:
        fits = kind not in (str, bytes) or _is_one_token(text)
        if type(value) is kind and len(text) <= LONGEST and fits:
            found.append((_distance(source, function, line), text))
    return list(dict.fromkeys(text for _, text in sorted(found, key=lambda one: one[0])))


def _distance(source: Source, function: Function, line: int) -> int:
    if function.first <= line <= function.last:
        return 0
    return 1 if line in source.added else 2


def texts_unlike(
    source: Source, function: Function, leaf: ast.Constant
) -> Iterator[tuple[bytes, Any]]:
    """Source and value of other strings that could plausibly replace this one."""
    written = source.text(leaf)
    if written is None or not _is_one_token(written):
        return
    texts = []
    for edit in _within(source, function, leaf):
        start = leaf.col_offset
        texts.append(written[: edit.start - start] + edit.text + written[edit.end - start :])
    for text in (*texts[:4], *literals_of_type(source, function, type(leaf.value))[:4]):
        if text == written:
            continue
        try:
            yield text, ast.literal_eval(text.decode())
        except (ValueError, SyntaxError):
            continue


def anchored(text: bytes, old: object, new: object) -> bytes | None:
    """The literal `text` as `^...$`; None if the pattern `old` could match too."""
    if not isinstance(old, str) or not isinstance(new, str) or text[:1] not in (b'"', b"'"):
        return None
    if re.escape(new).replace("\\ ", " ") != new:
        return None  # only a text without special characters matches itself
    try:
        if re.search(old, new) or re.search(old, new + "\n"):
            return None
    except re.error:
        return None
    return text[:1] + b"^" + text[1:-1] + b"$" + text[-1:]


def _is_one_token(text: bytes) -> bool:
    """One literal: not several adjacent ones, which Python joins, and not in triple quotes."""
    return _TOKEN.fullmatch(text) is not None

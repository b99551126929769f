"""The twins that each test of a file in another language allows, best first."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tree_sitter import Node

from perdure.graders.twins import wrong_literals
from perdure.graders.twins.changed_line import as_twin
from perdure.graders.twins.other_languages.expectations import (
    Expectation,
    Side,
    constant_value,
    declared_name,
    expectations,
    is_constant,
)
from perdure.graders.twins.other_languages.go_tables import Table, cases, tables
from perdure.graders.twins.other_languages.parsed_file import (
    ParsedFile,
    TestFunction,
    descendants,
    place_of,
    text_of,
    tokens,
)
from perdure.graders.twins.parsed_test_file import Edit
from perdure.graders.twins.plausibility_judge import is_told_apart
from perdure.graders.twins.twin_lint import stutters
from perdure.types import Twin

NEGATION = "negation"


@dataclass(frozen=True)
class Change:
    """A line of a test and its replacement. `rank` orders changes; 0 is the best."""

    function: TestFunction
    line: int
    before: bytes
    after: bytes
    rule: str
    rank: int
    old: bytes
    new: bytes

    @property
    def changes_form(self) -> bool:
        """Whether it changes how the test compares, not only the value that it expects."""
        return self.rule == NEGATION


class NamedTwins(NamedTuple):
    """The twins of a test, or of one case of its table."""

    tests: tuple[str, ...]
    """Ids that may name it."""
    parents: tuple[str, ...]
    """Ids of the enclosing test, which fails with each of its cases."""
    twins: list[Twin]


def pools_of(file: ParsedFile, function: TestFunction, tests: Sequence[str]) -> list[NamedTwins]:
    """Twins for each case of a Go table whose name is among these ids of the function, and twins of
    the rest of the function for the other ids."""
    twins, rest = twins_of(file, function, tuple(tests)), list(tests)
    pools = []
    for case in cases(file, function):
        if named := tuple(test for test in rest if case.is_named(test)):
            pools.append((named, [twin for twin in twins if twin.line in case.lines]))
            twins = [twin for twin in twins if twin.line not in case.lines]
            rest = [test for test in rest if test not in named]
    parents = tuple(test for test in rest if pools and f"{function.name}/" not in test)
    if others := tuple(test for test in rest if test not in parents):
        pools.append((others, twins))
    return [NamedTwins(named, parents, own) for named, own in pools]


def twins_of(file: ParsedFile, function: TestFunction, tests: tuple[str, ...]) -> list[Twin]:
    """The twins of the function that these ids name; those that a reader could recognize come last."""
    twins = [
        as_twin(one, file.path, tests, weak=is_told_apart(file, one))
        for one in changes(file, function)
        if not stutters(one.after) or stutters(one.before)
    ]
    return sorted(twins, key=lambda twin: twin.weak)


def changes(file: ParsedFile, function: TestFunction) -> list[Change]:
    """Different changes of added lines; within a rank, lines take turns."""
    found: dict[tuple[int, bytes], Change] = {}
    for edit, rule, rank in sorted(_edits(file, function), key=lambda one: one[2]):
        before = file.line(edit.line)
        after = before[: edit.start] + edit.text + before[edit.end :]
        is_negative_zero = edit.text == b"0" and before[: edit.start].endswith(b"-")
        if edit.line in file.added and after != before and not is_negative_zero:
            old = before[edit.start : edit.end]
            made = Change(function, edit.line, before, after, rule, rank, old, edit.text)
            found.setdefault((edit.line, after), made)
    turn: Counter[tuple[int, int]] = Counter()
    order: list[tuple[int, int, Change]] = []
    for one in found.values():
        order.append((one.rank, turn[one.rank, one.line], one))
        turn[one.rank, one.line] += 1
    return [one for *_, one in sorted(order, key=lambda entry: entry[:2])]


def _edits(file: ParsedFile, function: TestFunction) -> Iterator[tuple[Edit, str, int]]:
    """Each edit, its rule and its rank."""
    known = list(expectations(file, function))
    by_variable = {table.variable: table for table in tables(function)}
    for one in known:
        for side in one.sides:
            yield from _of_side(file, function, side, known, by_variable)
        if one.negation is not None:
            yield one.negation, NEGATION, 9


def _of_side(
    file: ParsedFile,
    function: TestFunction,
    side: Side,
    known: Sequence[Expectation],
    by_variable: Mapping[bytes, Table],
) -> Iterator[tuple[Edit, str, int]]:
    if is_constant(side, file.language):
        yield from _leaves(file, function, side, "literal", 0)
        return
    if len(side) != 1:
        return
    node = side[0]
    if node.type == "identifier":
        value = constant_value(function.body, text_of(node))
        is_fixed = value is not None and is_constant((value,), file.language)
        if value is not None and is_fixed and _only_compared(function, node, known):
            yield from _leaves(file, function, (value,), "literal of a variable", 1)
    elif node.type == "selector_expression" and _only_compared(function, node, known):
        table = by_variable.get(text_of(node.child_by_field_name("operand")))
        if table is not None:
            field = text_of(node.child_by_field_name("field"))
            for value in (row.cells[field] for row in table.rows if field in row.cells):
                if is_constant((value,), file.language):
                    yield from _leaves(file, function, (value,), "literal of a table", 1)


def _only_compared(function: TestFunction, used: Node, known: Sequence[Expectation]) -> bool:
    """Every use of this name is a whole side of a comparison, or is in the message of a failure."""
    name = text_of(used)
    sides = {one.sides[n][0].start_byte for one in known for n in range(len(one.sides))
             if len(one.sides[n]) == 1 and text_of(one.sides[n][0]) == name}  # fmt: skip
    failures = [one.failure for one in known if one.failure is not None]
    for node in descendants(function.body):
        if node.type not in (used.type, "shorthand_property_identifier") or text_of(node) != name:
            continue
        told = any(one.start_byte <= node.start_byte < one.end_byte for one in failures)
        if not told and node.start_byte not in sides and not declared_name(node):
            return False
    return True


# --- other literals -----------------------------------------------------------------------------


def _leaves(
    file: ParsedFile, function: TestFunction, side: Side, rule: str, rank: int
) -> Iterator[tuple[Edit, str, int]]:
    for node in side:
        for leaf in tokens(node, file.language):
            for step, text in enumerate(_replacements(file, function, leaf)):
                if (edit := place_of(leaf, leaf, text)) is not None:
                    yield edit, rule, rank + min(step // 2, 2)


def _replacements(file: ParsedFile, function: TestFunction, leaf: Node) -> Iterator[bytes]:
    """Other literals of the same type, the most plausible first."""
    own = text_of(leaf)
    if own in _OPPOSITES:
        yield _OPPOSITES[own]
    elif leaf.type in file.language.numbers:
        yield from _other_numbers(own)
        yield from [one for one in _literals_like(file, function, leaf) if one != own][:4]
    elif leaf.type in file.language.texts:
        near = wrong_literals.nearest(_literals_like(file, function, leaf), own)
        inner = [
            own[:start] + new + own[end:]
            for start, end, new in wrong_literals.word_exchanges(own, _words(file, function))
        ]
        first, second = (near, inner) if len(own) <= 14 else (inner, near)
        yield from first[:3]
        yield from second[:3]
        if (single := re.fullmatch(rb"'([A-Ya-y0-8])'", own)) and not near:
            yield b"'" + bytes([single[1][0] + 1]) + b"'"


_OPPOSITES = {b"true": b"false", b"false": b"true"}


def _other_numbers(own: bytes) -> Iterator[bytes]:
    """`4` -> `5`, `3`, `6`; a suffix or a fraction stays: `4u8`, `2.5`."""
    match = re.fullmatch(rb"(\d{1,9})((?:\.\d+)?[A-Za-z_]\w*|\.\d+)?", own)
    if match is None or (own.startswith(b"0") and len(match[1]) > 1) or own[:2].lower() == b"0x":
        return
    for other in (int(match[1]) + 1, int(match[1]) - 1, int(match[1]) + 2):
        if other >= 0:
            yield str(other).encode() + (match[2] or b"")


def _literals_like(file: ParsedFile, function: TestFunction, leaf: Node) -> list[bytes]:
    """Literals of the same type and quotes: of the test first, then of added lines, then others."""
    quote = text_of(leaf)[:1] if leaf.type in file.language.texts else b""
    found = [
        (_distance(file, function, line), text)
        for line, kind, text in file.literals
        if kind == leaf.type and len(text) <= wrong_literals.LONGEST and text.startswith(quote)
    ]
    return list(dict.fromkeys(text for _, text in sorted(found, key=lambda one: one[0])))


def _words(file: ParsedFile, function: TestFunction) -> list[bytes]:
    texts = [
        (_distance(file, function, line), text)
        for line, kind, text in file.literals
        if kind in file.language.texts
    ]
    ordered = sorted(texts, key=lambda one: one[0])
    return list(dict.fromkeys(w for _, text in ordered for w in wrong_literals.WORD.findall(text)))


def _distance(file: ParsedFile, function: TestFunction, line: int) -> int:
    if function.first <= line <= function.last:
        return 0
    return 1 if line in file.added else 2


# --- which test an id names ---------------------------------------------------------------------


def named_functions(
    files: Sequence[ParsedFile], tests: Sequence[str]
) -> tuple[dict[tuple[ParsedFile, TestFunction], list[str]], dict[str, str]]:
    """The function that each id names, and why another id names none."""
    found: dict[tuple[ParsedFile, TestFunction], list[str]] = {}
    without = {}
    places = [(file, function) for file in files for function in file.functions]
    for test in tests:
        named = _named_by(test, places)
        if len(named) == 1:
            found.setdefault(named[0], []).append(test)
        else:
            why = (
                "several tests have its name" if named else "no test of the test patch has its name"
            )
            without[test] = why
    return found, without


def _named_by(
    test: str, places: Sequence[tuple[ParsedFile, TestFunction]]
) -> list[tuple[ParsedFile, TestFunction]]:
    """Those with the longest name that the id contains, and with the most of its owners."""
    known = [
        place
        for place in places
        if re.search(rf"(?<!\w){re.escape(place[1].name)}(?!\w)", test) is not None
    ]
    for measure in (_length, _owners_in):
        most = max((measure(place[1], test) for place in known), default=0)
        known = [place for place in known if measure(place[1], test) == most]
    return known


def _length(function: TestFunction, test: str) -> int:
    return len(function.name)


def _owners_in(function: TestFunction, test: str) -> int:
    return sum(owner in test for owner in function.owners)

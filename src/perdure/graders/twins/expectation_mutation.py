"""Changes one expectation of a test, on one line that the test patch adds.

Every rule is exclusive, under the conditions at `needs_unrelated` and `ARGUMENT`: for one result of
the code under test, the test and its twin cannot both pass.
So a twin can never fail a correct fix that differs from gold. `match=`, `in` and `>` become an
equality that contradicts them, because another check of their kind could also pass. Line numbers do
not change.
"""

import ast
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from perdure.graders.twins import wrong_literals
from perdure.graders.twins.parsed_test_file import Edit, Function, FunctionNode, Source

ARGUMENT = "argument of a constructor"
"""This rule is exclusive only if the fix defines no equality that ignores the argument."""
MOST = 24
"""Most candidates of one function."""


@dataclass(frozen=True)
class Candidate:
    """A line of the test file and its replacement. `rank` orders candidates; 0 is the best."""

    function: Function
    line: int
    before: bytes
    after: bytes
    rule: str
    rank: int
    old: bytes
    """The exchanged expression; `new` is its replacement."""
    new: bytes
    needs_unrelated: tuple[str, str] | None = None
    """Two class names; the twin is exclusive only if neither is a subclass of the other."""

    @property
    def changes_form(self) -> bool:
        """The twin asserts in another form, such as `==` for `in`. No twin has the original's form,
        so a reader recognizes the original."""
        return self.rule.startswith(("negation", "truth", "in:", "order", "match"))


@dataclass(frozen=True)
class _Change:
    edits: tuple[Edit, ...]
    rule: str
    rank: int
    needs_unrelated: tuple[str, str] | None = None


def candidates(source: Source, function: Function) -> list[Candidate]:
    """The twins that the function's added lines allow, best first; at most `MOST`."""
    found: dict[tuple[int, bytes], Candidate] = {}
    for change in sorted(_changes(source, function), key=lambda change: change.rank):
        made = _candidate(source, function, change)
        if made is not None:
            found.setdefault((made.line, made.after), made)
    good = (
        one for one in _spread(found.values()) if source.compiles(function, one.line, one.after)
    )
    return list(itertools.islice(good, MOST))


def _spread(found: Iterable[Candidate]) -> list[Candidate]:
    """Sort by rank; within a rank, alternate between lines."""
    turn: Counter[tuple[int, int]] = Counter()
    order: list[tuple[int, int, int, Candidate]] = []
    for one in found:
        order.append((one.rank, turn[one.rank, one.line], len(order), one))
        turn[one.rank, one.line] += 1
    return [one for *_, one in sorted(order, key=lambda entry: entry[:3])]


def _candidate(source: Source, function: Function, change: _Change) -> Candidate | None:
    lines = {edit.line for edit in change.edits}
    if len(lines) != 1 or not lines <= source.added:
        return None
    line = lines.pop()
    before = after = source.line(line)
    for edit in sorted(change.edits, key=lambda edit: edit.start, reverse=True):
        after = after[: edit.start] + edit.text + after[edit.end :]
    if after == before:
        return None
    first = min(change.edits, key=lambda edit: edit.start)
    old, new = before[first.start : first.end], first.text
    return Candidate(
        function, line, before, after, change.rule, change.rank, old, new, change.needs_unrelated
    )


def _changes(source: Source, function: Function) -> Iterator[_Change]:
    for node in _always_run(function.node):
        if isinstance(node, ast.Assert):
            yield from _asserted(source, function, node.test)
        elif isinstance(node, ast.Call):
            yield from _called(source, function, node)
    yield from _handed_on(source, function)


_CONDITIONAL = (
    ast.If,
    ast.IfExp,
    ast.BoolOp,
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.Try,
    ast.TryStar,
    ast.Match,
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.Lambda,
    ast.ListComp,
    ast.SetComp,
    ast.DictComp,
    ast.GeneratorExp,
)


def _always_run(function: FunctionNode) -> Iterator[ast.AST]:
    """The nodes of a test that run whatever the code under test returns.

    A correct fix may not enter a loop, branch, handler or callback that gold enters. It would pass
    a test whose only change is there, and its twin too.
    """
    skipped = list(_skipped_lines(function.body, function.end_lineno or 0))
    waiting: list[ast.AST] = [*function.body]
    while waiting:
        node = waiting.pop(0)
        if any(getattr(node, "lineno", 0) in lines for lines in skipped):
            continue
        yield node
        if isinstance(node, ast.With | ast.AsyncWith) and _expects_exception(node):
            waiting += node.items  # the rest of its body does not run after the exception
        elif isinstance(node, ast.For) and _is_literal(node.iter):
            waiting += node.body
        elif not isinstance(node, _CONDITIONAL):
            waiting += ast.iter_child_nodes(node)


_STATEMENTS = (ast.stmt, ast.excepthandler, ast.match_case)


def _skipped_lines(nodes: Iterable[ast.AST], last: int, last_of_loop: int = 0) -> Iterator[range]:
    """The lines after each statement that leaves the test (whose last line is `last`) or a loop."""
    for node in nodes:
        if isinstance(node, ast.Return):
            yield range(node.lineno + 1, last + 1)
        elif isinstance(node, ast.Break | ast.Continue):
            yield range(node.lineno + 1, last_of_loop + 1)
        elif isinstance(node, _STATEMENTS) and not isinstance(node, FunctionNode | ast.ClassDef):
            is_loop = isinstance(node, ast.For | ast.AsyncFor | ast.While)
            inner = getattr(node, "end_lineno", 0) if is_loop else last_of_loop
            yield from _skipped_lines(ast.iter_child_nodes(node), last, inner)


def _expects_exception(node: ast.With | ast.AsyncWith) -> bool:
    names = [
        (_name(item.context_expr.func) or "").lower()
        for item in node.items
        if isinstance(item.context_expr, ast.Call)
    ]
    return any("raises" in name or name == "suppress" for name in names)


# --- assert X ------------------------------------------------------------------------------------


def _asserted(source: Source, function: Function, test: ast.expr) -> Iterator[_Change]:
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        yield from _compared(source, function, test)
    elif isinstance(test, ast.Call | ast.Name | ast.Attribute | ast.Subscript):
        if (end := source.end_of(test)) is not None:
            yield _Change((Edit(*end, end[1], b" is None"),), "truth: is None", 7)
    elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _not(source, test)


def _compared(source: Source, function: Function, test: ast.Compare) -> Iterator[_Change]:
    left, op, right = test.left, test.ops[0], test.comparators[0]
    if isinstance(op, ast.Eq | ast.Is):
        yield from _equal(source, function, left, right)
    elif isinstance(op, ast.In) and _is_text(left):
        yield from _not_contained(source, function, test)
    elif isinstance(op, ast.Gt | ast.GtE | ast.Lt | ast.LtE) and _is_number(right):
        yield from _out_of_range(source, test)
    if (between := source.operator(left, right)) is not None:
        opposite = _OPPOSITES.get(type(op))
        if opposite is not None:
            yield _Change((between.with_text(b" " + opposite + b" "),), "negation", 9)


_OPPOSITES: dict[type[ast.cmpop], bytes] = {
    ast.Eq: b"!=",
    ast.NotEq: b"==",
    ast.Is: b"is not",
    ast.IsNot: b"is",
    ast.In: b"not in",
    ast.NotIn: b"in",
}


def _equal(
    source: Source, function: Function, left: ast.expr, right: ast.expr
) -> Iterator[_Change]:
    """`X == L`: change one leaf of the side that is all literals, never of the other side."""
    for side in (right, left):
        if _is_literal(side):
            yield from _leaves(source, function, side, "literal", 0)
            return
    for side, other in ((right, left), (left, right)):
        value = function.constant_named(_name(side) or "")
        if value is not None and not _is_literal(other):
            if function.only_compared(_name(side) or ""):
                yield from _leaves(source, function, value, "literal of a variable", 1)
            yield from _whole(source, function, side, value)
            return
        if _name(side) in function.parameters and _name(other) not in function.parameters:
            yield from _other_parameter(source, function, side)
            return
    if _is_constructed(right):
        yield from _leaves(source, function, right, ARGUMENT, 3)
    elif isinstance(right, ast.Attribute) and isinstance(right.value, ast.Name):
        yield from _other_attribute(source, right)


def _leaves(
    source: Source, function: Function, side: ast.expr, rule: str, rank: int
) -> Iterator[_Change]:
    for leaf in _leaf_nodes(side):
        if isinstance(leaf, ast.Attribute):
            for change in _other_attribute(source, leaf):
                yield replace(change, rank=rank)
            continue
        for step, edit in enumerate(wrong_literals.replacements(source, function, leaf)):
            yield _Change((edit,), rule, rank + min(step // 2, 2))


def _leaf_nodes(side: ast.expr) -> Iterator[ast.expr]:
    """Constants, attributes such as enum members, and empty containers."""
    if isinstance(side, ast.Constant | ast.Attribute):
        yield side
    elif isinstance(side, ast.List | ast.Tuple | ast.Set) and side.elts:
        for element in side.elts:
            yield from _leaf_nodes(element)
    elif isinstance(side, ast.Dict) and side.values:
        for key, value in zip(side.keys, side.values, strict=True):
            yield from _leaf_nodes(value)
            yield from _leaf_nodes(key) if key is not None else ()
    elif isinstance(side, ast.List | ast.Tuple | ast.Dict):
        yield side
    elif isinstance(side, ast.BinOp):
        yield from _leaf_nodes(side.left)
        yield from _leaf_nodes(side.right)
    elif isinstance(side, ast.UnaryOp):
        yield from _leaf_nodes(side.operand)
    elif isinstance(side, ast.Call):
        for argument in (*side.args, *(keyword.value for keyword in side.keywords)):
            yield from _leaf_nodes(argument)


def _whole(
    source: Source, function: Function, side: ast.expr, value: ast.expr
) -> Iterator[_Change]:
    """`X == name`, where `name` holds a literal: use another literal instead of the name."""
    place = source.place(side)
    if place is None or not isinstance(value, ast.Constant):
        return
    for text in wrong_literals.literals_of_type(source, function, type(value.value)):
        if text != source.text(value):
            yield _Change((place.with_text(text),), "literal instead of a variable", 5)


def _other_parameter(source: Source, function: Function, side: ast.expr) -> Iterator[_Change]:
    """Parameters of a parametrized test are constants. If gold fails the twin, they differ."""
    place = source.place(side)
    for name in function.parameters:
        if place is not None and name != _name(side):
            yield _Change((place.with_text(name.encode()),), "another parameter", 4)


def _other_attribute(source: Source, side: ast.Attribute) -> Iterator[_Change]:
    place = source.place(side)
    for text in source.attributes_like(side):
        if place is not None:
            yield _Change((place.with_text(text),), "another attribute", 3)


def _not_contained(source: Source, function: Function, test: ast.Compare) -> Iterator[_Change]:
    """`L in X` -> `X == M`, where M does not contain L, so no value of X satisfies both."""
    left, right = test.left, test.comparators[0]
    whole, other = source.place(test), source.text(right)
    assert isinstance(left, ast.Constant)
    if whole is None or other is None:
        return
    for text, value in wrong_literals.texts_unlike(source, function, left):
        if left.value not in value:
            yield _Change((whole.with_text(other + b" == " + text),), "in: equal to another", 5)


def _out_of_range(source: Source, test: ast.Compare) -> Iterator[_Change]:
    """`X > 3` -> `X == 2`."""
    right, op = test.comparators[0], test.ops[0]
    number = ast.literal_eval(right)
    outside = number - 1 if isinstance(op, ast.Gt | ast.GtE) else number + 1
    between, place = source.operator(test.left, right), source.place(right)
    if between is not None and place is not None:
        edits = (between.with_text(b" == "), place.with_text(repr(outside).encode()))
        yield _Change(edits, "order: equal to a number outside", 6)


def _not(source: Source, test: ast.UnaryOp) -> Iterator[_Change]:
    """`not X` -> `X == 1`."""
    whole, operand = source.place(test), source.text(test.operand)
    plain = isinstance(test.operand, ast.Call | ast.Name | ast.Attribute | ast.Subscript)
    if plain and whole is not None and operand is not None:
        yield _Change((whole.with_text(operand + b" == 1"),), "truth: equal to 1", 8)


# --- assertX(...), raises(...) -------------------------------------------------------------------

_EQUAL = frozenset(
    [
        "assertEqual",
        "assertEquals",
        "assertListEqual",
        "assertDictEqual",
        "assertTupleEqual",
        "assertSetEqual",
        "assertSequenceEqual",
        "assertMultiLineEqual",
        "assertCountEqual",
        "assertIs",
        "assertQuerySetEqual",
        "assertQuerysetEqual",
        "assertHTMLEqual",
        "assertXMLEqual",
        "assertJSONEqual",
        "assert_equal",
        "assert_array_equal",
        "eq_",
        "assert_called_once_with",
    ]
)
_RAISES = frozenset(
    ["raises", "assertRaises", "assertRaisesRegex", "assertRaisesRegexp", "assertRaisesMessage"]
)


def _called(source: Source, function: Function, call: ast.Call) -> Iterator[_Change]:
    name = _name(call.func)
    if name in _EQUAL and len(call.args) >= 2:
        yield from _equal(source, function, call.args[0], call.args[1])
    elif name in _RAISES and call.args:
        yield from _other_class(source, call.args[0])
        for keyword in call.keywords:
            if name == "raises" and keyword.arg == "match" and _is_text(keyword.value):
                yield from _other_match(source, function, keyword.value)
    elif name == "assertTrue" and call.args and (place := source.last_name(call.func)) is not None:
        yield _Change((place.with_text(b"assertIsNone"),), "truth: is None", 4)
    elif name == "assert_outcomes":
        for keyword in call.keywords:
            yield from _leaves(source, function, keyword.value, "outcomes", 0)


def _other_class(source: Source, node: ast.expr) -> Iterator[_Change]:
    """`raises(A)` -> `raises(B)`, for two exceptions of the project. If one is a subclass of the
    other, both can pass. A fix may well raise a class of the project that is also a builtin one."""
    place, name = source.place(node), source.text(node)
    if place is None or name is None or not isinstance(node, ast.Name | ast.Attribute):
        return
    for step, other in enumerate(source.exceptions_like(node)):
        pair = (name.decode(), other.decode())
        yield _Change((place.with_text(other),), "raises: another class", 1 + step // 3, pair)


def _other_match(source: Source, function: Function, node: ast.expr) -> Iterator[_Change]:
    """`match="a b"` -> `match="^a c$"`. No text matches both patterns."""
    assert isinstance(node, ast.Constant)
    place = source.place(node)
    if place is None:
        return
    for text, value in wrong_literals.texts_unlike(source, function, node):
        if anchored := wrong_literals.anchored(text, node.value, value):
            yield _Change((place.with_text(anchored),), "match: all of another text", 4)


def _handed_on(source: Source, function: Function) -> Iterator[_Change]:
    """`check(x, [Data(b"1")])`, a helper that compares its last parameter: change a constant of its
    last argument."""
    for node in _always_run(function.node):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and node.value.args:
            call = node.value
            helper = source.helpers.get(_name(call.func) or "")
            given = call.args[-1]
            if helper is not None and _is_constructed(given) and _compares(helper, len(call.args)):
                yield from _leaves(source, function, given, ARGUMENT, 4)


def _compares(helper: FunctionNode, number: int) -> bool:
    """Whether an assertion that always runs compares this parameter by `==`. `number`: from 1."""
    parameters = [*helper.args.posonlyargs, *helper.args.args]
    if helper.args.vararg is not None or number > len(parameters):
        return False
    name = parameters[number - 1].arg
    sides = [
        side
        for node in _always_run(helper)
        if isinstance(node, ast.Assert)
        and isinstance(node.test, ast.Compare)
        and [type(op) for op in node.test.ops] == [ast.Eq]
        for side in (node.test.left, *node.test.comparators)
    ]
    return any(_name(side) == name for side in sides)


# --- what a node is ------------------------------------------------------------------------------

_LITERAL_CALLS = frozenset(
    [
        "set",
        "frozenset",
        "dict",
        "list",
        "tuple",
        "bytes",
        "bytearray",
        "complex",
        "Decimal",
        "Fraction",
        "date",
        "datetime",
        "time",
        "timedelta",
        "OrderedDict",
        "Path",
        "PurePath",
    ]
)


def _name(node: ast.expr) -> str | None:
    """The last name: `pytest.raises` -> `raises`."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None


def _is_literal(node: ast.expr) -> bool:
    """No part of it depends on the code under test."""
    if isinstance(node, ast.Constant):
        return node.value is not Ellipsis
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return all(map(_is_literal, node.elts))
    if isinstance(node, ast.Dict):
        return all(key is not None and _is_literal(key) for key in node.keys) and all(
            map(_is_literal, node.values)
        )
    if isinstance(node, ast.UnaryOp):
        return _is_literal(node.operand)
    if isinstance(node, ast.BinOp):
        return _is_literal(node.left) and _is_literal(node.right)
    if isinstance(node, ast.Call) and _name(node.func) in _LITERAL_CALLS:
        return all(map(_is_literal, (*node.args, *(one.value for one in node.keywords))))
    return False


def _is_constructed(node: ast.expr) -> bool:
    """Made of literals and calls of classes, which are known by their capital letter."""
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return bool(node.elts) and all(map(_is_part, node.elts))
    if isinstance(node, ast.Dict):
        return bool(node.values) and all(map(_is_part, node.values))
    if isinstance(node, ast.BinOp):
        return all(_is_part(side) for side in (node.left, node.right))
    name = _name(node.func) if isinstance(node, ast.Call) else None
    return bool(name) and name is not None and name[0].isupper()


def _is_part(node: ast.expr) -> bool:
    return isinstance(node, ast.Name | ast.Attribute) or _is_literal(node) or _is_constructed(node)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and bool(node.value)


def _is_number(node: ast.expr) -> bool:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        node = node.operand
    return (
        isinstance(node, ast.Constant)
        and isinstance(node.value, int | float)
        and not isinstance(node.value, bool)
    )

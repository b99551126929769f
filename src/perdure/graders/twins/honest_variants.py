"""Rewrites gold as other correct fixes, under which a twin must fail too.

- renamed locals: in functions that the fix changes, names that no code outside can use.
- another equal expression: rewrites that are equal for every Python object.
- exceptions with a second base: what the fix raises is also an instance of another exception class.
- values by another name: a wrapper calls each changed function, and changed values outside
  functions are assigned to another name first.

A variant is a set of files, which calibration writes over gold's. It is honest, and used, only if
all original tests pass under it.
"""

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from perdure.graders.twins.parsed_test_file import FunctionNode, Source

RENAMED = "renamed locals"
EQUAL = "another equal expression"
TWO_BASES = "exceptions with a second base"
INDIRECT = "values by another name"


@dataclass(frozen=True)
class Variant:
    """Files of the fixed tree, path -> content, that differ from gold's."""

    name: str
    files: Mapping[str, bytes]


def honest_variants(sources: Sequence[Source]) -> list[Variant]:
    """At most four variants of the fixed files. `added` of each source: the lines that the fix
    changes."""
    makers: tuple[tuple[str, Callable[[Source], bytes | None]], ...] = (
        (RENAMED, _with_renamed_locals),
        (EQUAL, _with_equal_expressions),
        (TWO_BASES, _with_second_bases),
        (INDIRECT, _with_other_names),
    )
    plain = [source for source in sources if _has_byte_places(source.data)]
    found = []
    for name, make in makers:
        made = {source.path: data for source in plain if (data := _made(make, source)) is not None}
        if made:
            found.append(Variant(name, made))
    return found


def changes_equality(source: Source) -> bool:
    """Whether the fix changes a method that compares objects."""
    regions = _regions(source.tree, source.added)
    return any(isinstance(one, FunctionNode) and one.name in _COMPARES for one in regions)


_COMPARES = frozenset(("__eq__", "__ne__", "__hash__", "__lt__", "__le__", "__gt__", "__ge__"))


def _made(make: Callable[[Source], bytes | None], source: Source) -> bytes | None:
    try:
        return make(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None  # a file too deep for this interpreter has fewer variants


def _has_byte_places(data: bytes) -> bool:
    """Whether `ast` counts lines and columns as this module does."""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    except SyntaxError:
        return False
    return encoding == "utf-8" and b"\r" not in data.replace(b"\r\n", b"")


# --- places and edits ----------------------------------------------------------------------------


class _Rewriting:
    """Collects edits of a file by byte offsets."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.words = frozenset(re.findall(r"\w+", data.decode()))
        self._starts = [0, *(match.end() for match in re.finditer(rb"\n", data))]
        self._edits: list[tuple[int, int, bytes]] = []

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Without the parentheses around an expression."""
        lines = node.lineno, node.end_lineno  # type: ignore[attr-defined]
        columns = node.col_offset, node.end_col_offset  # type: ignore[attr-defined]
        first, last = (self._starts[n - 1] + c for n, c in zip(lines, columns, strict=True))
        return first, last

    def text(self, node: ast.AST) -> bytes:
        first, last = self.span(node)
        return self.data[first:last]

    def line_start(self, number: int) -> int:
        return self._starts[number - 1]

    def fresh(self, name: str) -> str:
        """A name that the file uses nowhere, the same for each call."""
        number = 1
        while f"{name}_{number}" in self.words:
            number += 1
        return f"{name}_{number}"

    def replace(self, span: tuple[int, int], text: bytes) -> None:
        self._edits.append((*span, text))

    def begin(self, place: int, text: bytes) -> None:
        """Insert the text before all other edits at this place."""
        self._edits.insert(0, (place, place, text))

    def wrap(self, node: ast.AST, before: bytes, after: bytes) -> None:
        first, last = self.span(node)
        self._edits += [(first, first, before), (last, last, after)]

    def result(self) -> bytes | None:
        """The file with its edits; None without an edit, or if they overlap or break it."""
        parts, at = [], 0
        for first, last, text in sorted(self._edits, key=lambda edit: edit[:2]):
            if first < at:
                return None
            parts += [self.data[at:first], text]
            at = last
        made = b"".join((*parts, self.data[at:]))
        if not self._edits:
            return None
        ast.parse(made)
        return made


def _regions(tree: ast.Module, lines: frozenset[int]) -> Iterator[ast.stmt]:
    """The functions that hold one of these lines, and such simple statements outside functions."""
    waiting: list[ast.stmt | ast.ExceptHandler] = [*tree.body]
    while waiting:
        node = waiting.pop()
        if not lines.intersection(range(_first_line(node), (node.end_lineno or 0) + 1)):
            continue
        inner = [
            n for n in ast.iter_child_nodes(node) if isinstance(n, ast.stmt | ast.ExceptHandler)
        ]
        if isinstance(node, FunctionNode) or (not inner and isinstance(node, ast.stmt)):
            yield node
        else:
            waiting += inner


def _first_line(node: ast.stmt | ast.ExceptHandler) -> int:
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(one.lineno for one in decorators)])


def _all(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    for node in nodes:
        yield from ast.walk(node)


_READS_FRAMES = frozenset(
    ("locals", "vars", "dir", "eval", "exec", "_getframe", "currentframe", "f_locals")
)


def _reads_frames(nodes: Iterable[ast.AST]) -> bool:
    """Whether code may find local variables by their names."""
    return any(
        (isinstance(node, ast.Name) and node.id in _READS_FRAMES)
        or (isinstance(node, ast.Attribute) and node.attr in _READS_FRAMES)
        for node in _all(nodes)
    )


# --- renamed locals ------------------------------------------------------------------------------


def _with_renamed_locals(source: Source) -> bytes | None:
    """Before Python 3.12, names within f-strings may have wrong places, and `f"{x=}"` shows a name."""
    shown = (n for n in ast.walk(source.tree) if isinstance(n, ast.JoinedStr))
    in_strings = frozenset(n.id for n in _all(shown) if isinstance(n, ast.Name))
    return _renamed(source, frozenset()) or _renamed(source, in_strings)


def _renamed(source: Source, spared: frozenset[str]) -> bytes | None:
    """None if nothing is renamed, or if the result is not exactly the renamed syntax tree."""
    rewriting, tree = _Rewriting(source.data), ast.parse(source.data)
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    spared |= {node.id for node in names if rewriting.text(node) != node.id.encode()}
    chosen: dict[ast.Name, None] = {}
    for node in _all(_regions(tree, source.added)):
        if (scope := _scope(node)) is not None:
            own = scope.renamable - spared
            inside = (n for n in _all(scope.nodes) if isinstance(n, ast.Name))
            chosen |= dict.fromkeys(n for n in inside if n.id in own)
    for name in chosen:
        span, name.id = rewriting.span(name), rewriting.fresh(name.id)
        rewriting.replace(span, name.id.encode())
    made = rewriting.result()
    is_exact = made is not None and ast.dump(ast.parse(made)) == ast.dump(tree)
    return made if is_exact else None


class _Scope(NamedTuple):
    """The nodes in which a name means the scope's own variable."""

    renamable: frozenset[str]
    nodes: Sequence[ast.AST]


_INNER_SCOPES = (
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef),
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
)


def _scope(node: ast.AST) -> _Scope | None:
    """The scope of a function or comprehension, with the variables that occur only as names: not as
    a parameter, an import, in `global`, or as an attribute of a class."""
    nodes: Sequence[ast.AST]
    if isinstance(node, FunctionNode):
        nodes, bound = node.body, _stored(node.body)
        spelled = _spelled([node.args, *getattr(node, "type_params", ()), *nodes])
    elif isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
        first, *others = node.generators  # the first iterable belongs to the scope around
        parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        nodes = [*parts, first.target, *first.ifs, *others]
        bound = _stored(one.target for one in node.generators)
        spelled = _spelled(nodes)
    else:
        return None
    if _reads_frames(nodes):
        return None
    classes = (inner for inner in _all(nodes) if isinstance(inner, ast.ClassDef))
    attributes = frozenset(name for one in classes for name in _stored(one.body))
    mangled = frozenset(name for name in bound if f"{name}_".startswith("__"))
    return _Scope(bound - spelled - attributes - mangled, nodes)


def _stored(nodes: Iterable[ast.AST]) -> frozenset[str]:
    """The names that these nodes bind by assignment, without those of inner scopes."""
    waiting, found = [*nodes], set()
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        if not isinstance(node, _INNER_SCOPES):
            waiting += ast.iter_child_nodes(node)
    return frozenset(found)


def _spelled(nodes: Iterable[ast.AST]) -> frozenset[str]:
    """The names that the syntax tree has as text: parameters, imports, `global`, handlers, ..."""
    values: list[object] = []
    for node in _all(nodes):
        if not isinstance(node, ast.Name | ast.Attribute | ast.keyword | ast.Constant):
            for _, value in ast.iter_fields(node):
                values += value if isinstance(value, list) else [value]
    return frozenset(value.split(".")[0] for value in values if isinstance(value, str))


# --- another equal expression --------------------------------------------------------------------

_NEGATED: Mapping[type[ast.cmpop], bytes] = {
    ast.Is: b"is not",
    ast.IsNot: b"is",
    ast.In: b"not in",
    ast.NotIn: b"in",
}
"""Those whose result is a bool for every object. `==` may return anything."""


def _with_equal_expressions(source: Source) -> bytes | None:
    rewriting = _Rewriting(source.data)
    for region in _regions(source.tree, source.added):
        has_own_names = not _reads_frames([region])
        waiting: list[ast.AST] = [region]
        while waiting:
            node = waiting.pop()
            if (text := _equal_text(rewriting, node)) is not None:
                rewriting.replace(rewriting.span(node), text)
            elif type(node).__name__ not in ("JoinedStr", "TemplateStr"):
                waiting += ast.iter_child_nodes(node)
            if isinstance(node, ast.If | ast.While | ast.comprehension):
                for test in node.ifs if isinstance(node, ast.comprehension) else [node.test]:
                    rewriting.wrap(test, b"(not (not (", b")))")
            elif isinstance(node, ast.Return) and has_own_names:
                _return_by_variable(rewriting, node)
            elif isinstance(node, ast.Assign):
                if isinstance(region, FunctionNode):
                    _assign_by_variable(rewriting, node, is_own=has_own_names)
                else:
                    rewriting.wrap(node.value, b"(", b",)[0]")
    return rewriting.result()


def _equal_text(rewriting: _Rewriting, node: ast.AST) -> bytes | None:
    """`x is None` -> `not (x is not None)`; `a if t else b` -> `b if not t else a`."""
    if isinstance(node, ast.IfExp):
        sides = map(rewriting.text, (node.orelse, node.test, node.body))
        return b"((%b) if not (%b) else (%b))" % tuple(sides)
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        negated = _NEGATED.get(type(node.ops[0]))
        left, right = rewriting.text(node.left), rewriting.text(node.comparators[0])
        return negated and b"(not ((%b) %b (%b)))" % (left, negated, right)
    return None


def _return_by_variable(rewriting: _Rewriting, node: ast.Return) -> None:
    """`return x` -> `name = x`, `return name`, if the statement begins its line."""
    first, last = rewriting.span(node)
    indent = rewriting.data[rewriting.line_start(node.lineno) : first]
    if node.value is None or indent.strip():
        return
    name = rewriting.fresh("result").encode()
    rewriting.replace((first, first + len(b"return")), name + b" =")
    rewriting.replace((last, last), b"\n%breturn %b" % (indent, name))


def _assign_by_variable(rewriting: _Rewriting, node: ast.Assign, *, is_own: bool) -> None:
    """`x = y` -> `name = y`, `x = name`, if the statement begins its line."""
    first, last = rewriting.span(node)
    indent = rewriting.data[rewriting.line_start(node.lineno) : first]
    if not is_own or indent.strip():
        return
    name, (_, end) = rewriting.fresh("value").encode(), rewriting.span(node.targets[-1])
    targets = rewriting.data[first:end]
    rewriting.replace((first, end), name)
    rewriting.replace((last, last), b"\n%b%b = %b" % (indent, targets, name))


# --- exceptions with a second base ---------------------------------------------------------------

_HELPER = """\
def {name}(cls, made={{}}):
    import builtins as b
    if not (b.isinstance(cls, b.type) and b.issubclass(cls, b.Exception)) or cls is b.OSError:
        return cls  # OSError itself chooses a subclass by its arguments
    if cls not in made:
        own = {{key: b.getattr(cls, key) for key in ("__module__", "__qualname__", "__doc__", "__str__")}}
        made[cls], bases = cls, (cls,)
        if not b.issubclass(cls, b.RuntimeError):
            try:
                made[cls] = b.type(cls)(cls.__name__, bases + (b.RuntimeError,), b.dict(own))
            except b.Exception:
                pass  # it is a subclass, or their layouts or metaclasses conflict
    return made[cls]


"""


def _with_second_bases(source: Source) -> bytes | None:
    """`raise X(...)` -> `raise of_two_bases(X)(...)`. X stays as it is if it is not an exception
    class."""
    rewriting = _Rewriting(source.data)
    name = rewriting.fresh("_of_two_bases")
    raised = [
        node.exc.func if isinstance(node.exc, ast.Call) else node.exc
        for node in _all(_regions(source.tree, source.added))
        if isinstance(node, ast.Raise)
    ]
    for expression in raised:
        if isinstance(expression, ast.Name | ast.Attribute):
            rewriting.wrap(expression, name.encode() + b"(", b")")
    return _with_helper(source, rewriting, _HELPER.format(name=name))


def _with_helper(source: Source, rewriting: _Rewriting, helper: str) -> bytes | None:
    """The edited file with a function before its first statement; None without an edit."""
    start = next((node for node in source.tree.body if not _must_stay_first(node)), None)
    if rewriting.result() is None or start is None or start.col_offset:
        return None
    rewriting.begin(rewriting.line_start(_first_line(start)), helper.encode())
    return rewriting.result()


def _must_stay_first(node: ast.stmt) -> bool:
    """A docstring, or an import from `__future__`."""
    if isinstance(node, ast.ImportFrom):
        return node.module == "__future__"
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


# --- values by another name ----------------------------------------------------------------------

_WRAPPER = """\
def {name}(function):
    import functools
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)
    return wrapper


"""


def _with_other_names(source: Source) -> bytes | None:
    """A changed function is called by a wrapper; a changed value outside functions is assigned to
    another name first."""
    rewriting = _Rewriting(source.data)
    wrapper, value = rewriting.fresh("_wrapper"), rewriting.fresh("_value").encode()
    for region in _regions(source.tree, source.added):
        start = rewriting.line_start(region.lineno)
        first, _ = rewriting.span(region)
        indent = rewriting.data[start:first]
        if indent.strip():
            continue
        if isinstance(region, FunctionNode):
            rewriting.replace((start, start), b"%b@%b\n" % (indent, wrapper.encode()))
        elif isinstance(region, ast.Assign | ast.AnnAssign) and region.value is not None:
            held = b"%b%b = (%b)\n" % (indent, value, rewriting.text(region.value))
            rewriting.replace((start, start), held)
            rewriting.replace(rewriting.span(region.value), value)
    return _with_helper(source, rewriting, _WRAPPER.format(name=wrapper))

"""A test file: its functions, the lines that the test patch adds, places of expressions."""

import ast
import builtins
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Edit:
    """Replaces bytes [start, end) of a line (1-based) with `text`."""

    line: int
    start: int
    end: int
    text: bytes = b""

    def with_text(self, text: bytes) -> "Edit":
        return replace(self, text=text)


@dataclass(frozen=True)
class Function:
    """A test function of a file. `owner` is its class; empty for a function of the module."""

    name: str
    owner: str
    node: FunctionNode

    @property
    def first(self) -> int:
        """The first line, decorators included; 1-based."""
        return min([self.node.lineno, *(one.lineno for one in self.node.decorator_list)])

    @property
    def last(self) -> int:
        return self.node.end_lineno or self.node.lineno

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names that `parametrize` fills with constants."""
        found: list[str] = []
        for one in self.node.decorator_list:
            if isinstance(one, ast.Call) and ast.unparse(one.func).endswith("parametrize"):
                named = one.args[0] if one.args else None
                if isinstance(named, ast.Constant) and isinstance(named.value, str):
                    found += [name.strip() for name in named.value.split(",")]
                elif isinstance(named, ast.List | ast.Tuple):
                    found += [str(n.value) for n in named.elts if isinstance(n, ast.Constant)]
        return tuple(found)

    def constant_named(self, name: str) -> ast.expr | None:
        """The literal that this local name always holds, or None."""
        stores = [
            node
            for node in ast.walk(self.node)
            if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store)
        ]
        if len(stores) != 1:
            return None
        for node in ast.walk(self.node):
            if isinstance(node, ast.Assign) and node.targets == stores:
                try:
                    ast.literal_eval(node.value)
                except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                    return None
                return node.value
        return None

    def only_compared(self, name: str) -> bool:
        """Every use of the name is one side of `==`, or an argument of an `assertEqual`."""
        uses = [n for n in ast.walk(self.node) if _is_use(n, name)]
        sides: list[ast.AST] = []
        for node in ast.walk(self.node):
            if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq):
                sides += [node.left, *node.comparators]
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Equal"):
                sides += node.args
        return bool(uses) and all(any(use is side for side in sides) for use in uses)


def _is_use(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)


class Source:
    """A Python test file with the test patch applied. Columns and places count bytes of UTF-8.

    Raises: ValueError if it is not UTF-8, or not Python that this interpreter can parse.
    """

    def __init__(self, path: str, data: bytes, added: frozenset[int]) -> None:
        self.path = path
        self.data = data
        self.added = added
        self._lines = data.split(b"\n")
        data.decode("utf-8")
        try:
            self.tree = ast.parse(data)
        except (SyntaxError, RecursionError, MemoryError) as error:
            raise ValueError(f"{path}: {error}") from error

    def line(self, number: int) -> bytes:
        return self._lines[number - 1]

    def function_text(self, function: Function, twin: tuple[int, bytes] | None = None) -> bytes:
        """The function alone, as Python that parses; `twin` replaces one of its lines."""
        lines = self._lines[function.first - 1 : function.last]
        if twin is not None:
            lines[twin[0] - function.first] = twin[1]
        is_inner = lines[0][:1] in (b" ", b"\t")
        return (b"if 1:\n" if is_inner else b"") + b"\n".join(lines)

    def compiles(self, function: Function, number: int, text: bytes) -> bool:
        try:
            ast.parse(self.function_text(function, (number, text)))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return False
        return True

    @cached_property
    def texts_and_values(self) -> tuple[tuple[int, Any, bytes], ...]:
        """Line, value and source text of every constant that is on one line."""
        constants = [n for n in ast.walk(self.tree) if isinstance(n, ast.Constant) and n.value]
        return tuple((n.lineno, n.value, text) for n in constants if (text := self.text(n)))

    @cached_property
    def functions(self) -> tuple[Function, ...]:
        """Test functions of the module and of its classes."""
        return tuple(_functions(self.tree, ""))

    @cached_property
    def helpers(self) -> dict[str, FunctionNode]:
        """The module's functions by name."""
        return {node.name: node for node in self.tree.body if isinstance(node, FunctionNode)}

    # -- places ----------------------------------------------------------------------------------

    def place(self, node: ast.AST) -> Edit | None:
        """Where an expression is, without its parentheses; None if it spans several lines."""
        line, end_line = getattr(node, "lineno", 0), getattr(node, "end_lineno", 0)
        if not line or line != end_line:
            return None
        return Edit(line, node.col_offset, node.end_col_offset)  # type: ignore[attr-defined]

    def text(self, node: ast.AST) -> bytes | None:
        place = self.place(node)
        return None if place is None else self.line(place.line)[place.start : place.end]

    def end_of(self, node: ast.AST) -> tuple[int, int] | None:
        """Line and column after an expression; None if its statement does not end there."""
        line, column = getattr(node, "end_lineno", 0), getattr(node, "end_col_offset", 0)
        rest = self.line(line)[column:].split(b"#")[0].strip()
        return None if rest else (line, column)

    def operator(self, left: ast.expr, right: ast.expr) -> Edit | None:
        """Where the text between two operands is; None if it has parentheses or spans lines."""
        if left.end_lineno != right.lineno or left.end_col_offset is None:
            return None
        place = Edit(right.lineno, left.end_col_offset, right.col_offset)
        between = self.line(place.line)[place.start : place.end]
        return None if b"(" in between or b")" in between else place

    def last_name(self, node: ast.expr) -> Edit | None:
        """Where the last name of a dotted one is: `assertTrue` in `self.assertTrue`."""
        place = self.place(node)
        if place is None or not isinstance(node, ast.Attribute):
            return None
        return replace(place, start=place.end - len(node.attr.encode()))

    # -- names -----------------------------------------------------------------------------------

    def attributes_like(self, node: ast.Attribute) -> list[bytes]:
        """Other attributes of the same object that the file uses: `Color.RED` -> `Color.BLUE`."""
        base = ast.dump(node.value)
        found = {
            one.attr: self.text(one)
            for one, dumped in self._attributes
            if dumped == base
            and one.attr != node.attr
            and one.attr[:1].isupper() == node.attr[:1].isupper()
        }
        near = sorted(found, key=lambda name: abs(len(name) - len(node.attr)))
        return [text for name in near if (text := found[name]) is not None]

    def exceptions_like(self, node: ast.expr) -> list[bytes]:
        """The file's non-builtin exceptions that could replace this one; empty if this one is
        builtin."""
        if isinstance(node, ast.Attribute):
            name, others = node.attr.encode(), self.attributes_like(node)
        else:
            assert isinstance(node, ast.Name)
            name, others = node.id.encode(), [bound.encode() for bound in self._bound]
        near = sorted(set(others), key=lambda other: (abs(len(other) - len(name)), other))
        return (
            [other for other in near if other != name and _is_own(other)] if _is_own(name) else []
        )

    @cached_property
    def _attributes(self) -> tuple[tuple[ast.Attribute, str], ...]:
        """Attributes of names and of other attributes, each with a dump of its object."""
        found = [n for n in ast.walk(self.tree) if isinstance(n, ast.Attribute)]
        plain = [n for n in found if isinstance(n.value, ast.Name | ast.Attribute)]
        return tuple((n, ast.dump(n.value)) for n in plain)

    @cached_property
    def _bound(self) -> list[str]:
        """Names that the module imports, and classes that it defines, at its top level."""
        found = []
        for node in self.tree.body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                found += [(one.asname or one.name).split(".")[0] for one in node.names]
            elif isinstance(node, ast.ClassDef):
                found.append(node.name)
        return found


def _is_own(name: bytes) -> bool:
    """Whether it looks like an exception and is not a builtin one."""
    last = name.rpartition(b".")[2].decode()
    is_error = last.endswith(("Error", "Exception", "Invalid", "Exists", "NotFound", "Failed"))
    return last[:1].isupper() and not last.isupper() and is_error and not hasattr(builtins, last)


def _functions(node: ast.AST, owner: str) -> Iterator[Function]:
    for inner in ast.iter_child_nodes(node):
        if isinstance(inner, FunctionNode) and inner.name.startswith("test"):
            yield Function(inner.name, owner, inner)
        elif isinstance(inner, ast.ClassDef):
            yield from _functions(inner, inner.name)
        elif isinstance(inner, ast.If | ast.Try | ast.With):
            yield from _functions(inner, owner)

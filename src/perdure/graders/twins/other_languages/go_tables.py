"""Go's table tests: the rows of a table that a test writes and reads in a loop, and the subtest of each
row.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tree_sitter import Node

from perdure.graders.twins.other_languages.expectations import table_of, title_of_subtest
from perdure.graders.twins.other_languages.parsed_file import (
    ParsedFile,
    TestFunction,
    descendants,
    text_of,
)


@dataclass(frozen=True)
class Row:
    """A row of a table. `key`: its key, if the table is a map."""

    node: Node
    key: Node | None
    cells: Mapping[bytes, Node]
    """By field."""


@dataclass(frozen=True)
class Table:
    """The table that a loop reads: `for key, variable := range ...`."""

    loop: Node
    key: bytes
    variable: bytes
    rows: Sequence[Row]


def tables(function: TestFunction) -> Iterator[Table]:
    for node in descendants(function.body):
        table = table_of(node, function.body) if node.type == "for_statement" else None
        if table is not None:
            ranges = next(one for one in node.children if one.type == "range_clause")
            left = ranges.child_by_field_name("left")
            names = [text_of(name) for name in left.named_children] if left is not None else []
            if names:
                yield Table(node, names[0], names[-1], list(_rows(table)))


def _rows(table: Node) -> Iterator[Row]:
    structs = [one for one in descendants(table) if one.type == "struct_type"]
    fields = [
        text_of(name)
        for one in descendants(structs[0])
        if one.type == "field_declaration"
        for name in one.children_by_field_name("name")
    ] if structs else []  # fmt: skip
    body = table.child_by_field_name("body")
    for row in _elements(body) if body is not None else ():
        key, value = row.child_by_field_name("key"), row.child_by_field_name("value")
        yield Row(row, key, dict(_cells(_inner(value or row), fields)))


def _cells(row: Node, fields: Sequence[bytes]) -> Iterator[tuple[bytes, Node]]:
    for place, cell in enumerate(_elements(row)):
        key, value = cell.child_by_field_name("key"), cell.child_by_field_name("value")
        if key is not None and value is not None:
            yield text_of(key), value
        elif place < len(fields):
            yield fields[place], cell


def _elements(node: Node) -> list[Node]:
    return [one for one in node.named_children if one.type != "comment"]


def _inner(node: Node) -> Node:
    """`{1, 2}` without the grammar's nodes around it."""
    while node.type == "literal_element" and len(node.named_children) == 1:
        node = node.named_children[0]
    return node


@dataclass(frozen=True)
class Case:
    """A row whose subtest has a name of its own."""

    name: str
    """As Go writes it: `TestSum/two_numbers` for the case `two numbers`."""
    lines: range

    def is_named(self, test: str) -> bool:
        """Whether the id is that of the subtest or of one below it."""
        return re.search(rf"(?<!\w){re.escape(self.name)}(?:/|$)", test) is not None


def cases(file: ParsedFile, function: TestFunction) -> Iterator[Case]:
    """The rows of tables that subtests read: `t.Run(tt.name, ...)` or, for a map, `t.Run(key, ...)`."""
    for table in tables(function):
        title = next(filter(None, map(title_of_subtest, descendants(table.loop))), None)
        if title is None:
            continue
        field = title.child_by_field_name("field")
        is_field = text_of(title.child_by_field_name("operand")) == table.variable
        for row in table.rows:
            named = row.cells.get(text_of(field)) if is_field else None
            if text_of(title) == table.key:
                named = row.key
            if named is not None and _inner(named).type in file.language.texts:
                lines = range(row.node.start_point.row + 1, row.node.end_point.row + 2)
                name = re.sub(rb"\s", b"_", text_of(named)[1:-1]).decode("utf-8", "replace")
                yield Case(f"{function.name}/{name}", lines)

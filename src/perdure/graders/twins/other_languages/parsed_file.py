"""A test file of another language, as tree-sitter reads it: its tests and the places of their parts."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from tree_sitter import Node

from perdure.graders.twins.other_languages.languages import Language
from perdure.graders.twins.parsed_test_file import Edit


@dataclass(frozen=True)
class TestFunction:
    """A test. `owners` are the names of what contains it, such as its class or `describe` blocks."""

    __test__ = False

    name: str
    owners: tuple[str, ...]
    body: Node

    @property
    def first(self) -> int:
        """The first line of its body; 1-based."""
        return self.body.start_point.row + 1

    @property
    def last(self) -> int:
        return self.body.end_point.row + 1


class ParsedFile:
    """A test file with the test patch applied. Columns count bytes.

    Raises: MissingDependency without the grammar's package.
    """

    def __init__(self, path: str, data: bytes, added: frozenset[int], language: Language) -> None:
        self.path = path
        self.data = data
        self.added = added
        self.language = language
        self._lines = data.split(b"\n")
        self._tree = language.parser().parse(data)

    def line(self, number: int) -> bytes:
        return self._lines[number - 1]

    @cached_property
    def functions(self) -> tuple[TestFunction, ...]:
        return tuple(_functions(self._tree.root_node, self.language.name))

    @cached_property
    def literals(self) -> tuple[tuple[int, str, bytes], ...]:
        """Line, type and text of each literal on one line, without titles, messages and imports."""
        known = self.language.numbers | self.language.texts
        return tuple(
            (token.start_point.row + 1, token.type, text_of(token))
            for token in tokens(self._tree.root_node, self.language)
            if token.type in known
            and token.start_point.row == token.end_point.row
            and not _is_title(token)
        )


def text_of(node: Node | None) -> bytes:
    return (node.text or b"") if node is not None else b""


def tokens(node: Node, language: Language) -> Iterator[Node]:
    """The leaves of a node in order. A text literal is one leaf."""

    def is_leaf(one: Node) -> bool:
        return not one.children or (one.type in language.texts and b"${" not in text_of(one))

    return (one for one in _walk(node, is_leaf) if is_leaf(one))


def descendants(node: Node) -> Iterator[Node]:
    """The node and all below it, in the order of the source."""
    return _walk(node, lambda one: not one.children)


def _walk(node: Node, is_leaf: Callable[[Node], bool]) -> Iterator[Node]:
    waiting = [node]
    while waiting:
        yield (one := waiting.pop())
        if not is_leaf(one):
            waiting += one.children[::-1]


def place_of(first: Node, last: Node, text: bytes) -> Edit | None:
    """Replaces what reaches from one node to another; None if it spans several lines."""
    if first.start_point.row != last.end_point.row:
        return None
    return Edit(first.start_point.row + 1, first.start_point.column, last.end_point.column, text)


# --- the tests of a file ------------------------------------------------------------------------

_TITLED = re.compile(
    rb"(?:it|test|specify|describe|context|suite)(?:\.\w+)*|require|[\w.]+\.(?:Run|Errorf?|Fatalf?)|printf"
)


def _is_title(token: Node) -> bool:
    """The name of a test or of a module, or the text of a failure."""
    above = token.parent
    if above is None or above.type.startswith("import"):
        return above is not None
    call = above.parent
    called = call.child_by_field_name("function") if call is not None else None
    return called is not None and _TITLED.fullmatch(text_of(called)) is not None


_TEST_CALLS = re.compile(rb"(?:it|test|specify)(?:\.only)?")
_SUITE_CALLS = re.compile(rb"(?:describe|context|suite)(?:\.only)?")


def _functions(root: Node, language: str) -> Iterator[TestFunction]:
    waiting: list[tuple[Node, tuple[str, ...]]] = [(root, ())]
    while waiting:
        node, owners = waiting.pop()
        found = _test(node, language)
        if found is not None:
            yield TestFunction(found[0], owners, found[1])
        else:
            owners = (*owners, *_owner(node))
            waiting += [(child, owners) for child in node.children[::-1]]


def _test(node: Node, language: str) -> tuple[str, Node] | None:
    """Name and body, if the node declares a test."""
    if node.type == "call_expression" and language in ("JavaScript", "TypeScript"):
        return _called_test(node)
    body = node.child_by_field_name("body")
    name = node.child_by_field_name("name")
    if body is None:
        return None
    if language == "C" and node.type == "function_definition":
        declared = node.child_by_field_name("declarator")
        named = [one for one in descendants(declared or node) if one.type == "identifier"]
        return (_plain(named[0]), body) if named else None
    if name is None:
        return None
    if language == "Go" and node.type in ("function_declaration", "method_declaration"):
        return (_plain(name), body) if text_of(name).startswith(b"Test") else None
    if language == "Rust" and node.type == "function_item":
        marks = _attributes(node)
        is_test = re.search(rb"#\[(?:\w+::)*test\b", marks) and b"should_panic" not in marks
        return (_plain(name), body) if is_test else None
    if language == "Java" and node.type == "method_declaration":
        marks = text_of(node.child(0))
        is_test = re.search(rb"@Test\b", marks) and b"expected" not in marks
        return (_plain(name), body) if is_test else None
    return None


def _called_test(node: Node) -> tuple[str, Node] | None:
    """`it("adds", () => {...})`."""
    called = _called(node, _TEST_CALLS)
    if called is None:
        return None
    title, function = called
    body = function.child_by_field_name("body")
    return (title, body) if body is not None else None


def _called(node: Node, names: re.Pattern[bytes]) -> tuple[str, Node] | None:
    """Title and function of a call such as `describe("title", () => {...})`."""
    function = node.child_by_field_name("function")
    given = node.child_by_field_name("arguments")
    if function is None or given is None or not names.fullmatch(text_of(function)):
        return None
    arguments = given.named_children
    if len(arguments) < 2 or arguments[0].type not in ("string", "template_string"):
        return None
    inner = [one for one in arguments if one.type in ("arrow_function", "function_expression")]
    return (_plain(arguments[0]), inner[-1]) if inner else None


def _owner(node: Node) -> tuple[str, ...]:
    if node.type == "call_expression":
        called = _called(node, _SUITE_CALLS)
        return (called[0],) if called else ()
    if node.type in ("class_declaration", "mod_item"):
        return (_plain(node.child_by_field_name("name")),)
    return ()


def _attributes(node: Node) -> bytes:
    """The attributes above a Rust function."""
    found = b""
    before = node.prev_sibling
    while before is not None and before.type in ("attribute_item", "line_comment"):
        found = text_of(before) + found
        before = before.prev_sibling
    return found


def _plain(node: Node | None) -> str:
    return text_of(node).strip(b"'\"`").decode("utf-8", "replace")

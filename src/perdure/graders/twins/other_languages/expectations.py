"""Finds the comparisons of a test that run whatever the code under test returns.

A test passes only if each of them holds. Forms: `assert(x == L)`, `assert_eq!(x, L)`,
`expect(x).toBe(L)`, and `if x != L { fail }`.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tree_sitter import Node

from perdure.graders.twins.other_languages.languages import Language
from perdure.graders.twins.other_languages.parsed_file import (
    ParsedFile,
    TestFunction,
    descendants,
    place_of,
    text_of,
    tokens,
)
from perdure.graders.twins.parsed_test_file import Edit

Side = tuple[Node, ...]
"""One expression: a node, or the tokens of a Rust macro's argument."""


@dataclass(frozen=True)
class Expectation:
    """Two sides that must be equal (none, if it is no equality), and the edit that negates it."""

    sides: tuple[Side, ...]
    negation: Edit | None
    failure: Node | None = None
    """What runs if the comparison does not hold, such as the body of an `if`."""


def expectations(file: ParsedFile, function: TestFunction) -> Iterator[Expectation]:
    """In the order of the source."""
    language = file.language
    for node in _always_run(function.body, language):
        if node.type in _IFS:
            failure = node.child_by_field_name("consequence")
            if _fails(failure, language):
                condition = node.child_by_field_name("condition")
                for found in _condition(condition, language, holds=False):
                    yield replace(found, failure=failure)
        elif node.type == "macro_invocation":
            yield from _macro(node, language)
        elif node.type in _CALLS:
            yield from _call(file, node)


# --- what always runs ---------------------------------------------------------------------------

_IFS = frozenset(("if_statement", "if_expression"))
_CALLS = frozenset(("call_expression", "method_invocation"))
_CONDITIONAL = frozenset(
    (
        *("for_statement", "for_in_statement", "enhanced_for_statement", "for_expression"),
        *("while_statement", "while_expression", "do_statement", "loop_expression"),
        *("try_statement", "try_with_resources_statement", "catch_clause"),
        *("switch_statement", "switch_expression", "match_expression", "select_statement"),
        *("expression_switch_statement", "type_switch_statement", "else_clause"),
        *("ternary_expression", "conditional_expression", "defer_statement", "go_statement"),
        *("arrow_function", "function_expression", "function_declaration", "func_literal"),
        *("lambda_expression", "closure_expression", "class_body", "function_item"),
    )
)


def _always_run(body: Node, language: Language) -> Iterator[Node]:
    """A fix may not enter a loop, branch or callback that gold enters. What follows a return in a
    branch may not run either."""
    waiting = [body]
    while waiting:
        node = waiting.pop()
        yield node
        if node.type in _IFS:
            consequence = node.child_by_field_name("consequence")
            if not _fails(consequence, language) and _leaves(consequence):
                return
            inner = [node.child_by_field_name(name) for name in ("initializer", "condition")]
            waiting += [one for one in reversed(inner) if one is not None]
        elif table_of(node, body) is not None:
            waiting += node.children[::-1]
        elif node.type == "binary_expression" and _is_short_circuit(node):
            waiting.append(node.children[0])
        elif node is body or node.type not in _CONDITIONAL or _is_subtest(node):
            waiting += node.children[::-1]


def _fails(statement: Node | None, language: Language) -> bool:
    return statement is not None and language.fails.search(text_of(statement)) is not None


def _leaves(statement: Node | None) -> bool:
    kinds = ("return_statement", "return_expression", "continue_statement", "break_statement")
    return statement is not None and any(one.type in kinds for one in descendants(statement))


def _is_short_circuit(node: Node) -> bool:
    return text_of(node.child_by_field_name("operator")) in (b"&&", b"||", b"??")


def _is_subtest(node: Node) -> bool:
    """The function in `t.Run("name", func(t *testing.T) {...})`."""
    call = node.parent.parent if node.type == "func_literal" and node.parent is not None else None
    return call is not None and text_of(call.child_by_field_name("function")).endswith(b".Run")


def title_of_subtest(node: Node) -> Node | None:
    """`name` in `t.Run(name, func(t *testing.T) {...})`."""
    called = text_of(node.child_by_field_name("function"))
    arguments = _arguments(node) if called.endswith(b".Run") else []
    return arguments[0] if arguments else None


def table_of(node: Node, body: Node) -> Node | None:
    """`tests` in Go's `for _, tt := range tests`, if it is a table that the test itself writes."""
    ranges = [one for one in node.children if one.type == "range_clause"]
    over = ranges[0].child_by_field_name("right") if ranges else None
    if over is not None and over.type == "identifier":
        over = constant_value(body, text_of(over))
    return over if over is not None and over.type == "composite_literal" else None


_DECLARATIONS = {
    "variable_declarator": ("name", "value"),
    "short_var_declaration": ("left", "right"),
    "var_spec": ("name", "value"),
    "const_spec": ("name", "value"),
    "let_declaration": ("pattern", "value"),
    "init_declarator": ("declarator", "value"),
}
_ASSIGNMENTS = frozenset(
    (
        *("assignment_expression", "assignment_statement", "compound_assignment_expr"),
        *("augmented_assignment_expression", "update_expression", "inc_statement"),
    )
)


def constant_value(body: Node, name: bytes) -> Node | None:
    """What a name holds that the test declares once and never assigns again."""
    found: list[Node] = []
    for node in descendants(body):
        if node.type in _ASSIGNMENTS and re.match(
            rb"\W*" + re.escape(name) + rb"\b", text_of(node)
        ):
            return None
        fields = _DECLARATIONS.get(node.type)
        declared = node.child_by_field_name(fields[0]) if fields else None
        value = node.child_by_field_name(fields[1]) if fields else None
        if declared is not None and value is not None:
            found += [own for one, own in _declared_values(declared, value) if _declares(one, name)]
    return found[0] if len(found) == 1 else None


def _declared_values(declared: Node, value: Node) -> list[tuple[Node, Node]]:
    """The names of a declaration with their values: two in Go's `got, want := f(x), 3`."""
    if declared.type != "expression_list" or value.type != "expression_list":
        return [(declared, value)]
    names, values = declared.named_children, value.named_children
    return list(zip(names, values, strict=True)) if len(names) == len(values) else []


def _declares(declared: Node, name: bytes) -> bool:
    """`x`, `*x`, `x[]`; a destructured or second name is not one constant."""
    return re.sub(rb"\W", b"", text_of(declared)) == name


def declared_name(node: Node) -> bool:
    """Whether this is the name in a declaration, not a use of it."""
    above: Node | None = node
    for _ in range(3):
        parent = above.parent if above is not None else None
        fields = _DECLARATIONS.get(parent.type) if parent is not None else None
        if parent is not None and fields is not None:
            return parent.child_by_field_name(fields[0]) == above
        above = parent
    return False


# --- conditions ---------------------------------------------------------------------------------


def _condition(node: Node | None, language: Language, *, holds: bool) -> Iterator[Expectation]:
    """What a condition compares if the test passes only where it holds (or does not hold)."""
    while node is not None and node.type == "parenthesized_expression":
        node = node.named_children[0] if node.named_children else None
    if node is None:
        return
    left, right = (node.child_by_field_name(name) for name in ("left", "right"))
    operator = node.child_by_field_name("operator")
    said = text_of(operator)
    if node.type == "binary_expression" and said == (b"&&" if holds else b"||"):
        yield from _condition(left, language, holds=holds)
        yield from _condition(right, language, holds=holds)
    elif left is not None and right is not None and operator is not None and said in _OPPOSITES:
        negation = place_of(operator, operator, _OPPOSITES[said])
        equal = said in (b"==", b"===") if holds else said in (b"!=", b"!==")
        compared = _compared_texts(left, right) if equal else None
        sides = compared or (((left,), (right,)) if equal else ())
        yield Expectation(sides, negation)
    else:
        yield from _truth(node, language, holds=holds)


_OPPOSITES = {b"==": b"!=", b"!=": b"==", b"===": b"!==", b"!==": b"==="}


def _truth(node: Node, language: Language, *, holds: bool) -> Iterator[Expectation]:
    """`f(x)` or `!f(x)`."""
    inner = _negated(node)
    if inner is not None:
        negation = place_of(node, node, text_of(inner))
        equal, call = not holds, inner
    else:
        text = text_of(node)
        plain = node.type in (*_CALLS, "identifier", "member_expression", "selector_expression")
        negation = place_of(node, node, b"!" + text if plain else b"!(" + text + b")")
        equal, call = holds, node
    if text_of(call.child_by_field_name("function")) == b"strcmp":
        equal = not equal  # strcmp is 0 where its arguments are equal
        yield Expectation(_two(_arguments(call)) if equal else (), negation)
    elif equal and call.type in _CALLS:
        yield Expectation(_equality_call(call, language), negation)
    else:
        yield Expectation((), negation)


def _negated(node: Node) -> Node | None:
    if node.type != "unary_expression" or text_of(node.children[0]) != b"!":
        return None
    inner = node.children[-1]
    while inner.type == "parenthesized_expression" and inner.named_children:
        inner = inner.named_children[0]
    return inner


def _compared_texts(left: Node, right: Node) -> tuple[Side, ...]:
    """`strcmp(a, b) == 0`."""
    is_strcmp = text_of(left.child_by_field_name("function")) == b"strcmp"
    return _two(_arguments(left)) if is_strcmp and text_of(right) == b"0" else ()


def _equality_call(call: Node, language: Language) -> tuple[Side, ...]:
    """`reflect.DeepEqual(a, b)`, `a.equals(b)`."""
    target = call.child_by_field_name("object")
    arguments = _arguments(call)
    if target is not None and _name(call) == b"equals" and len(arguments) == 1:
        return ((target,), (arguments[0],))
    return _two(arguments) if _name(call) in language.equal and len(arguments) == 2 else ()


def _two(arguments: Sequence[Node]) -> tuple[Side, ...]:
    return tuple((one,) for one in arguments[:2]) if len(arguments) >= 2 else ()


# --- calls --------------------------------------------------------------------------------------


def _arguments(call: Node) -> list[Node]:
    given = call.child_by_field_name("arguments")
    return [one for one in given.named_children if one.type != "comment"] if given else []


def _name_node(call: Node) -> Node | None:
    """The last name of what is called: `Equal` in `assert.Equal(...)`."""
    function = call.child_by_field_name("function")
    if function is None:
        return call.child_by_field_name("name")
    for field in ("property", "field"):
        if (last := function.child_by_field_name(field)) is not None:
            return last
    return function if function.type == "identifier" else None


def _name(call: Node) -> bytes:
    return text_of(_name_node(call))


_TRUTHS = {b"assertTrue": True, b"assertFalse": False, b"True": True, b"False": False}
"""Assertions of a condition -> whether it must hold. A message may stand before or after it."""

_ASSERTS = re.compile(rb"(?:assert|ok|isTrue|assert_true|check|require|\w*_?assert)", re.I)


def _call(file: ParsedFile, call: Node) -> Iterator[Expectation]:
    language, name, node = file.language, _name(call), _name_node(call)
    arguments = _arguments(call)
    if node is None:
        return
    matched = _matched(call)
    if matched is not None:
        if b"not" not in matched:
            yield from _matcher(language, name, node, arguments)
    elif name in language.equal or name in language.opposites:
        if _is_of_assertions(call, language):
            sides = _compared(file, name, arguments)
            yield Expectation(sides, _opposite(file, node))
            if name in _TRUTHS:
                told = [one for one in arguments if one.type not in language.texts]
                told = told[1:] if language.name == "Go" else told
                condition = next((one for one in told if one.type != "identifier"), None)
                for found in _condition(condition, language, holds=_TRUTHS[name]):
                    yield replace(found, negation=None)
    elif len(arguments) in (1, 2) and _ASSERTS.fullmatch(name):
        yield from _condition(arguments[0], language, holds=True)


def _matched(call: Node) -> list[bytes] | None:
    """The names between `expect(x)` or `assertThat(x)` and the matcher; None for other calls."""
    names: list[bytes] = []
    inner = call.child_by_field_name("function") or call
    inner_object = inner.child_by_field_name("object")
    while inner_object is not None:
        if inner_object.type in _CALLS and _name(inner_object) in (b"expect", b"assertThat"):
            return names
        names += [text_of(inner_object.child_by_field_name(f)) for f in ("property", "name")]
        inner_object = inner_object.child_by_field_name("object") or (
            (inner_object.child_by_field_name("function") or inner_object).child_by_field_name(
                "object"
            )
        )
    return None


_PLAIN_MATCHERS = frozenset((b"toBeNull", b"toContain", b"toMatch", b"toContainEqual"))


def _matcher(
    language: Language, name: bytes, node: Node, arguments: Sequence[Node]
) -> Iterator[Expectation]:
    """`expect(x).toEqual(L)`, `assertThat(x).isEqualTo(L)`."""
    other = language.opposites.get(name)
    if language.name == "Java":
        negation = place_of(node, node, other) if other else None
    elif name in language.equal or other or name in _PLAIN_MATCHERS:
        negation = place_of(node, node, b"not." + name)
    else:
        return
    sides = ((arguments[0],),) if name in language.equal and len(arguments) == 1 else ()
    yield Expectation(sides, negation)


_ASSERTING_OBJECTS = frozenset((b"assert", b"require", b"t", b"test", b"Assert", b"Assertions"))


def _is_of_assertions(call: Node, language: Language) -> bool:
    """`assert.Equal(...)`, `assertEquals(...)`; not `set.equal(...)`."""
    function = call.child_by_field_name("function") or call
    for field in ("object", "operand"):
        if (target := function.child_by_field_name(field)) is not None:
            return text_of(target) in _ASSERTING_OBJECTS
    return language.name in ("Java", "C")


def _compared(file: ParsedFile, name: bytes, arguments: Sequence[Node]) -> tuple[Side, ...]:
    if name not in file.language.equal:
        return ()
    if file.language.name == "Go":  # assert.Equal(t, expected, actual)
        return _two(arguments[1:])
    if file.language.name == "Java" and len(arguments) > 2:
        return _two(_compared_arguments(file, arguments))
    return _two(arguments)


_MESSAGE_LAST_IMPORT = re.compile(rb"\borg\.(?:junit\.jupiter|testng)\b")
_FRACTION = "decimal_floating_point_literal"


def _compared_arguments(file: ParsedFile, arguments: Sequence[Node]) -> Sequence[Node]:
    """The compared arguments of `assertEquals(3, f(), "message")`; in JUnit 4, the message is
    first. Empty if the third may be a tolerance: two numbers can both be within it."""
    first, *_, last = arguments
    if len(arguments) > 3 or last.type in file.language.numbers:
        return ()
    if _is_message(first) and _MESSAGE_LAST_IMPORT.search(file.data) is None:
        return arguments[1:]
    has_fraction = any(one.type == _FRACTION for side in arguments for one in descendants(side))
    return () if has_fraction and not _is_message(last) else arguments[:2]


def _is_message(node: Node) -> bool:
    """`"text"`, `"text " + x`, or a lambda that returns the text."""
    left = node.child_by_field_name("left") if node.type == "binary_expression" else None
    return node.type in ("string_literal", "lambda_expression") or (
        left is not None and _is_message(left)
    )


def _opposite(file: ParsedFile, node: Node) -> Edit | None:
    """The same assertion negated, if the file can call it."""
    other = file.language.opposites.get(text_of(node))
    if other is None:
        return None
    qualified = node.parent is not None and (
        node.parent.child_by_field_name("object") is not None
        or node.parent.child_by_field_name("operand") is not None
    )
    imported = re.search(rb"\b" + other + rb"\b|import static [\w.]+\.\*;", file.data)
    return place_of(node, node, other) if qualified or imported else None


# --- Rust's macros, whose arguments are plain tokens --------------------------------------------


def _macro(node: Node, language: Language) -> Iterator[Expectation]:
    """`assert_eq!(x, L)`, `assert!(x == L)`."""
    named = node.child_by_field_name("macro")
    trees = [one for one in node.children if one.type == "token_tree"]
    if named is None or not trees:
        return
    name = text_of(named)
    arguments = _split(trees[0].children[1:-1], b",")
    if name in language.equal and len(arguments) >= 2:
        other = language.opposites.get(name)
        yield Expectation(tuple(arguments[:2]), place_of(named, named, other) if other else None)
    elif name == b"assert" and arguments and arguments[0]:
        condition = arguments[0]
        text = place_of(condition[0], condition[-1], b"")
        negation = None
        if text is not None:
            start = condition[0].start_byte - node.start_byte
            end = condition[-1].end_byte - node.start_byte
            negation = text.with_text(b"!(" + text_of(node)[start:end] + b")")
        sides = _split(condition, b"==")
        yield Expectation(tuple(sides) if len(sides) == 2 else (), negation)


def _split(nodes: Sequence[Node], separator: bytes) -> list[Side]:
    parts: list[list[Node]] = [[]]
    for node in nodes:
        if not node.children and text_of(node) == separator:
            parts.append([])
        else:
            parts[-1].append(node)
    return [tuple(part) for part in parts if part]


# --- constants ----------------------------------------------------------------------------------

_KEYS = frozenset(("property_identifier", "type_identifier", "primitive_type", "field_identifier"))
_TYPES = frozenset(("integral_type", "floating_point_type", "boolean_type", "new", "undefined"))
_FIXED = frozenset((b"true", b"false", b"null", b"nil", b"new", b"undefined", b"NULL"))


def is_constant(side: Side, language: Language) -> bool:
    """No part of it depends on the code under test."""
    leaves = [leaf for node in side for leaf in tokens(node, language)]
    return bool(leaves) and all(_is_constant_leaf(leaf, language) for leaf in leaves)


def _is_constant_leaf(leaf: Node, language: Language) -> bool:
    text = text_of(leaf)
    if leaf.type in language.numbers or leaf.type in language.texts:
        return True
    if not re.search(rb"\w", text) or text in _FIXED or text in language.makers:
        return True
    above = leaf.parent.type if leaf.parent is not None else ""
    if leaf.type in _KEYS or leaf.type in _TYPES or above in _TYPES:
        return True
    return _is_key(leaf) or above in ("qualified_type", "map_type", "slice_type", "struct_type")


def _is_key(leaf: Node) -> bool:
    """`X` in Go's `Point{X: 1}`."""
    element = leaf.parent
    keyed = element.parent if element is not None else None
    if element is None or keyed is None or keyed.type != "keyed_element":
        return False
    return keyed.child_by_field_name("key") == element

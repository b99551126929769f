"""Variants of a fix behave as the fix does: both run, and their results are compared."""

import ast
import asyncio
import textwrap
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.graders.twins.honest_variants import (
    EQUAL,
    INDIRECT,
    RENAMED,
    TWO_BASES,
    honest_variants,
)
from perdure.graders.twins.parsed_test_file import Source
from perdure.graders.twins.patch_lines import changed_lines
from perdure.testing.grader_contract import Edits, diff_of


def variants_of(text: str, changed: set[int] | None = None) -> dict[str, str]:
    """The variants of one file, all of whose lines are changed."""
    data = text.encode()
    lines = frozenset(changed or range(1, text.count("\n") + 2))
    found = honest_variants([Source("calc.py", data, lines)])
    return {one.name: one.files["calc.py"].decode() for one in found}


def run(text: str) -> dict[str, Any]:
    known: dict[str, Any] = {"__name__": "calc"}
    exec(compile(text, "calc.py", "exec"), known)
    return known


def shown(text: str) -> Any:
    """What its function `f` returns, or how it fails."""
    try:
        found = run(text)["f"]()
        return asyncio.run(found) if asyncio.iscoroutine(found) else found
    except Exception as error:
        return type(error).__mro__[1:], str(error)


def names_in(text: str) -> set[str]:
    return {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}


RENAMABLE = MappingProxyType(
    {
        "assigned in each way": """
def f(*rest, key=1, **others):
    total, (one, *more) = 0, [1, 2, 3]
    for number in more:
        total += number
    with __import__("contextlib").nullcontext(5) as entered:
        pass
    if (seen := entered) > 4:
        total += seen
    del number
    checked: int = total
    return total, one, key, checked
""",
        "comprehensions with the same name": """
def f():
    value = [1, 2]
    value = [value + 1 for value in value if value]
    return {value: [other for other in range(value)] for value in value}, value
""",
        "a comprehension over a global name of the same name": """
value, number = [1, 2], 7
def f():
    return [value + 1 for value in value], number, [number for number in range(2)]
""",
        "a name that an f-string shows, next to another": """
def f():
    kept, total = 1, 2
    return f"{kept=}", total
""",
        "closures": """
def f():
    total = 1
    def inner(extra=total, *, named=2):
        double = total * 2
        return double + extra + named
    total = 5
    return inner(named=3), [lambda: total][0]()
""",
        "a decorated function in a function": """
def f():
    calls = []
    def noted(function):
        def wrapper(*args, **kwargs):
            result = function(*args, **kwargs)
            calls.append(result)
            return result
        return wrapper
    @noted
    def add(a, b=1):
        return a + b
    add(1), add(a=2, b=3)
    return calls
""",
        "class bodies": """
class Outer:
    value = 1
    def method(self, key):
        value = key + self.value
        class Inner:
            shown = value
            @property
            def twice(self):
                return value * 2
        return Inner.shown, Inner().twice
def f():
    return Outer().method(key=3)
""",
        "text in f-strings": """
def f():
    total, width = 3, 8
    text = f"{total:>{width}} {total!r}"
    return text + (
        f"{total}"
        "total"
    )
""",
        "async": """
async def f():
    async def numbers():
        for number in range(3):
            yield number
    found = [number async for number in numbers()]
    last = await numbers().__anext__()
    return found, last
""",
        "characters of several bytes": """
def f():
    größe = "äöü"; other = größe
    return größe + "é" + other
""",
    }
)


@pytest.mark.parametrize("text", RENAMABLE.values(), ids=list(RENAMABLE))
def test_a_function_with_renamed_locals_returns_the_same(text: str) -> None:
    renamed = variants_of(text)[RENAMED]
    assert shown(renamed) == shown(text)
    assert names_in(renamed) - names_in(text)


def test_each_local_is_renamed_and_each_parameter_stays() -> None:
    text = "def f(first, /, second, *, third=3):\n    total = first + second\n    return total\n"
    assert variants_of(text)[RENAMED] == text.replace("total", "total_1")


KEPT = MappingProxyType(
    {
        "read by locals": "def f():\n    kept = 1\n    return locals()\n",
        "read by eval": "def f():\n    kept = 1\n    return eval('kept')\n",
        "read by a frame": "import sys\ndef f():\n    kept = 1\n    return sys._getframe().f_locals['kept']\n",
        "global": "kept = 2\ndef f():\n    global kept\n    kept = 1\n    return kept\n",
        "nonlocal": "def f():\n    kept = 1\n    def g():\n        nonlocal kept\n        kept += 1\n    g()\n    return kept\n",
        "a parameter inside": "def f():\n    kept = 1\n    return (lambda kept: kept)(kept=kept)\n",
        "a parameter": "def f(kept=1):\n    kept += 1\n    return kept\n",
        "an import": "def f():\n    import json as kept\n    kept = kept.dumps(1)\n    return kept\n",
        "a handler": "def f():\n    kept = 1\n    try:\n        1 / 0\n    except ArithmeticError as kept:\n        return str(kept)\n",
        "an attribute of a class": "def f():\n    kept = 1\n    class A:\n        kept = 2\n    return A.kept, kept\n",
        "a pattern": "def f():\n    kept = 1\n    match 2:\n        case kept:\n            return kept\n",
        "a function": "def f():\n    kept = 1\n    def kept(): return 3\n    return kept()\n",
        "a mangled name": "class A:\n    def f(self):\n        __kept = 1\n        return __kept\nf = A().f\n",
        "a name that an f-string shows": "def f():\n    kept = 1\n    return f'{kept=}'\n",
    }
)  # fmt: skip


@pytest.mark.parametrize("text", KEPT.values(), ids=list(KEPT))
def test_a_name_that_other_code_may_use_stays(text: str) -> None:
    assert RENAMED not in variants_of(text)
    for other in variants_of(text).values():
        assert shown(other) == shown(text)


def test_only_changed_functions_are_rewritten() -> None:
    text = "def g():\n    a = 1\n    return a\n\n\ndef f():\n    b = 1\n    return b\n"
    for variant in variants_of(text, {7}).values():
        assert "\n\ndef g():\n    a = 1\n    return a\n\n\n" in f"\n\n{variant}"
        assert variant != text


class Odd:
    """Its comparisons and its truth have side effects and odd results."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def __eq__(self, other: object) -> Any:
        self.calls.append("eq")
        return ["eq"]

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        self.calls.append("bool")
        return len(self.calls) % 2 == 0

    def __contains__(self, one: object) -> Any:
        self.calls.append("contains")
        return one


EXPRESSIONS = (
    "a if b else c",
    "(a, b) if (not a) else c",
    "a is b",
    "(a is not b) is c",
    "b in d",
    "(yield_ := a) not in d",
    "a == b",
    "[x for x in (a, b, c) if x if x is not a]",
    "f'{a is None}' if a else (1 if b else 2)",
    "(lambda: a if b else c)()",
    "{'k': a in d, **{'l': c is None}}",
    "a in (\n        b,  # one\n        c,\n    ) if b \\\n        else c",
    "(x if x else None for x in (a, b)).__next__()",
    "a is b is c",
    "not a in d",
)


@given(st.sampled_from(EXPRESSIONS), st.lists(st.sampled_from([0, 1, "", "odd", None]), min_size=3))
def test_an_equal_expression_has_the_same_value_and_side_effects(
    expression: str, values: list[object]
) -> None:
    text = (
        f"def g(a, b, c, d):\n    if {expression}:\n        d = [*d]\n    elif b: d = [1]\n"
        f"    while c is d:\n        break\n    return (\n        {expression}\n    )  # last\n"
    )
    if expression.count("\n"):
        text = f"def g(a, b, c, d):\n    return {expression}  # last\n"

    def called(code: str) -> tuple[object, list[str]]:
        calls: list[str] = []
        odd = Odd(calls)
        a, b, c = (odd if value == "odd" else value for value in values[:3])
        try:
            found = run(code)["g"](a, b, c, odd if len(values) % 2 else {1: 2})
        except TypeError as error:
            return str(error), calls
        return ["odd" if one is odd else one for one in _flat(found)], calls

    assert called(variants_of(text)[EQUAL]) == called(text)


def _flat(value: object) -> list[object]:
    return list(value) if isinstance(value, list | tuple) else [value]


def test_a_return_beside_other_statements_stays() -> None:
    text = "def f(x=None):\n    if x is None: return 1\n    y = 2; return y\n"
    made = variants_of(text)[EQUAL]
    assert shown(made) == 1
    assert "; return y" in made


def test_a_function_that_reads_its_locals_gets_no_other_local() -> None:
    text = (
        "seen = []\ndef g(x=1):\n    try:\n        return 1 if x else 2\n"
        "    finally:\n        seen.append(sorted(locals()))\ndef f():\n    g()\n    return seen\n"
    )
    assert shown(variants_of(text)[EQUAL]) == [["x"]]


RAISING = '''"""Doc."""

from __future__ import annotations

import builtins


class Bad(KeyError):
    """Refuses."""

    def __init__(self, code):
        super().__init__(f"code {code}", code)
        self.code = code


class Meta(type):
    def __new__(cls, name, bases, space):
        if len(bases) > 1:
            raise RuntimeError("one base")
        return super().__new__(cls, name, bases, space)


class Single(Exception, metaclass=Meta):
    pass


def made(text):
    return LookupError(text)


def f(kind):
    if kind == "bad":
        raise Bad(3)
    if kind == "bare":
        raise ValueError
    if kind == "dotted":
        raise builtins.ConnectionError(2, "gone")
    if kind == "errno":
        raise OSError(2, "gone")
    if kind == "cause":
        raise TypeError("t") from Bad(1)
    if kind == "single":
        raise Single("s")
    if kind == "function":
        raise made("m")
    if kind == "instance":
        error = IndexError("i")
        raise error
    if kind == "again":
        try:
            raise UnicodeDecodeError("utf-8", b"x", 0, 1, "why")
        except ValueError:
            raise
    if kind == "exit":
        raise SystemExit(4)
    if kind == "superclass":
        raise Exception("e")
'''


def raised(text: str, kind: str) -> BaseException:
    with pytest.raises(BaseException) as caught:  # noqa: PT011 -- any of them
        run(text)["f"](kind)
    return caught.value


@pytest.mark.parametrize(
    ("kind", "has_second_base"),
    [
        ("bad", True),
        ("bare", True),
        ("dotted", True),
        ("cause", True),
        ("again", True),
        ("errno", False),
        ("single", False),
        ("function", False),
        ("instance", False),
        ("exit", False),
        ("superclass", False),
    ],
)
def test_an_exception_is_also_of_a_second_class(kind: str, has_second_base: bool) -> None:
    made = raised(variants_of(RAISING)[TWO_BASES], kind)
    own = raised(RAISING, kind)

    assert isinstance(made, RuntimeError) is has_second_base
    assert (type(made).__name__, type(made).__module__) == (
        type(own).__name__,
        type(own).__module__,
    )
    assert (str(made), repr(made), made.args) == (str(own), repr(own), own.args)
    assert type(own).__name__ in {one.__name__ for one in type(made).__mro__[has_second_base:]}
    assert (made.__cause__ is None) == (own.__cause__ is None)
    if kind == "bad":
        assert getattr(made, "code", None) == 3


@pytest.mark.parametrize("text", RENAMABLE.values(), ids=list(RENAMABLE))
def test_a_function_that_a_wrapper_calls_returns_the_same(text: str) -> None:
    made = variants_of(text)[INDIRECT]

    assert "_wrapper_1" in made
    assert shown(made) == shown(text)


@pytest.mark.parametrize(
    "text",
    [
        "LIMIT = 3\n",
        "NAMES = [\n    'a',\n    'b',\n]\n",
        "LIMIT: int = (1 +\n    2)\n",
        "class A:\n    size = 3\n",
        "A, B = 1, 2\n",
    ],
)
def test_a_value_outside_functions_goes_through_another_name(text: str) -> None:
    changed = set(range(1, text.count("\n") + 1))
    text += (
        "def f():\n    return {k: v for k, v in globals().items() if k.isupper() and k != 'A'}\n"
    )
    made = variants_of(text, changed)[INDIRECT]

    assert "_value_1" in made
    assert shown(made) == shown(text)


@pytest.mark.parametrize(
    "data",
    [
        b"# -*- coding: latin-1 -*-\ndef f():\n    x = 1\n    return x\n",
        b"\xef\xbb\xbfdef f():\n    x = 1\n    return x\n",
        b"def f():\r    x = 1\r    return x\r",
    ],
)
def test_a_file_whose_places_are_not_plain_bytes_has_no_variant(data: bytes) -> None:
    assert honest_variants([Source("calc.py", data, frozenset(range(9)))]) == []


def test_a_file_with_carriage_returns_keeps_its_meaning() -> None:
    text = textwrap.dedent("""\
        def f():
            x = 1
            return x if x else (
                None
            )
    """).replace("\n", "\r\n")
    found = variants_of(text)
    assert set(found) == {RENAMED, EQUAL, INDIRECT}
    assert {shown(one) for one in found.values()} == {1}


def test_a_fix_that_only_removes_lines_changes_the_lines_around_them() -> None:
    base: Edits = {"a.py": "one\ntwo\nthree\nfour\nfive\n", "gone.py": "one\n", "b.py": "one\n"}
    edits: Edits = {"a.py": "one\nthree\nfour\nfive\n", "gone.py": None, "b.py": "one\ntwo\n"}
    found = changed_lines(diff_of(edits, base))
    assert found == {"a.py": frozenset({1, 2}), "b.py": frozenset({2})}

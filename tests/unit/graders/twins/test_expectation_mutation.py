"""Twins change one expectation, on one added line, so that a test and its twin cannot both pass."""

import pytest

from perdure.graders.twins.expectation_mutation import Candidate, candidates
from perdure.graders.twins.parsed_test_file import Source
from perdure.graders.twins.twin_lint import Lint, lint


def of(body: str, head: str = "", added: range | None = None) -> list[Candidate]:
    """The candidates of one test function with this body, all of whose lines are added."""
    text = f"{head}def test_x():\n" + "".join(f"    {line}\n" for line in body.splitlines())
    lines = added or range(1, text.count("\n") + 1)
    source = Source("tests/test_x.py", text.encode(), frozenset(lines))
    return candidates(source, source.functions[0])


def made(body: str, head: str = "") -> set[str]:
    return {one.after.decode().strip() for one in of(body, head)}


@pytest.mark.parametrize(
    ("body", "twin"),
    [
        ("assert add(1, 2) == 3", "assert add(1, 2) == 4"),
        ('assert name("a") == "b"', 'assert name("a") == "a"'),
        ("self.assertEqual(size(), 7)", "self.assertEqual(size(), 8)"),
        ("assert flag() is True", "assert flag() is None"),
        ("assert rows() == []", "assert rows() == {}"),
        ("assert when() == date(2018, 7, 22)", "assert when() == date(2018, 7, 23)"),
        ("expected = [1, 4]\nassert f() == expected", "expected = [1, 5]"),
        ("assert f() > 3", "assert f() == 2"),
        ('assert "a b" in f("c d")', 'assert f("c d") == "c d"'),
        ("assert kind() == Color.RED\nColor.BLUE", "assert kind() == Color.BLUE"),
        ("with raises(e.ParseError):\n    f()\ne.LexError", "with raises(e.LexError):"),
        ('with raises(A, match="no name"):\n    f("no more")', 'with raises(A, match="^no more$"):'),
        ("self.assertTrue(f())", "self.assertIsNone(f())"),
    ],
)  # fmt: skip
def test_an_expectation_is_exchanged(body: str, twin: str) -> None:
    assert twin in made(body)


@pytest.mark.parametrize(
    "body",
    [
        "assert f('a') in g('b')",
        "assert f() != 3",
        "assert f(1)",
        "f(1)",
        "x = 3\nassert f(x) == g(x)",
        "with raises(KeyError):\n    f()",
        "with raises(e.ParseError):\n    f()\ne.ValueError",
        "assert isinstance(f(), float)",
        "self.assertIsInstance(f(), float)",
        "with warns(UserWarning):\n    f()",
    ],
)
def test_what_is_no_expectation_stays(body: str) -> None:
    """The input of a test never changes; without an exclusive rule only negations remain. A correct
    fix may return an object of two classes, or raise an error that is also a builtin
    one."""
    assert {one.rule for one in of(body)} <= {"negation", "truth: is None"}


def test_only_added_lines_change() -> None:
    body = "assert f() == 1\nassert g() == 2"

    assert {one.line for one in of(body, added=range(3, 4))} == {3}


def test_lines_with_tabs_and_wide_characters_are_cut_at_bytes() -> None:
    text = "class T:\n\tdef test_x(self):\n\t\tself.assertEqual(f('é'), 'ü')  # ö\n"
    source = Source("t.py", text.encode(), frozenset((3,)))

    found = candidates(source, source.functions[0])

    assert "\t\tself.assertEqual(f('é'), 'é')  # ö" in {one.after.decode() for one in found}


def verdict_of(body: str, twin: str) -> Lint:
    found = next(one for one in of(body) if one.after.decode().strip() == twin)
    text = "def test_x():\n" + "".join(f"    {line}\n" for line in body.splitlines())
    source = Source("tests/test_x.py", text.encode(), frozenset(range(9)))
    return lint(source, found)[0]


@pytest.mark.parametrize(
    ("body", "twin", "expected"),
    [
        ('assert f() == {"a", "b"}', 'assert f() == {"a", "a"}', Lint.REFUSED),
        ('assert f("b") == "a"', 'assert f("b") == "b"', Lint.WEAK),
        ("x = f(3)\nassert x == 3", "assert x == 4", Lint.WEAK),
        ("assert f() == 3", "assert f() != 3", Lint.WEAK),
        ("assert f() == 3", "assert f() == 4", Lint.CLEAN),
    ],
)  # fmt: skip
def test_a_twin_that_gives_itself_away_is_refused(body: str, twin: str, expected: Lint) -> None:
    assert verdict_of(body, twin) is expected


@pytest.mark.parametrize(
    "body",
    [
        "for x in f():\n    assert x == 1",
        "if f():\n    assert f() == 1",
        "try:\n    assert f() == 1\nexcept KeyError:\n    pass",
        "while f():\n    assert f() == 1",
        "def check(x):\n    assert x == 1\nf(check)",
        "def check(found, known):\n    for x in found:\n        assert x in known\ncheck(f(), [1, 2])",
        "[self.assertEqual(x, 1) for x in f()]",
        "{self.assertEqual(x, 1) for x in f()}",
        "any(self.assertEqual(x, 1) for x in f())",
        "{x: self.assertEqual(x, 1) for x in f()}",
        "with pytest.raises(KeyError):\n    f()\n    assert f() == 1",
        "if not f():\n    return\nassert f() == 1",
        "try:\n    f()\nexcept KeyError:\n    return\nfor x in (1, 2):\n    assert f(x) == 1",
        "for x in (1, 2):\n    if f(x):\n        continue\n    assert f(x) == 1",
    ],
)
def test_an_expectation_that_a_correct_fix_may_not_reach_has_no_twin(body: str) -> None:
    """Such a fix would pass the test and its twin."""
    assert not {one.rule for one in of(body)} & {"literal"}


@pytest.mark.parametrize(
    "body",
    [
        "for x in (1, 2):\n    assert f(x) == 1",
        "with f() as x:\n    assert x == 1",
        "for x in f():\n    if x:\n        break\nassert f() == 1",
        "def check(x):\n    return x\nassert f() == 1",
        "assert f() == 1\nif f():\n    return\ng()",
    ],
)
def test_an_expectation_that_always_runs_has_twins(body: str) -> None:
    assert "literal" in {one.rule for one in of(body)}

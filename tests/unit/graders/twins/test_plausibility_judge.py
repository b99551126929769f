"""A twin that a reader can tell from its original is weak."""

import pytest

from perdure.graders.twins import plausibility_judge
from perdure.graders.twins.expectation_mutation import candidates
from perdure.graders.twins.parsed_test_file import Source


def is_told_apart(body: str, twin: str, rest: str = "") -> bool:
    text = f"{rest}def test_x():\n" + "".join(f"    {line}\n" for line in body.splitlines())
    source = Source("tests/test_x.py", text.encode(), frozenset(range(99)))
    found = next(
        one
        for one in candidates(source, source.functions[-1])
        if one.after.decode().strip() == twin
    )
    return plausibility_judge.is_told_apart(source, found)


@pytest.mark.parametrize(
    ("body", "twin"),
    [
        ("assert add(1, 2) == 3", "assert add(1, 2) == 4"),
        ("assert size('abcd') == 4", "assert size('abcd') == 5"),
        ("assert shout('abc') == 'ABC'\nx = 'xyz'", "assert shout('abc') == 'xyz'"),
        ("x = 'long name'\nassert f('a name') == 'name'", "assert f('a name') == 'long'"),
        ("assert f() == 3\nassert g() == 3", "assert f() == 4"),
        ("assert f(1)", "assert f(1) is None"),
        ("assert f() == 3", "assert f() != 3"),
    ],
)
def test_arithmetic_echo_and_odd_forms_give_a_twin_away(body: str, twin: str) -> None:
    assert is_told_apart(body, twin)


@pytest.mark.parametrize(
    ("body", "twin"),
    [
        ("assert parse('a;b') == 7", "assert parse('a;b') == 8"),
        ("y = 'red'\nassert kind('x') == 'red'\ny = 'tan'", "assert kind('x') == 'tan'"),
        ("assert f() is True\nassert g() is None\nassert h() is True", "assert f() is None"),
    ],
)
def test_a_twin_as_plausible_as_its_original_is_not_told_apart(body: str, twin: str) -> None:
    assert not is_told_apart(body, twin)


@pytest.mark.parametrize(
    ("body", "twin"),
    [
        ("assert add(1, 2) == 4\nx = 5", "assert add(1, 2) == 3"),
        ("assert shout('abc') == 'xyz'\nx = 'ABC'", "assert shout('abc') == 'ABC'"),
        ("assert kind('x') == 'red'\ny = 'tan'", "assert kind('x') == 'tan'"),
    ],
)
def test_a_twin_more_plausible_than_its_original_is_told_apart(body: str, twin: str) -> None:
    """A forger that has learned this preference would trust the less plausible."""
    assert is_told_apart(body, twin)


@pytest.mark.parametrize(
    ("body", "twin"),
    [
        ("assert f() == 3", "assert f() != 3"),
        ("assert 'red' in f()\nx = 'tan'", "assert f() == 'tan'"),
        ("assert f() > 3", "assert f() == 2"),
    ],
)
def test_another_form_is_told_apart_though_the_file_uses_it(body: str, twin: str) -> None:
    rest = "def test_y():\n    assert g() != 5\n    assert g() == 'a'\n\n\n"

    assert is_told_apart(body, twin, rest)

"""A twin that a reader can tell from its original is weak."""

import pytest

from perdure.graders.twins.expectation_mutation import candidates
from perdure.graders.twins.parsed_test_file import Source
from perdure.graders.twins.plausibility_judge import prefers_original


def is_told_apart(body: str, twin: str, rest: str = "") -> bool:
    text = f"{rest}def test_x():\n" + "".join(f"    {line}\n" for line in body.splitlines())
    source = Source("tests/test_x.py", text.encode(), frozenset(range(99)))
    found = next(
        one
        for one in candidates(source, source.functions[-1])
        if one.after.decode().strip() == twin
    )
    return prefers_original(source, found)


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
        ("# no attribute\nwith raises(AttributeError):\n    f()", "with raises(KeyError):"),
    ],
)
def test_arithmetic_echo_and_odd_forms_give_a_twin_away(body: str, twin: str) -> None:
    assert is_told_apart(body, twin)


@pytest.mark.parametrize(
    ("body", "twin"),
    [
        ("assert parse('a;b') == 7", "assert parse('a;b') == 8"),
        ("assert kind('x') == 'red'\ny = 'tan'", "assert kind('x') == 'tan'"),
        ("assert f('c') == 'b'", "assert f('c') == 'c'"),
        ("assert flag('x') is True\nassert g() is None", "assert flag('x') is None"),
    ],
)
def test_a_twin_as_plausible_as_its_original_is_not_told_apart(body: str, twin: str) -> None:
    assert not is_told_apart(body, twin)


def test_a_form_that_the_file_uses_is_not_odd() -> None:
    rest = "def test_y():\n    assert g() != 3\n\n\n"

    assert not is_told_apart("assert f() == 3", "assert f() != 3", rest)

"""The host's coin, and the patch with the twins that it drew."""

from random import Random

import pytest

from perdure.errors import InstanceError
from perdure.graders.twins.patch_lines import added_lines, with_twins
from perdure.graders.twins.published_test_ids import named
from perdure.graders.twins.twin_draw import draw
from perdure.testing.grader_contract import FAIL_TO_PASS, TESTS, diff_of, tiny_instance
from perdure.types import Twin

ADD = Twin(
    tests=FAIL_TO_PASS[:1],
    path="tests/test_core.py",
    line=9,
    before=b"    assert add(1, 2) == 3",
    after=b"    assert add(1, 2) == 2",
    rule="literal",
)
NEGATIVE = Twin(
    tests=FAIL_TO_PASS[1:],
    path="tests/test_more.py",
    line=5,
    before=b"    assert calc.core.add(-1, -2) == -3",
    after=b"    assert calc.core.add(-1, -2) == -2",
    rule="literal",
)


def test_added_lines_are_numbered_in_the_new_file() -> None:
    found = added_lines(diff_of(TESTS))

    assert found["tests/test_more.py"] == frozenset(range(1, 6))
    assert 9 in found["tests/test_core.py"]
    assert 5 not in found["tests/test_core.py"]


def test_a_twin_replaces_one_line_and_no_digest_tells() -> None:
    """Only the line differs; neither patch has index lines, which would reveal the file's digest."""
    patch = diff_of(TESTS)

    real, twin = with_twins(patch, []), with_twins(patch, [ADD])

    changed = [
        pair
        for pair in zip(real.split(b"\n"), twin.split(b"\n"), strict=True)
        if pair[0] != pair[1]
    ]
    assert changed == [(b"+" + ADD.before, b"+" + ADD.after)]
    assert b"\nindex " not in real


def test_twins_of_another_test_patch_are_refused() -> None:
    with pytest.raises(InstanceError, match="calibrate"):
        with_twins(diff_of(TESTS), [ADD.model_copy(update={"before": b"x"})])


def test_each_original_is_in_one_run_of_a_pair_and_its_twin_in_the_other() -> None:
    instance = tiny_instance(twins=(ADD, NEGATIVE))
    seen = set()
    for seed in range(64):
        ((first, second),) = draw(instance, 1, Random(seed))
        assert first.twin_test_ids | second.twin_test_ids == set(FAIL_TO_PASS)
        assert not first.twin_test_ids & second.twin_test_ids
        assert not first.instance.grading.twins
        seen.add(first.twin_test_ids)

    assert len(seen) == 4  # both coins fall both ways, so the order of the runs says nothing


def test_an_instance_without_twins_has_no_pairs() -> None:
    assert draw(tiny_instance(), 3) == []


@pytest.mark.parametrize(
    ("test", "expected"),
    [
        ("a/test_b.py::C::test_d[x::y]", ("a/test_b.py", "C", "test_d")),
        ("test_b.py::test_d", ("test_b.py", "", "test_d")),
        ("test_d (a.tests.C)", ("a/tests.py", "C", "test_d")),
        ("test_d (a.tests.C.test_d)", ("a/tests.py", "C", "test_d")),
        ("sympy/a/test_b.py:test_d", ("sympy/a/test_b.py", "", "test_d")),
        ("test_d", ("", "", "test_d")),
    ],
)
def test_ids_of_every_runner_name_a_function(test: str, expected: tuple[str, str, str]) -> None:
    assert named(test) == expected

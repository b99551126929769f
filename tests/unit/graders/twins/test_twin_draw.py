"""The host's coin, and the patch with the twins that it drew."""

from collections import Counter, defaultdict
from itertools import permutations, product
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from perdure.errors import InstanceError
from perdure.graders.twins import draw_proof
from perdure.graders.twins.draw_proof import divided
from perdure.graders.twins.patch_lines import added_lines, with_twins
from perdure.graders.twins.published_test_ids import named
from perdure.graders.twins.twin_draw import draw
from perdure.testing.grader_contract import FAIL_TO_PASS, TESTS, diff_of, tiny_instance
from perdure.types import Twin, TwinDraw

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
DIVIDED = TwinDraw(runs=((ADD,), (NEGATIVE,)))
"""Each run has one twin."""
TOGETHER = TwinDraw(runs=((ADD, NEGATIVE),))


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


def test_one_run_has_originals_only_and_no_run_knows_which_it_is() -> None:
    instance = tiny_instance(twin_draws=(DIVIDED,))
    orders = set()
    for seed in range(64):
        runs = draw(instance, Random(seed))
        assert not any(run.instance.grading.twin_draws for run in runs)
        orders.add(tuple(run.twin_test_ids for run in runs))

    of_all_orders = {frozenset(order) for order in orders}
    assert of_all_orders == {
        frozenset({frozenset(), frozenset(ADD.tests), frozenset(NEGATIVE.tests)})
    }
    assert len(orders) == 6  # every order of three runs, so the order says nothing


@pytest.mark.parametrize("functions", [1, 2, 3])
async def test_the_texts_of_all_runs_do_not_tell_which_run_has_the_originals(
    monkeypatch: pytest.MonkeyPatch, functions: int
) -> None:
    """Code under test in one run may learn what the others see, and have learned all divisions of a
    row. For each way in which it can see the texts fall together, each run had the originals equally
    often."""
    twins = [ADD.model_copy(update={"line": number}) for number in range(functions)]

    async def run(*args: Any) -> Any:
        _, _, patch, drawn, _ = args
        return patch, drawn

    monkeypatch.setattr(draw_proof, "statuses_with", run)
    monkeypatch.setattr(draw_proof, "_any", lambda *_: False)
    monkeypatch.setattr(draw_proof, "is_proven", lambda *_: True)
    bench: Any = SimpleNamespace(gold=b"gold")
    draws = await draw_proof.proven_draws(bench, tiny_instance(), [[twin] for twin in twins], 5)
    originals: dict[object, Counter[int]] = defaultdict(Counter)
    for drawn in draws:
        with_twins = [frozenset(), *map(frozenset, drawn.runs)]
        for order in permutations(range(3)):
            runs = [with_twins[number] for number in order]
            seen = tuple(_together([twin in run for run in runs]) for twin in twins)
            originals[seen][order.index(0)] += 1

    assert len(draws) == 3
    assert originals
    assert all(found == Counter((0, 1, 2)) for found in map(_once, originals.values()))


def _once(found: Counter[int]) -> Counter[int]:
    """The counts, divided by the smallest one."""
    least = min(found.values())
    return Counter({number: count // least for number, count in found.items()})


def _together(texts: list[bool]) -> tuple[int, ...]:
    """Which of these texts are the same; which one is the original is not visible."""
    return tuple(texts.index(text) for text in texts)


def test_each_test_is_a_twin_in_some_run_of_a_division() -> None:
    for places in product(range(3), repeat=2):
        first, second = divided([ADD, NEGATIVE], places)
        assert {*first, *second} == {ADD, NEGATIVE}


def test_only_what_calibration_has_proven_together_is_drawn() -> None:
    """A twin that fails can change what later tests find."""
    other = ADD.model_copy(update={"after": b"    assert add(1, 2) == 4"})
    draws = (TOGETHER, TwinDraw(runs=((other,), (NEGATIVE,))))
    instance = tiny_instance(twin_draws=draws)
    seen = {frozenset(run.twins for run in draw(instance) if run.twins) for _ in range(64)}

    assert seen == {frozenset(one.runs) for one in draws}


def test_an_instance_without_twins_has_no_pair() -> None:
    assert draw(tiny_instance()) == []


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

"""Which twins are kept after a run in place of their tests."""

import pytest

from perdure.graders.twins.selection_in_place import Pool, _kept
from perdure.testing.grader_contract import tiny_instance
from perdure.types import TestStatus, Twin

P, F = TestStatus.PASSED, TestStatus.FAILED
ROW = tiny_instance(fail_to_pass=("adds", "sums", "calc"), pass_to_pass=("old",))


def twin(*, weak: bool = False) -> Twin:
    return Twin(
        tests=("adds",), path="t.js", line=1, before=b"3", after=b"4", rule="literal", weak=weak
    )


def kept(statuses: dict[str, TestStatus], passing: set[str] | None = None) -> list[tuple[str, ...]]:
    """The tests of the twins of `adds` that are kept after a run with these statuses."""
    pool = Pool(("adds",), [])
    shown = {"adds": F, "sums": P, "calc": P, "old": P} | statuses
    _kept(ROW, [(pool, twin())], shown, ("calc",), passing or set())
    return [one.tests for one in pool.kept]


def test_a_twin_that_only_its_test_fails_with_is_kept() -> None:
    assert kept({}) == [("adds",)]


def test_a_twin_also_has_the_ids_of_no_function_that_fail_with_it() -> None:
    """Such as the id of its describe block."""
    assert kept({"calc": F}) == [("adds", "calc")]


@pytest.mark.parametrize(
    "statuses",
    [
        {"adds": P},
        {"sums": F},
        {"old": F},
        dict.fromkeys(("adds", "sums", "old"), TestStatus.MISSING),
    ],
    ids=["it passes", "another test fails", "a test to keep fails", "nothing runs"],
)
def test_a_twin_that_passes_or_disturbs_is_not_kept(statuses: dict[str, TestStatus]) -> None:
    assert kept(statuses) == []


def test_a_test_fails_with_each_case_of_its_table() -> None:
    """Its own status says nothing about one of several twins."""
    row = tiny_instance(fail_to_pass=("adds", "adds/1", "adds/2"), pass_to_pass=())
    pools = [Pool((f"adds/{number}",), [], ("adds",)) for number in (1, 2)]
    tried = [(pool, twin()) for pool in pools]

    assert not _kept(row, tried, {"adds": F, "adds/1": F, "adds/2": P}, (), set())
    assert _kept(row, tried, {"adds": F, "adds/1": F, "adds/2": F}, (), set())
    assert [one.tests for pool in pools for one in pool.kept] == [
        ("adds/1", "adds"),
        ("adds/2", "adds"),
    ]


def test_a_twin_that_the_base_passes_is_not_kept() -> None:
    """The unfixed code would pass it, and an honest failure would look like a forgery."""
    assert kept({}, passing={"adds"}) == []


def test_weak_twins_are_tried_only_without_a_strong_one() -> None:
    pool = Pool(("adds",), [twin(), twin(weak=True)])
    first = pool.next(wanted=2)
    assert first is not None
    pool.kept.append(first)

    assert pool.next(wanted=2) is None
    assert Pool(("adds",), [twin(weak=True)]).next(wanted=2) is not None

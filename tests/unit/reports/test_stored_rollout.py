"""Finding a rollout by a short name, and reading its files."""

from pathlib import Path

import pytest

from perdure.errors import NotFound
from perdure.reports import stored_rollout
from perdure.reports.stored_rollout import RolloutName
from perdure.storage.local_store import LocalStore
from perdure.types import Grade, Outcome, Rewards, TestStatus


@pytest.fixture
async def store(tmp_path: Path) -> LocalStore:
    """Run r1 with two instances, and run r2 with two samples of one of them."""
    store = LocalStore(str(tmp_path))
    for name in ("r1/rollouts/click-8.1/0", "r1/rollouts/flask-2/0", "r2/rollouts/click-8.1/0",
                 "r2/rollouts/click-8.1/1"):  # fmt: skip
        await store.put(f"runs/{name}/attempts/1/sandbox.json", b"{}")
    return store


@pytest.mark.parametrize(
    "text", ["rollout/r1/flask-2/0", "r1/flask-2/0", "r1/flask-2", "r1/fla", "flask-2", "fla"]
)
async def test_any_unambiguous_name_finds_the_rollout(store: LocalStore, text: str) -> None:
    """A workflow id, a path with or without sample, and a unique prefix all find it."""
    assert await stored_rollout.find(store, text) == RolloutName("r1", "flask-2", 0)


async def test_ambiguous_name_lists_what_it_may_mean(store: LocalStore) -> None:
    """The error for a prefix of several rollouts lists them."""
    with pytest.raises(
        NotFound, match=r"'click' matches 3 rollouts: r1/click-8.1/0, r2/click-8.1/0"
    ):
        await stored_rollout.find(store, "click")


async def test_a_run_names_its_only_rollout(store: LocalStore) -> None:
    """A run's name finds its only rollout; if it has several, the error lists them."""
    await store.put("runs/r3/rollouts/jinja-3/0/episode.json", b"{}")

    assert await stored_rollout.find(store, "r3") == RolloutName("r3", "jinja-3", 0)
    with pytest.raises(NotFound, match=r"'r1' matches 2 rollouts: r1/click-8.1/0, r1/flask-2/0"):
        await stored_rollout.find(store, "r1")


async def test_wrong_instance_of_a_run_is_answered_with_its_rollouts(store: LocalStore) -> None:
    """If only the run exists, the error lists its rollouts."""
    with pytest.raises(NotFound, match=r"run r1 has r1/click-8.1/0, r1/flask-2/0"):
        await stored_rollout.find(store, "r1/django")


async def test_a_sample_that_is_not_there_is_answered_with_those_that_are(
    store: LocalStore,
) -> None:
    """The error names the samples of the instance."""
    with pytest.raises(NotFound, match=r"no rollout r2/click-8.1/7 .*: it has the samples 0, 1"):
        await stored_rollout.read(store, RolloutName("r2", "click-8.1", 7))


async def test_failing_tests_are_those_that_should_have_passed(store: LocalStore) -> None:
    """Failing, erroring and missing tests of both lists are listed; passing ones are not."""
    grade = Grade(
        outcome=Outcome.UNRESOLVED,
        rewards=Rewards(binary=0.0),
        fail_to_pass={"t::new": TestStatus.FAILED},
        pass_to_pass={"t::old": TestStatus.PASSED, "t::gone": TestStatus.MISSING},
    )
    key = "runs/r1/rollouts/flask-2/0/attempts/2/grade-abc.json"
    await store.put(key, grade.model_dump_json().encode())

    found = await stored_rollout.read(store, RolloutName("r1", "flask-2", 0))

    assert [one.number for one in found.attempts] == [1, 2]
    assert found.failing_tests() == ["FAILED t::new", "MISSING t::gone"]


async def test_files_of_lost_gradings_are_no_grades(store: LocalStore) -> None:
    """Files of a lost grading sandbox count as evidence and not as damage."""
    key = "runs/r1/rollouts/flask-2/0/attempts/1/grade-abc-lost-1.txt"
    await store.put(key, b"the grading sandbox was lost")

    found = await stored_rollout.read(store, RolloutName("r1", "flask-2", 0))

    assert (found.attempts[0].grade, key in found.attempts[0].evidence) == (None, True)
    assert [line for line in found.damaged if key in line] == []

"""The facts that a report reads from an episode."""

from pathlib import Path
from typing import Any, Literal

import pytest

from perdure.episodes.episode import (
    AttemptSummary,
    EarlierVerdict,
    EpisodeParts,
    ModelUsage,
    build_episode,
)
from perdure.episodes.episode_parquet import encode_segments
from perdure.episodes.episode_store import write_episode
from perdure.episodes.trajectory_segments import cut
from perdure.reports.rollout_facts import parse_facts, read_facts
from perdure.storage import store_keys
from perdure.storage.local_store import LocalStore
from perdure.types import (
    Grade,
    ModelScore,
    Outcome,
    Rewards,
    RolloutRequest,
    RolloutStatus,
    Turn,
    Usage,
    Verification,
)
from tests.unit.reports.made_runs import LOST

REQUEST = RolloutRequest(run_id="r", instance="toy/a", agent="nop", model="m")
UNRESOLVED = Grade(outcome=Outcome.UNRESOLVED, rewards=Rewards(binary=0.0), patch_sha256="p")
KEPT = AttemptSummary(attempt=1, provider="podman", evidence=("x/attempts/1/patch.json",))
GONE = AttemptSummary(attempt=1, provider="podman", evidence=("x/attempts/1/sandbox.json",))


def episode(**fields: Any) -> Any:
    values: dict[str, Any] = {
        "request": REQUEST,
        "status": RolloutStatus.GRADED,
        "started_at": 1.0,
        "finished_at": 9.0,
        "attempts": (KEPT,),
        "grade": UNRESOLVED,
    }
    parts = EpisodeParts(**{**values, **fields})
    return build_episode(parts, cut(parts.turns))


def facts(**fields: Any) -> Any:
    return parse_facts(episode(**fields).model_dump_json().encode())


def test_a_hosted_models_tokens_count() -> None:
    """The API's counts are in the episode and its report, although there are no ids."""
    usage = Usage(prompt_tokens=900, cached_tokens=500, sampled_tokens=40)
    turns = tuple(Turn(index=n, trainable=False, usage=usage) for n in range(2))
    made = episode(turns=turns)
    found = parse_facts(made.model_dump_json().encode())

    assert (made.prompt_tokens, made.sampled_tokens, made.trainable) == (1800, 80, False)
    assert made.trajectory.untrained_tokens == {"hosted": 80}
    assert (found.prompt_tokens, found.cached_tokens, found.sampled_tokens) == (1800, 1000, 80)
    assert found.turn_tokens == ((900, 40), (900, 40))


def test_a_judges_tokens_are_those_of_the_grade() -> None:
    """A reward model behind HTTP reports none."""
    judge = ModelScore(
        model="j", rewards={}, reward=1, calls=2, prompt_tokens=900, sampled_tokens=40
    )
    by_url = judge.model_copy(update={"prompt_tokens": 0, "sampled_tokens": 0})
    found = [
        facts(grade=UNRESOLVED.model_copy(update={"model_score": one})) for one in (judge, by_url)
    ]

    assert found[0].judged == (
        ModelUsage(model="j", turns=2, prompt_tokens=900, sampled_tokens=40),
    )
    assert found[1].judged == ()
    assert found[0].sampled_tokens == 0


FAILED = {"status": RolloutStatus.FAILED, "grade": None, "failure": LOST}
CANCELLED = {"status": RolloutStatus.CANCELLED, "grade": None}
LOST_GRADING = AttemptSummary(
    attempt=1,
    provider="podman",
    evidence=("x/attempts/1/patch.json", "x/attempts/1/grade-0-lost-1.txt"),
)


@pytest.mark.parametrize(
    ("fields", "booted", "lost"),
    [
        ({}, 2, 0),
        ({"attempts": (GONE, KEPT)}, 3, 1),
        ({"attempts": (LOST_GRADING,)}, 3, 1),
        ({**FAILED, "attempts": (GONE, GONE, GONE)}, 3, 3),
        ({**CANCELLED, "attempts": (GONE,)}, 1, 0),
        ({**FAILED, "attempts": (AttemptSummary(attempt=1),)}, 0, 0),
    ],
)
def test_lost_sandboxes_are_counted(fields: dict[str, Any], booted: int, lost: int) -> None:
    """Sandboxes of agents without a patch and of gradings, except canceled ones."""
    found = facts(**fields)

    assert (found.sandboxes, found.sandboxes_lost) == (booted, lost)


def test_a_cancelled_attempt_before_a_retry_is_not_lost() -> None:
    """A person canceled it; the retry succeeded."""
    earlier = EarlierVerdict(status=RolloutStatus.CANCELLED, attempt=1, finished_at=1.0, key="k")
    made = episode(attempts=(GONE, KEPT)).model_copy(update={"earlier": (earlier,)})
    found = parse_facts(made.model_dump_json().encode())

    assert (found.sandboxes, found.sandboxes_lost) == (3, 0)


@pytest.mark.parametrize(("attempt", "flaky"), [(1, True), (0, False)])
def test_a_verdict_that_changed_for_the_same_patch_is_flaky(attempt: int, flaky: bool) -> None:
    """A regrade with another outcome is flaky; a retry of the rollout is not."""
    earlier = EarlierVerdict(
        status=RolloutStatus.GRADED,
        outcome=Outcome.RESOLVED,
        attempt=attempt,
        finished_at=1.0,
        key="k",
    )
    made = episode().model_copy(update={"earlier": (earlier,)})

    assert parse_facts(made.model_dump_json().encode()).flaky is flaky


async def test_an_unreadable_episode_is_named(tmp_path: Path) -> None:
    """The others are reported."""
    store = LocalStore(tmp_path)
    made = episode()
    await write_episode(store, made, encode_segments(made, []))
    bad = f"{store_keys.rollout('r', 'b', 0)}/episode.json"
    await store.put(bad, b'{"instance": 3}')

    found = await read_facts(store, "r")

    assert ([one.name for one in found.rollouts], found.unreadable) == (["a/0"], (bad,))


@pytest.mark.parametrize("state", ["unverified", "weak"])
def test_a_success_that_no_strong_twin_checked_says_why(
    state: Literal["unverified", "weak"],
) -> None:
    """Only a success has a reason; a verified one has none."""
    why = Verification(state=state, reason="no test has a twin")
    grade = UNRESOLVED.model_copy(update={"outcome": Outcome.RESOLVED, "verification": why})
    verified = grade.model_copy(update={"verification": Verification(state="verified")})

    assert facts(grade=grade).unverified == "no test has a twin"
    assert facts(grade=verified).unverified is None
    assert facts().unverified is None


def test_facts_have_what_a_report_says_of_forgeries() -> None:
    """The state of the twins, the patch's signals, and the reason of a withheld reward."""
    exposed = Verification(state="exposed", reason="the twin of t passed")
    marked = {"verification": exposed, "signals": ("a.py: gc (objects)",), "withheld": "exposed"}
    found = facts(grade=UNRESOLVED.model_copy(update=marked))

    assert (found.exposed, found.signals, found.withheld) == (True, marked["signals"], "exposed")
    assert (facts().exposed, facts().signals, facts().withheld) == (False, (), "")

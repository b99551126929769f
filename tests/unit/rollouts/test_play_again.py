"""Rollouts that run or are graded again: which ones, and what happens to their episodes."""

import json
from pathlib import Path
from typing import Any

import pytest

from perdure.episodes.episode import AttemptSummary, Episode, EpisodeParts
from perdure.episodes.episode_store import read_run
from perdure.errors import Boundary, ConfigurationError, NotFound
from perdure.reports.rollout_facts import read_facts
from perdure.reports.token_prices import Prices
from perdure.rollouts import retry_selection, run_pages, run_record, stage_checkpoints
from perdure.rollouts.activity_messages import Ending
from perdure.rollouts.episode_stage import emit_episode
from perdure.rollouts.grade_stage import checkpoint
from perdure.rollouts.run_record import current_request
from perdure.rollouts.simulated_user.user_turn import UserCompletion, UserTurn
from perdure.storage import store_keys
from perdure.storage.local_store import LocalStore
from perdure.types import (
    NO_VERDICT,
    Budget,
    Failure,
    Grade,
    ModelScore,
    Outcome,
    PatchRef,
    PlayAgain,
    Price,
    Rewards,
    RolloutRequest,
    RolloutStatus,
    RunRequest,
    TokenCounts,
)
from tests.stored_episodes import store_episode

RUN = RunRequest(run_id="r", instances=("toy/a", "toy/b"), n_samples=2)
LOST = Failure(boundary=Boundary.SANDBOX, type="SandboxLost", message="gone")
STARTED, FINISHED = 1000.0, 1060.0


def grade_of(outcome: Outcome, seconds: float = 5.0) -> Grade:
    reward = 1.0 if outcome is Outcome.RESOLVED else 0.0
    return Grade(outcome=outcome, rewards=Rewards(binary=reward), seconds=seconds)


def request_of(instance: str, sample: int, **fields: Any) -> RolloutRequest:
    return RolloutRequest(run_id="r", instance=f"toy/{instance}", sample_index=sample, **fields)


async def left(
    store: LocalStore, request: RolloutRequest, outcome: Outcome | None, **fields: Any
) -> Episode:
    """The episode of a rollout with this outcome, or of a failed one."""
    values: dict[str, Any] = {
        "status": RolloutStatus.GRADED if outcome else RolloutStatus.FAILED,
        "grade": grade_of(outcome) if outcome else None,
        "failure": None if outcome else LOST,
        "workflow_run_id": "first-run",
    }
    parts = EpisodeParts(
        request=request,
        started_at=STARTED,
        finished_at=FINISHED,
        attempts=(AttemptSummary(attempt=1),),
        **values | fields,
    )
    return await store_episode(store, parts)


@pytest.fixture
async def store(tmp_path: Path) -> LocalStore:
    """A run of two instances: a#0 resolved, a#1 unresolved, b#0 failed, b#1 never started."""
    store = LocalStore(tmp_path / "store")
    await store.put(store_keys.run_instances("r"), b'["toy/a", "toy/b"]')
    await left(store, request_of("a", 0), Outcome.RESOLVED)
    await left(store, request_of("a", 1), Outcome.UNRESOLVED)
    await left(store, request_of("b", 0), None)
    return store


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        ({"outcomes": NO_VERDICT}, {"b/0": 0, "b/1": 0}),
        ({"outcomes": ("unresolved",)}, {"a/1": 3}),
        ({"include": ("a",)}, {"a/0": 3, "a/1": 3}),
        ({"include": ("*/1",)}, {"a/1": 3, "b/1": 0}),
        ({"start_at": "grade"}, {"a/0": 3, "a/1": 3}),
        ({"outcomes": ("timeout",)}, {}),
    ],
)
async def test_a_retry_plays_only_what_was_asked_for(
    store: LocalStore, asked: dict[str, Any], names: dict[str, int]
) -> None:
    """Rollouts are selected by outcome and by name. One with a verdict gets the new round, and
    another continues."""
    chosen = await retry_selection.select(store, RUN, PlayAgain(round=3, **asked))

    found = {f"{one.instance.removeprefix('toy/')}/{one.sample_index}": one.round for one in chosen}
    assert found == names


async def test_a_list_stays_as_it_was_first_written(store: LocalStore) -> None:
    """A second try of the listing returns the same rollouts, even if one has ended since."""
    wanted = PlayAgain(round=1, outcomes=NO_VERDICT)
    first = await retry_selection.listed(store, RUN, wanted)
    await left(store, request_of("b", 1), Outcome.RESOLVED)

    assert await retry_selection.listed(store, RUN, wanted) == first
    assert await retry_selection.next_round(store, "r") == 2


async def test_an_unknown_run_is_named(store: LocalStore) -> None:
    """The message says how to list the runs."""
    with pytest.raises(NotFound, match=r"no run 'nosuch' in .*: `perdure status` lists the runs"):
        await current_request(store, "nosuch")


async def captured(store: LocalStore, request: RolloutRequest, attempt: int = 1) -> PatchRef:
    """The attempt has a patch, and the workflow run `second-run` has graded it as resolved."""
    folder = store_keys.attempt(request, attempt)
    key = f"{folder}/patch.diff"
    patch = PatchRef(key=key, sha256="0" * 64, size=3, empty=False)
    await stage_checkpoints.write(store, f"{folder}/patch.json", patch)
    await stage_checkpoints.write(
        store, f"{folder}/{checkpoint('second-run')}", grade_of(Outcome.RESOLVED, 7.0)
    )
    return patch


def ending(request: RolloutRequest, status: RolloutStatus) -> Ending:
    return Ending(
        request=request,
        workflow_run_id="second-run",
        status=status,
        attempts=1,
        started_at=90_000.0,
        failure=LOST if status is RolloutStatus.FAILED else None,
    )


async def test_a_regraded_episode_keeps_its_times(store: LocalStore) -> None:
    """A day later the verdict is new, and start, end and seconds are those of the rollout."""
    request = request_of("a", 1, start_at="grade", round=1)
    patch = await captured(store, request)
    await left(store, request_of("a", 1), Outcome.UNRESOLVED, patch=patch, workflow_run_id="old")

    ref = await emit_episode(store, ending(request, RolloutStatus.GRADED))

    (episode,) = [e for e in await read_run(store, "r") if e.key.endswith("/a/1/episode.json")]
    assert (ref.outcome, ref.seconds) == (Outcome.RESOLVED, FINISHED - STARTED)
    assert (episode.started_at, episode.finished_at) == (STARTED, FINISHED)
    assert episode.stage_seconds["grade"] == 7.0
    assert (episode.regraded_at or 0.0) > FINISHED


async def test_the_replaced_episode_is_kept(store: LocalStore) -> None:
    """The new episode names the earlier verdict and the key of the earlier episode."""
    request = request_of("a", 1, start_at="grade", round=1)
    await captured(store, request)
    await emit_episode(store, ending(request, RolloutStatus.GRADED))

    (episode,) = [e for e in await read_run(store, "r") if e.key.endswith("/a/1/episode.json")]
    (earlier,) = episode.earlier
    assert earlier.outcome is Outcome.UNRESOLVED
    assert Episode.model_validate_json((await store.get(earlier.key)).data).outcome == "unresolved"


@pytest.mark.parametrize("status", [RolloutStatus.FAILED, RolloutStatus.CANCELLED])
async def test_a_regrading_without_a_verdict_leaves_the_earlier_one(
    store: LocalStore, status: RolloutStatus
) -> None:
    """Lost sandboxes and a cancelled regrade cost no verdict, and the workflow's result says how it
    ended."""
    ref = await emit_episode(store, ending(request_of("a", 1, start_at="grade", round=1), status))

    (episode,) = [e for e in await read_run(store, "r") if e.key.endswith("/a/1/episode.json")]
    assert (episode.outcome, ref.status, ref.outcome) == (Outcome.UNRESOLVED, status, None)


async def test_a_retry_that_fails_replaces_the_verdict(store: LocalStore) -> None:
    """The user asked to run this rollout again, so the episode says that it failed."""
    await emit_episode(store, ending(request_of("a", 1, round=1), RolloutStatus.FAILED))

    (episode,) = [e for e in await read_run(store, "r") if e.key.endswith("/a/1/episode.json")]
    assert (episode.status, episode.earlier[0].outcome) == (RolloutStatus.FAILED, "unresolved")


async def test_an_ungraded_rollout_stays_so_until_a_grading_succeeds(store: LocalStore) -> None:
    """Grading selects exactly the ungraded rollouts, so that it can be repeated after a failure."""
    await left(store, request_of("b", 1), None, status=RolloutStatus.UNGRADED, failure=None)
    wanted = PlayAgain(round=1, start_at="grade", outcomes=("ungraded",))
    request = request_of("b", 1, start_at="grade", grading="later")
    await captured(store, request)
    ref = await emit_episode(store, ending(request, RolloutStatus.FAILED))
    chosen = await retry_selection.select(store, RUN, wanted)
    await emit_episode(store, ending(request, RolloutStatus.GRADED))

    assert (ref.status, ref.failure) == (RolloutStatus.FAILED, LOST)
    assert [(one.instance, one.sample_index) for one in chosen] == [("toy/b", 1)]
    assert await retry_selection.select(store, RUN, wanted) == []


async def test_the_manifest_names_what_the_deadline_left(store: LocalStore) -> None:
    """A truncated rollout with its cause, one that is still open by its checkpoints, and one that has
    not started. Failed ones have ended."""
    await store.put(
        store_keys.run("r"), json.dumps({"request": RUN.model_dump(mode="json")}).encode()
    )
    stopped = Failure(boundary=Boundary.RUN, type="Truncated", message="stopped after 3 turns")
    cut = ending(request_of("a", 0), RolloutStatus.TRUNCATED)
    await store.delete_many([store_keys.episode(cut.request)])
    await emit_episode(store, cut.model_copy(update={"failure": stopped, "stopped_in": "agent"}))
    more = RUN.model_copy(update={"n_samples": 3, "stopped": "its deadline has passed"})
    await run_record.record(store, more)
    for name in ("sandbox.json", "agent.json"):
        await store.put(f"{store_keys.attempt(request_of('b', 1), 2)}/{name}", b"{}")
    await left(store, request_of("a", 2), Outcome.RESOLVED)
    summary = await run_pages.finish_run(store, more)

    manifest = json.loads((await store.get(store_keys.manifest("r"))).data)
    assert summary.stopped == manifest["stopped"] == "its deadline has passed"
    assert [tuple(row.values()) for row in manifest["unfinished"]] == [
        ("toy/a", 0, "agent", "stopped after 3 turns"),
        ("toy/b", 1, "capture", run_pages.STILL_OPEN),
        ("toy/b", 2, "", "not started: its deadline has passed"),
    ]


async def test_a_truncated_rollout_has_its_grade_for_information(store: LocalStore) -> None:
    """A later start that ends before a new attempt leaves its episode, and a verdict replaces it."""
    request = request_of("b", 1)
    await captured(store, request)
    cut = ending(request, RolloutStatus.TRUNCATED).model_copy(
        update={"grade": checkpoint("second-run"), "failure": LOST, "stopped_in": "agent"}
    )
    ref = await emit_episode(store, cut)
    (first,) = [e for e in await read_run(store, "r") if e.key.endswith("/b/1/episode.json")]
    early = cut.model_copy(update={"attempts": 0, "workflow_run_id": "third-run", "grade": ""})
    await emit_episode(store, early)
    (kept,) = [e for e in await read_run(store, "r") if e.key.endswith("/b/1/episode.json")]

    assert (ref.status, ref.outcome, ref.reward) == (RolloutStatus.TRUNCATED, None, None)
    assert first.grade is not None
    assert first.grade.outcome is Outcome.RESOLVED
    assert (first.grade.reward, first.withheld, first.stopped_in) == (None, "gone", "agent")
    assert kept == first


JUDGED = ModelScore(
    model="judge-2026", asked_model="judge", rewards={}, reward=1, calls=2, prompt_tokens=900,
    cached_tokens=400, sampled_tokens=40,
)  # fmt: skip
"""As a hosted API answers that calls the model `judge` by its own name."""


async def test_judges_and_users_count_toward_the_budget(store: LocalStore) -> None:
    """Also those of a grading without a verdict. A question that two attempts share counts once, and a
    reward model behind HTTP has no tokens."""
    request = request_of("b", 1)
    folders = [store_keys.attempt(request, number) for number in (1, 2)]
    made = UserCompletion(
        id="c1", model="user", asked_model="user", prompt_tokens=70, cached_tokens=0,
        sampled_tokens=7,
    )  # fmt: skip
    turn = UserTurn(turn=1, said="Done.", message="Go on.", completion=made)
    for folder in folders:
        await stage_checkpoints.write(store, f"{folder}/user-1.json", turn)
        await stage_checkpoints.write(store, f"{folder}/reward-model-grade-x.json", JUDGED)
    by_url = ModelScore(model="http://a/score", rewards={}, reward=1)
    await stage_checkpoints.write(store, f"{folders[0]}/reward-model-grade-y.json", by_url)
    failed = ending(request, RolloutStatus.FAILED).model_copy(update={"attempts": 2})
    ref = await emit_episode(store, failed)
    (facts,) = [one for one in (await read_facts(store, "r")).rollouts if one.name == "b/1"]
    prices = Prices({"judge": Price(input=1000, cached=500, output=10_000)})

    assert ref.other_tokens == {
        "judge": TokenCounts(prompt_tokens=1800, cached_tokens=800, sampled_tokens=80),
        "user": TokenCounts(prompt_tokens=70, sampled_tokens=7),
    }
    assert facts.spent_tokens == 1800 + 80 + 70 + 7
    assert prices.costs([facts]) == [pytest.approx(1.0 + 0.4 + 0.8)]
    assert prices.missing([facts]) == ["user"]


async def test_a_run_says_that_its_judges_used_the_budget(store: LocalStore) -> None:
    """Two rollouts of eight have ended. Their agents called no model."""
    await store.put(store_keys.run("r"), json.dumps({"request": _judged(5.0)}).encode())
    for sample in (2, 3):
        request = request_of("a", sample)
        score = f"{store_keys.attempt(request, 1)}/reward-model-grade-x.json"
        await stage_checkpoints.write(store, score, JUDGED)
        await emit_episode(store, ending(request, RolloutStatus.FAILED))
    run = RunRequest.model_validate(_judged(5.0))

    assert (await run_pages.finish_run(store, run)).stopped == ("it has used 5.40 of 5.00 dollars")


def _judged(dollars: float) -> dict[str, Any]:
    price = {"input": 3000, "cached": 0, "output": 30_000}
    budget = {"dollars": dollars, "price": price, "other_prices": {"judge": price}}
    return {**RUN.model_dump(mode="json"), "n_samples": 4, "budget": budget}


def test_a_limit_in_dollars_needs_the_price_of_each_model() -> None:
    """By the names that the request gives its judge and its user."""
    rollout = {
        "reward_model": {"model": "judge", "criteria": [{"name": "a", "description": "b"}]},
        "user": {"model": "user", "instruction": "Be kind."},
    }
    budget = {"dollars": 5, "price": {"input": 1, "output": 1}}
    asked = RUN.model_copy(update={"rollout": rollout, "budget": Budget.model_validate(budget)})
    cheap = {**budget, "other_prices": {"[ju]*": {"input": 1, "output": 1}}}
    with pytest.raises(ConfigurationError, match="the price of judge and user: add it to the file"):
        asked.check_prices()

    asked.model_copy(update={"budget": Budget.model_validate(cheap)}).check_prices()
    asked.model_copy(update={"budget": Budget(tokens=5)}).check_prices()

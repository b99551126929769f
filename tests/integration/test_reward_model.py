"""A reward model in the grade stage: beside the tests and instead of them, asked once, behind a real
gateway and engine."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from activities.rollout_activities import Stages
from perdure.cli.commands.show import show
from perdure.rollouts.activity_messages import Attempt, GradedPatch
from perdure.rollouts.reward_model import model_judge
from perdure.rollouts.stage_services import Services
from perdure.settings.settings_tree import Settings
from perdure.storage import store_keys, stored_json
from perdure.testing.local_gateway import LocalGateway
from perdure.testing.local_server import served
from perdure.testing.scripted_engine import ScriptedEngine
from perdure.types import Grade, Grading, Outcome, PatchRef, RolloutRequest
from tests.integration.one_row import ROW, save_row

PATCH = b"diff --git a/a.txt b/a.txt\n--- a/a.txt\n+++ b/a.txt\n@@ -1 +1 @@\n-one\n+two\n"
CRITERIA = [
    {"name": "minimal", "description": "Changes only what is needed"},
    {"name": "tested", "description": "Adds a test"},
]
JUDGE: dict[str, Any] = {"model": "policy", "criteria": CRITERIA}
SCORES = '{"reason": "Short.", "scores": {"minimal": 1, "tested": 0.5}}'


class Home:
    """A home whose row has tests that count their runs, and a captured patch that they accept."""

    def __init__(self, folder: Path, gateway: LocalGateway, engine: ScriptedEngine) -> None:
        self.engine = engine
        self.gateway = gateway
        self._folder = folder
        self._runs = folder / "runs"
        self.services = Services(
            Settings(
                home=folder / "home",
                sandbox={"allow_local": True},
                engine={"url": engine.url, "kind": "vllm"},
                gateway={"url": gateway.url},
            )
        )

    async def prepare(self) -> None:
        tests = f"echo ran >>{self._runs}; grep two a.txt"
        grading = Grading(protocol="eval_cmd", eval_cmd=tests)
        await save_row(self.services, self._folder / "tree", grading=grading)

    async def attempt(self, patch: bytes = PATCH, **reward_model: Any) -> Attempt:
        request = RolloutRequest.model_validate(
            {
                "run_id": "r",
                "instance": ROW,
                "agent": "oracle",
                "sandbox": "local",
                "reward_model": reward_model,
            }
        )
        folder = store_keys.attempt(request, 1)
        await self.services.store.put(f"{folder}/patch.diff", patch)
        ref = PatchRef(
            key=f"{folder}/patch.diff",
            sha256=hashlib.sha256(patch).hexdigest(),
            size=len(patch),
            empty=not patch,
            files=1,
        )
        await self.services.store.put(f"{folder}/patch.json", stored_json.encode(ref))
        return Attempt(request=request, attempt=1)

    async def graded(self, attempt: Attempt) -> GradedPatch:
        return await ActivityEnvironment().run(Stages(self.services).grade, attempt)

    async def grade(self, attempt: Attempt) -> Grade:
        graded = await self.graded(attempt)
        key = f"{store_keys.attempt(attempt.request, 1)}/{graded.stored_as}"
        return stored_json.decode(key, (await self.services.store.get(key)).data, Grade)

    async def files(self, attempt: Attempt) -> list[str]:
        folder = store_keys.attempt(attempt.request, 1)
        return [key.removeprefix(f"{folder}/") async for key in self.services.store.list(folder)]

    @property
    def test_runs(self) -> int:
        return len(self._runs.read_text().splitlines()) if self._runs.exists() else 0


def script(*answers: str) -> dict[str, Any]:
    return {"default": {"turns": [{"content": answer} for answer in answers]}}


@pytest.fixture
async def home(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Home]:
    """Its engine gives the answers of the parameter."""
    answers = getattr(request, "param", (SCORES,))
    async with (
        ScriptedEngine(script(*answers)) as engine,
        LocalGateway(tmp_path / "home", engine={"url": engine.url, "kind": "vllm"}) as gateway,
    ):
        found = Home(tmp_path, gateway, engine)
        await found.prepare()
        yield found
        await found.services.gateway.aclose()


async def test_a_judge_scores_beside_the_tests(home: Home) -> None:
    """Its scores are named rewards, and the tests decide the reward. Tokens and turns are recorded."""
    attempt = await home.attempt(**JUDGE)
    grade = await home.grade(attempt)

    assert (grade.outcome, grade.reward) == (Outcome.RESOLVED, 1.0)
    assert grade.named_rewards == {"judge": 0.75, "judge.minimal": 1.0, "judge.tested": 0.5}
    score = grade.model_score
    assert score is not None
    assert (score.answer, score.calls) == (SCORES, 1)
    assert score.sampled_tokens == len(home.engine.calls[0].completion_ids)
    assert score.prompt_tokens == len(home.engine.calls[0].prompt_ids)
    assert any(name.startswith("judge-") for name in await home.files(attempt))


async def test_a_judge_instead_of_tests(home: Home) -> None:
    grade = await home.grade(await home.attempt(**JUDGE, replaces_tests=True))

    assert (grade.outcome, grade.reward) == (Outcome.UNRESOLVED, 0.75)
    assert home.test_runs == 0


async def test_an_empty_patch_is_not_sent(home: Home) -> None:
    grade = await home.grade(await home.attempt(b"", **JUDGE, replaces_tests=True))

    assert (grade.outcome, grade.reward) == (Outcome.EMPTY_PATCH, 0.0)
    assert not home.engine.calls


async def test_a_second_try_buys_no_second_answer(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither if the first died before it stored the scores, nor after it."""
    attempt = await home.attempt(**JUDGE)
    monkeypatch.setattr(model_judge, "read_scores", _dies)
    with pytest.raises(ApplicationError):
        await home.graded(attempt)
    monkeypatch.undo()
    first = await home.grade(attempt)
    await home.services.store.delete(f"{store_keys.attempt(attempt.request, 1)}/grade-0.json")

    assert await home.grade(attempt) == first
    assert home.engine.stats().calls == 1
    assert home.test_runs == 1


def _dies(*_: object) -> None:
    raise OSError("the worker dies here")


@pytest.mark.parametrize("home", [("8 of 10", SCORES)], indirect=True)
async def test_an_unusable_answer_is_asked_again(home: Home) -> None:
    """The judge sees why, and the tokens of both answers count."""
    score = (await home.grade(await home.attempt(**JUDGE))).model_score

    assert score is not None
    assert (score.calls, score.reward) == (2, 0.75)
    assert score.sampled_tokens == sum(len(call.completion_ids) for call in home.engine.calls)


@pytest.mark.parametrize("home", [("8 of 10",)], indirect=True)
async def test_a_judge_without_a_usable_answer_leaves_no_verdict(home: Home) -> None:
    attempt = await home.attempt(**JUDGE)
    with pytest.raises(ApplicationError, match="3 unusable answers") as failed:
        await home.graded(attempt)

    assert failed.value.non_retryable
    assert failed.value.details[0] == "grader"
    assert not [name for name in await home.files(attempt) if name.startswith("grade-")]


async def test_an_engine_that_is_away_is_retried_without_the_tests(home: Home) -> None:
    attempt = await home.attempt(**JUDGE, timeout_s=0.5)
    home.engine.control(latency_s=30)
    with pytest.raises(ApplicationError, match=r"gave no answer in 0\.5 s") as failed:
        await home.graded(attempt)
    home.engine.reset(latency_s=0)
    again = await home.attempt(**JUDGE)

    assert not failed.value.non_retryable
    assert (await home.grade(again)).named_rewards["judge"] == 0.75
    assert home.test_runs == 1


async def test_a_reward_model_behind_http_sees_the_tests_verdict(home: Home) -> None:
    asked: list[Any] = []

    async def answer(request: Request) -> Response:
        asked.append(json.loads(await request.body()))
        return Response('{"reward": 0.5, "style": 0.2}')

    async with served(Starlette(routes=[Route("/", answer, methods=["POST"])])) as url:
        grade = await home.grade(await home.attempt(url=url))

    assert (asked[0]["outcome"], asked[0]["reward"]) == ("resolved", 1.0)
    assert (grade.reward, grade.named_rewards) == (
        1.0,
        {"reward_model": 0.5, "reward_model.style": 0.2},
    )


@pytest.mark.parametrize("home", [(f"{SCORES}\a",)], indirect=True)
async def test_show_prints_score_tokens_and_answer(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A patch can make a judge say anything, also what would control the terminal."""
    await home.graded(await home.attempt(**JUDGE))
    monkeypatch.setenv("PERDURE_HOME", str(home.services.settings.home))
    shown = await asyncio.to_thread(CliRunner().invoke, show, ["r/add-1/0"])

    sampled = len(home.engine.calls[0].completion_ids)
    assert "scores 0.75 in " in shown.output, shown.output
    assert f"1 call, {len(home.engine.calls[0].prompt_ids):,} prompt tokens" in shown.output
    assert f"{sampled} sampled: {SCORES}" in shown.output
    assert "\a" not in shown.output


async def test_a_judge_that_no_engine_has_is_refused_before_a_sandbox_boots(home: Home) -> None:
    attempt = await home.attempt(**{**JUDGE, "model": "absent"})
    with pytest.raises(ApplicationError, match="absent") as refused:
        await ActivityEnvironment().run(Stages(home.services).boot, attempt)

    assert refused.value.type == "ConfigurationError"
    assert "sandbox.json" not in await home.files(attempt)


async def test_the_journal_forgets_a_judge_whose_scores_are_stored(home: Home) -> None:
    attempt = await home.attempt(**JUDGE)
    await home.graded(attempt)

    assert not [key async for key in home.gateway.store.list(store_keys.JOURNAL) if "judge" in key]

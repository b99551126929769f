"""A model plays the user of an `acp` rollout, in a whole stack whose parts die between the turns."""

import math
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from perdure.gateway.base import control_token
from perdure.gateway.rendering.tokenizers import load_tokenizer
from perdure.home_folder import load_secret
from perdure.types import Outcome, RolloutRequest
from tests.agents import tiny_acp_server
from tests.stack.account_commands import AccountCommands
from tests.stack.gated_engine import FIX, HeldEngine
from tests.stack.host_requirements import why_not_here
from tests.stack.quota_engine import QuotaEngine
from tests.stack.running_stack import Stack, running
from tests.stack.wait_until import until

pytestmark = [pytest.mark.temporal, pytest.mark.registry]

COMMAND = ["python3", "-c", Path(tiny_acp_server.__file__).read_text()]
SECRET = "the-user-wants-add-to-add"
WISH = "It must add."
ANSWERS = [WISH, "Thanks. ###STOP###"]
POLICY = {"default": {"turns": [{"content": "RUN echo looked"}, {"content": f"RUN {FIX}"}]}}
USER_SCRIPT = {"turns": [{"content": said} for said in ("the task", *ANSWERS)]}
"""The user has sent the task already."""
USER = {"model": "user", "instruction": f"You know {SECRET}.", "grade_turns": True}


@asynccontextmanager
async def with_user(folder: Path) -> AsyncIterator[tuple[Stack, HeldEngine]]:
    """A stack in which a second model, `user`, plays the user."""
    if missing := why_not_here():
        pytest.skip(missing)
    async with running(folder) as stack, HeldEngine() as user:
        stack.engine.control(scripts=POLICY)
        user.control(scripts={"default": USER_SCRIPT})
        token = {"authorization": f"Bearer {control_token(load_secret(stack.settings))}"}
        engine = {"url": user.url, "model": "user", "tokenizer": "qwen3"}
        async with httpx.AsyncClient(base_url=stack.settings.gateway_base_url) as gateway:
            added = await gateway.post("/engines", json=engine, headers=token)
            assert added.is_success, added.text
        user.calls.clear()
        yield stack, user


async def start(stack: Stack, run_id: str, **fields: Any) -> RolloutRequest:
    options = {"command": COMMAND}
    return await stack.start(run_id, agent="acp", agent_options=options, user=USER, **fields)


async def assert_played(
    stack: Stack, user: HeldEngine, request: RolloutRequest, attempt: int = 1, lost_calls: int = 0
) -> None:
    """The user was asked once for each answer, the agent got the same ones, and each turn is graded.

    `lost_calls`: calls of the user's model whose gateway died.
    """
    episode = await stack.episode(request)
    sampled = [call for call in user.calls if call.session_id.startswith("p-")]
    prompts = load_tokenizer("qwen3").decode(stack.engine.calls[-1].prompt_ids)

    assert episode.outcome is Outcome.RESOLVED, (episode, stack.last_words())
    assert (episode.turns, len(episode.attempts)) == (2, attempt)
    assert episode.named_rewards == {"turn-1": 0.0, "turn-2": 1.0}
    assert [one.outcome for one in episode.grade.turn_grades] == ["empty_patch", "resolved"]  # type: ignore[union-attr]
    assert len(sampled) == len(ANSWERS) + lost_calls
    answers = {tuple(call.prompt_ids): len(call.completion_ids) for call in sampled}
    assert [(one.model, one.turns, one.sampled_tokens) for one in episode.user_usage] == [
        ("user", len(ANSWERS), sum(answers.values()))
    ]
    assert episode.other_tokens["user"].sampled_tokens == sum(answers.values())
    assert WISH in prompts
    assert SECRET not in prompts
    assert episode.trained_tokens == episode.sampled_tokens
    assert "user-0.parquet" in await stack.files(request)
    await stack.nothing_left()


@pytest.mark.longer
@pytest.mark.parametrize("when", ["before", "after"])
async def test_the_worker_dies_when_the_user_has_answered(tmp_path: Path, when: str) -> None:
    """If it dies before it stores or sends the answer, another worker sends the same one."""
    async with with_user(tmp_path / "stack") as (stack, user):
        await stack.workers[0].kill(signal.SIGTERM)
        dying = await stack.start_worker("tests.dying_worker", when, "*/user-1.json")
        request = await start(stack, when)
        assert await dying.ended() == -signal.SIGKILL
        await stack.start_worker()

        await assert_played(stack, user, request)


@pytest.mark.longer
async def test_the_sandbox_dies_after_the_user_has_answered(tmp_path: Path) -> None:
    """The next attempt gets the recorded turns of the agent and of the user."""
    async with with_user(tmp_path / "stack") as (stack, user):
        stack.engine.hold(1)
        request = await start(stack, "lost-box")
        await stack.held(request)
        await stack.lose(request, "agent")
        await until(lambda: stack.box(request, "agent", 2).alive, "the next attempt has a sandbox")
        stack.engine.let_go()

        await assert_played(stack, user, request, attempt=2)


@pytest.mark.longer
async def test_the_gateway_dies_while_the_user_answers(tmp_path: Path) -> None:
    """The agent waits, so it loses nothing. The user's model is asked again."""
    async with with_user(tmp_path / "stack") as (stack, user):
        user.hold(1)
        request = await start(stack, "lost-answer")
        await until(lambda: bool(user.waiting), "the user is asked about the first turn")
        await stack.gateway.kill()
        await stack.recover()
        user.let_go()

        await assert_played(stack, user, request, lost_calls=1)


@pytest.mark.longer
async def test_the_gateway_dies_between_two_turns_of_the_user(tmp_path: Path) -> None:
    """It dies during the agent's next call. Another attempt gets the recorded turns of both."""
    async with with_user(tmp_path / "stack") as (stack, user):
        stack.engine.hold(1)
        request = await start(stack, "lost-gateway")
        await stack.held(request)
        await stack.gateway.kill()
        await stack.recover()
        stack.engine.let_go()

        await assert_played(stack, user, request, attempt=2)


async def test_a_rollout_waits_without_a_sandbox_for_its_users_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The account refuses the user's first answer. Once it is open, another attempt replays the agent's
    turn, and no call is bought twice."""
    if missing := why_not_here():
        pytest.skip(missing)
    engine = QuotaEngine()
    async with running(tmp_path / "stack", hosted=engine) as stack:
        asked = {"match": "You play a user", **USER_SCRIPT}
        engine.control(scripts={"scripts": [asked], **POLICY})
        engine.quota, engine.resets_at = 1, time.time() + 3600
        played = {**USER, "model": "policy"}
        options = {"command": COMMAND}
        request = await stack.start(
            "quota", agent="acp", agent_options=options, user=played, max_attempts=1
        )

        async def is_parked() -> bool:
            return bool((await stack.handle(request).query("state"))["stage"] == "parked")

        await until(is_parked, "the rollout is parked")
        await stack.nothing_left()
        engine.quota = math.inf
        await AccountCommands(stack, monkeypatch, capsys).run("open")
        episode = await stack.episode(request)

    assert episode.outcome is Outcome.RESOLVED, (episode, stack.last_words())
    assert (episode.turns, len(episode.attempts)) == (2, 2)
    assert engine.sold.total() == episode.turns + len(ANSWERS)

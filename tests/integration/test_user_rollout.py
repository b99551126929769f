"""A model plays the user of an `acp` rollout, in a whole stack whose parts die between the turns."""

import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from perdure.gateway.base import control_token
from perdure.gateway.rendering.tokenizers import load_tokenizer
from perdure.home_folder import load_secret
from perdure.testing.scripted_engine import ScriptedEngine
from perdure.types import Outcome, RolloutRequest
from tests.agents import tiny_acp_server
from tests.stack.gated_engine import FIX
from tests.stack.host_requirements import why_not_here
from tests.stack.running_stack import Stack, running
from tests.stack.wait_until import until

pytestmark = [pytest.mark.temporal, pytest.mark.registry]

COMMAND = ["python3", "-c", Path(tiny_acp_server.__file__).read_text()]
SECRET = "the-user-wants-add-to-add"
WISH = "It must add."
ANSWERS = [WISH, "Thanks. ###STOP###"]
POLICY = {"default": {"turns": [{"content": "RUN echo looked"}, {"content": f"RUN {FIX}"}]}}
USER = {"model": "user", "instruction": f"You know {SECRET}.", "grade_turns": True}


@asynccontextmanager
async def with_user(folder: Path) -> AsyncIterator[tuple[Stack, ScriptedEngine]]:
    """A stack in which a second model, `user`, plays the user."""
    if missing := why_not_here():
        pytest.skip(missing)
    turns = [{"content": answer} for answer in ("the task", *ANSWERS)]  # the user has sent the task
    scripts = {"default": {"turns": turns}}
    async with running(folder) as stack, ScriptedEngine(scripts) as user:
        stack.engine.control(scripts=POLICY)
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
    stack: Stack, user: ScriptedEngine, request: RolloutRequest, attempt: int = 1
) -> None:
    """The user was asked once for each answer, the agent got the same ones, and each turn is graded."""
    episode = await stack.episode(request)
    sampled = [call for call in user.calls if call.session_id.startswith("p-")]
    prompts = load_tokenizer("qwen3").decode(stack.engine.calls[-1].prompt_ids)

    assert episode.outcome is Outcome.RESOLVED, (episode, stack.last_words())
    assert (episode.turns, len(episode.attempts)) == (2, attempt)
    assert episode.named_rewards == {"turn-1": 0.0, "turn-2": 1.0}
    assert [one.outcome for one in episode.grade.turn_grades] == ["empty_patch", "resolved"]  # type: ignore[union-attr]
    assert len(sampled) == len(ANSWERS)
    assert [(one.model, one.turns, one.sampled_tokens) for one in episode.user_usage] == [
        ("user", len(ANSWERS), sum(len(call.completion_ids) for call in sampled))
    ]
    assert WISH in prompts
    assert SECRET not in prompts
    assert episode.trained_tokens == episode.sampled_tokens
    assert "user-0.parquet" in await stack.files(request)
    await stack.nothing_left()


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

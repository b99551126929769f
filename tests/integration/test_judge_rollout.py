"""A rubric judge in a whole stack: a second model behind the gateway scores a rollout."""

from pathlib import Path

import httpx
import pytest

from perdure.gateway.base import control_token
from perdure.home_folder import load_secret
from perdure.testing.scripted_engine import ScriptedEngine
from tests.stack.host_requirements import why_not_here
from tests.stack.running_stack import running

pytestmark = pytest.mark.temporal

CRITERIA = [{"name": "minimal", "description": "Changes only what is needed"}]
SCORES = '{"reason": "Short.", "scores": {"minimal": 0.75}}'


@pytest.mark.longer
async def test_a_second_model_judges_what_the_tests_graded(tmp_path: Path) -> None:
    """Both verdicts are in the episode, with the judge's answer and its tokens."""
    if missing := why_not_here():
        pytest.skip(missing)
    policy = {"default": {"turns": [{"content": SCORES}]}}
    async with running(tmp_path / "stack") as stack, ScriptedEngine(policy) as judge:
        token = {"authorization": f"Bearer {control_token(load_secret(stack.settings))}"}
        engine = {"url": judge.url, "model": "judge", "tokenizer": "qwen3"}
        async with httpx.AsyncClient(base_url=stack.settings.gateway_base_url) as gateway:
            added = await gateway.post("/engines", json=engine, headers=token)
            assert added.is_success, added.text
        reward_model = {"model": "judge", "criteria": CRITERIA}
        request = await stack.start("judged", reward_model=reward_model)
        episode = await stack.episode(request)
        calls = list(judge.calls)

    assert (episode.reward, episode.named_rewards) == (1.0, {"judge": 0.75, "judge.minimal": 0.75})
    assert episode.grade is not None
    score = episode.grade.model_score
    assert score is not None
    assert (score.answer, score.sampled_tokens) == (SCORES, len(calls[-1].completion_ids))

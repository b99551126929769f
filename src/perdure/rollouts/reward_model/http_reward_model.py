"""A reward model behind HTTP. It answers a number, or an object of named numbers like `reward.json`."""

import base64
import time
from typing import Any
from urllib.parse import urlsplit

from perdure.errors import Boundary, ConfigurationError, RetryHere
from perdure.graders.named_rewards import MAIN, main_reward, parse_named_rewards
from perdure.rollouts.reward_model.bounded_post import check_status, parse_object, post_json
from perdure.rollouts.reward_model.scored_work import Work
from perdure.settings import process_environment
from perdure.settings.settings_tree import GradingSettings
from perdure.types import ModelScore, RewardModel

ANSWER_CHARS = 8000
HOSTS = "PERDURE_GRADING__REWARD_MODEL_HOSTS"
KEY = "PERDURE_GRADING__REWARD_MODEL_KEY_ENV"


def check_address(model: RewardModel, settings: GradingSettings) -> None:
    """Raises: ConfigurationError if the settings do not allow its host, or lack its key."""
    allowed = settings.reward_model_hosts.lower().replace(",", " ").split()
    if allowed and model.host not in allowed:
        raise ConfigurationError(
            f"reward_model.url: workers may not call {model.host}: add it to {HOSTS}"
        )
    if settings.reward_model_key_env and not allowed:
        raise ConfigurationError(f"{KEY} is set: name the hosts that may get the key in {HOSTS}")
    if settings.reward_model_key_env and not _key(settings):
        raise ConfigurationError(f"{KEY} names {settings.reward_model_key_env}, which is not set")


async def score(work: Work, model: RewardModel, settings: GradingSettings) -> ModelScore:
    """Raises: RetryHere; ConfigurationError; RewardModelRefused."""
    check_address(model, settings)
    key, started = _key(settings), time.monotonic()
    headers = {"authorization": f"Bearer {key}"} if key else {}
    answer = await post_json(model.url, _question(work), headers=headers, timeout_s=model.timeout_s)
    who = f"the reward model at {urlsplit(model.url).netloc}"
    check_status(answer, who)
    found = parse_object(answer.body, who)
    try:
        named = parse_named_rewards(found if isinstance(found, dict) else {MAIN: found})
        reward = main_reward(named)
        if not 0 <= reward <= 1:
            raise ValueError(f"the reward {reward:g} is not from 0 to 1")
        parts = {f"{model.kind}.{name}": one for name, one in named.items() if name != MAIN}
        rewards = parse_named_rewards({model.kind: reward, **parts})
    except ValueError as error:
        raise RetryHere(f"{who} gave no reward: {error}", boundary=Boundary.GRADER) from error
    return ModelScore(
        model=model.url,
        rewards=rewards,
        reward=reward,
        answer=answer.body.decode("utf-8", "replace")[:ANSWER_CHARS],
        seconds=round(time.monotonic() - started, 3),
    )


def _question(work: Work) -> dict[str, Any]:
    return {
        "instance_id": work.instance_id,
        "problem_statement": work.problem,
        "patch_base64": base64.b64encode(work.patch).decode(),
        "last_message": work.last_message,
        "outcome": work.tests.outcome.value if work.tests else None,
        "reward": work.tests.rewards.binary if work.tests else None,
    }


def _key(settings: GradingSettings) -> str:
    return process_environment.named(settings.reward_model_key_env)

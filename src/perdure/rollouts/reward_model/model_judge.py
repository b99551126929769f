"""A judge: a model of the engines that scores by a rubric, through the gateway.

The gateway journals each answer, so a repeated call gets it without a second completion.
"""

import time
from typing import Any

import structlog

from perdure.errors import Boundary, GatewayUnavailable, PerdureError, RetryHere
from perdure.gateway.base import SessionSpec
from perdure.gateway.control_client import FailoverTransport
from perdure.rollouts.attempt_job import Job
from perdure.rollouts.reward_model.bounded_post import (
    Answered,
    RewardModelRefused,
    check_status,
    parse_object,
    post_json,
)
from perdure.rollouts.reward_model.http_reward_model import ANSWER_CHARS
from perdure.rollouts.reward_model.rubric_prompt import AGAIN, prompt, read_scores, weighted_mean
from perdure.rollouts.reward_model.scored_work import Work
from perdure.sandboxes.base import identity_of
from perdure.types import ModelScore, RewardModel, Sampling

MOST_ANSWERS = 3
"""Unreadable answers after which the grading fails."""
NOT_OPEN = 403

log = structlog.get_logger()


async def score(job: Job, work: Work, judge: RewardModel, name: str) -> ModelScore:
    """`name`: of the grading, for the session and its turns.

    Raises: RetryHere; ConfigurationError; RewardModelRefused.
    """
    started, session = time.monotonic(), session_of(job, name)
    await job.services.gateway.open(_spec(job, judge, session, name))
    messages = [{"role": "user", "content": prompt(work, judge.criteria)}]
    replies: list[_Reply] = []
    while True:
        reply = await _asked(job, judge, session, messages)
        replies.append(reply)
        try:
            scores = read_scores(reply.text, judge.criteria)
            break
        except ValueError as error:
            if len(replies) == MOST_ANSWERS:
                raise RewardModelRefused(
                    f"the judge {judge.model!r} gave {MOST_ANSWERS} unusable answers: {error}"
                ) from error
            again = AGAIN.format(problem=error)
        messages += [
            {"role": "assistant", "content": reply.text},
            {"role": "user", "content": again},
        ]
    reward = weighted_mean(scores, judge.criteria)
    return ModelScore(
        model=reply.model or judge.model,
        rewards={judge.kind: reward, **{f"{judge.kind}.{one}": n for one, n in scores.items()}},
        reward=reward,
        answer=reply.text[:ANSWER_CHARS],
        calls=len(replies),
        prompt_tokens=sum(one.count("prompt_tokens") for one in replies),
        cached_tokens=sum(one.cached for one in replies),
        sampled_tokens=sum(one.count("completion_tokens") for one in replies),
        seconds=round(time.monotonic() - started, 3),
    )


async def forget(job: Job, name: str) -> None:
    """Delete the session, whose scores are stored. Its turns stay in the store."""
    try:
        await job.services.gateway.forget(session_of(job, name))
    except PerdureError as error:
        log.info("the journal keeps a judge's session", error=str(error))


def session_of(job: Job, name: str) -> str:
    return (
        f"{identity_of(job.request.run_id, job.request.workflow_id, 'judge', job.attempt)}-{name}"
    )


def _spec(job: Job, judge: RewardModel, session: str, name: str) -> SessionSpec:
    request = job.request
    return SessionSpec(
        session_id=session,
        model=judge.model,
        sampling=Sampling(temperature=judge.temperature, max_tokens_per_turn=judge.max_tokens),
        sample=f"{request.instance}/{request.sample_index}",
        turns_key=job.key(f"judge-{name}.parquet"),
        labels={**job.labels("grade"), "group": f"judge/{request.run_id}/{request.instance_id}"},
    )


class _Reply:
    """One chat completion. Raises: RetryHere if it is none."""

    def __init__(self, document: Any) -> None:
        try:
            self.text = str(document["choices"][0]["message"].get("content") or "")
            self.model = str(document.get("model") or "")
            self._usage = dict(document.get("usage") or {})
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            problem = f"the gateway gave no completion: {error!r}"
            raise RetryHere(problem, boundary=Boundary.GATEWAY) from error

    def count(self, name: str) -> int:
        return int(self._usage.get(name) or 0)

    @property
    def cached(self) -> int:
        details = self._usage.get("prompt_tokens_details") or {}
        return int(details.get("cached_tokens") or 0)


async def _asked(
    job: Job, judge: RewardModel, session: str, messages: list[dict[str, str]]
) -> _Reply:
    services = job.services
    url = f"{(await services.gateways.urls())[0]}/v1/chat/completions"
    answer = await post_json(
        url,
        {"model": judge.model, "messages": messages},
        headers={"authorization": f"Bearer {services.gateway.key(session)}"},
        timeout_s=judge.timeout_s,
        transport=FailoverTransport(services.gateways),
    )
    who = f"the judge {judge.model!r}"
    _check(answer, who)
    return _Reply(parse_object(answer.body, who))


def _check(answer: Answered, who: str) -> None:
    """Raises: GatewayUnavailable for a session that another try has ended, and as `check_status`."""
    if answer.status == NOT_OPEN:
        raise GatewayUnavailable(f"{who}: its session is not open")
    check_status(answer, who)

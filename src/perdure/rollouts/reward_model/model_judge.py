"""A judge: a model of the engines that scores by a rubric, through the gateway.

The gateway journals each answer, so a repeated call gets it without a second completion.
"""

import time

import structlog

from perdure.errors import PerdureError
from perdure.gateway.base import SessionSpec
from perdure.rollouts.attempt_job import Job
from perdure.rollouts.model_call import Messages, Reply, parse_reply, post_chat
from perdure.rollouts.reward_model.bounded_post import RewardModelRefused, check_status
from perdure.rollouts.reward_model.http_reward_model import ANSWER_CHARS
from perdure.rollouts.reward_model.rubric_prompt import AGAIN, prompt, read_scores, weighted_mean
from perdure.rollouts.reward_model.scored_work import Work
from perdure.sandboxes.base import identity_of
from perdure.types import ModelScore, RewardModel, Sampling

MOST_ANSWERS = 3
"""Unreadable answers after which the grading fails."""

log = structlog.get_logger()


async def score(job: Job, work: Work, judge: RewardModel, name: str) -> ModelScore:
    """`name`: of the grading, for the session and its turns.

    Raises: RetryHere; ConfigurationError; RewardModelRefused.
    """
    started, session = time.monotonic(), session_of(job, name)
    await job.services.gateway.open(_spec(job, judge, session, name))
    messages: Messages = [{"role": "user", "content": prompt(work, judge.criteria)}]
    replies: list[Reply] = []
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
        asked_model=judge.model,
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


async def _asked(job: Job, judge: RewardModel, session: str, messages: Messages) -> Reply:
    answer = await post_chat(
        job.services, session, judge.model, messages, timeout_s=judge.timeout_s
    )
    who = f"the judge {judge.model!r}"
    check_status(answer, who)
    return parse_reply(answer, who)

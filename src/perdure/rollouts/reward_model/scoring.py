"""The last step of a grading: ask the request's reward model, once, and add its scores to the grade."""

from perdure import tracing
from perdure.engines.reported_model import engine_settings
from perdure.rollouts.attempt_job import Job
from perdure.rollouts.request_models import check_named
from perdure.rollouts.reward_model import http_reward_model, model_judge
from perdure.rollouts.reward_model.http_reward_model import check_address
from perdure.rollouts.reward_model.scored_work import work_of
from perdure.settings.settings_tree import Settings
from perdure.storage.base import Store
from perdure.types import Grade, ModelScore, Outcome, RewardModel, Rewards, RolloutRequest


async def check_reward_model(settings: Settings, store: Store, request: RolloutRequest) -> None:
    """Raises: ConfigurationError if the workers' settings do not allow the request's reward model, or if no
    engine has its judge; StoreUnavailable."""
    model = request.reward_model
    if model is not None and model.url:
        check_address(model, settings.grading)
    elif model is not None:
        engine = engine_settings(settings)
        await check_named(settings, store, [model.model], request.run_id, engine)


async def scored(job: Job, patch: bytes, tests: Grade | None, name: str) -> Grade:
    """The grade with the scores. `tests`: the tests' grade; None if the request runs none. `name`: of the
    grading, for its files.

    Raises: RetryHere; ConfigurationError; RewardModelRefused; AttemptDamaged.
    """
    model = job.request.reward_model
    assert model is not None, "only such requests are scored"

    async def ask(job: Job) -> ModelScore:
        work = await work_of(job, patch, tests)
        with tracing.span("ask reward model", {"perdure.reward_model": model.url or model.model}):
            if model.url:
                return await http_reward_model.score(work, model, job.services.settings.grading)
            return await model_judge.score(job, work, model, name)

    score = await job.once(f"reward-model-{name}.json", ModelScore, ask)
    if model.model:
        await model_judge.forget(job, name)
    return _replacing_tests(job, score) if tests is None else _beside_tests(tests, score, model)


def _beside_tests(tests: Grade, score: ModelScore, model: RewardModel) -> Grade:
    """The code under test may have written a reward under a name of the reward model: that one goes."""
    own = (model.kind, f"{model.kind}.")
    kept = {
        name: reward
        for name, reward in tests.named_rewards.items()
        if name != own[0] and not name.startswith(own[1])
    }
    named = {**kept, **score.rewards}
    return tests.model_copy(update={"named_rewards": named, "model_score": score})


def _replacing_tests(job: Job, score: ModelScore) -> Grade:
    return Grade(
        outcome=Outcome.RESOLVED if score.reward == 1 else Outcome.UNRESOLVED,
        reason="" if score.reward == 1 else f"reward {score.reward:g}",
        rewards=Rewards(binary=float(score.reward == 1), partial=score.reward),
        reward_form="partial",
        named_rewards=score.rewards,
        model_score=score,
        grader="reward_model",
        calibration=job.calibration,
    )

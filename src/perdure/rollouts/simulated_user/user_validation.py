"""Refuses a user that a rollout cannot have, before its sandbox boots."""

from perdure.agents import user_messages
from perdure.data_source_handlers import runs_own_agent
from perdure.engines.reported_model import engine_settings
from perdure.errors import ConfigurationError
from perdure.rollouts import handler_hooks
from perdure.rollouts.attempt_job import Job
from perdure.rollouts.request_models import check_named
from perdure.types import SimulatedUser


async def check_user(job: Job) -> None:
    """Raises: ConfigurationError naming the field; StoreUnavailable."""
    user = job.user
    if user is None:
        return
    user_messages.check(job.request.agent, job.agent, user)
    if runs_own_agent(handler_hooks.handler_of(job)):
        raise ConfigurationError(
            f"user: the handler of {job.request.instance} runs its own agent, which takes no messages"
        )
    if user.model:
        services = job.services
        engine = engine_settings(services.settings)
        await check_named(
            services.settings, services.store, [user.model], job.request.run_id, engine
        )
    if user.grade_turns:
        _check_grading(job, user)


def _check_grading(job: Job, user: SimulatedUser) -> None:
    model, instance = job.request.reward_model, job.instance
    if instance.artifacts or (model is not None and model.replaces_tests):
        raise ConfigurationError(
            f"user.grade_turns needs tests on each turn's diff, but {job.request.instance} is "
            "graded with artifacts or by a reward model: set it to false"
        )
    known = {*instance.grading.fail_to_pass, *instance.grading.pass_to_pass}
    for turn, tests in enumerate(user.turn_tests, 1):
        if unknown := next((test for test in tests if test not in known), ""):
            raise ConfigurationError(
                f"user.turn_tests: turn {turn} names {unknown!r}, which is no FAIL_TO_PASS or "
                f"PASS_TO_PASS test of {job.request.instance}"
            )

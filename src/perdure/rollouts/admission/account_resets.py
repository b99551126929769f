"""When the accounts that a rollout needs are open again: its models', its judge's and its sandboxes'."""

from collections.abc import Iterable

from perdure.engines.open_hours import models_open, sandboxes_open
from perdure.engines.quota_resets import (
    QuotaReset,
    model_account,
    model_name,
    sandbox_account,
    utc_minute,
)
from perdure.engines.reported_model import named_engine
from perdure.errors import AccountExhausted, ConfigurationError
from perdure.rollouts.attempt_job import Job, SandboxPlan
from perdure.types import DEFAULT_MODEL


async def reset_before_boot(job: Job) -> QuotaReset | None:
    """The reset that the rollout waits for before its agent's sandbox; None if nothing is closed."""
    request = job.request
    models = [request.model, *request.models.values()] if job.agent.needs_model else []
    if job.user is not None and job.user.model:
        models.append(job.user.model)
    return await _last_reset(job, models, job.agent_sandbox)


async def reset_before_grading(job: Job) -> QuotaReset | None:
    """The same before the grading's sandbox."""
    judge = job.request.reward_model
    return await _last_reset(job, [judge.model] if judge and judge.model else [], job.grade_sandbox)


async def note_exhausted(job: Job, plan: SandboxPlan, error: AccountExhausted) -> QuotaReset:
    """Tell all workers. Rollouts of the account create no sandbox before the reset."""
    provider = plan.provider
    reason = f"{provider.name} is asked again at {utc_minute(error.resets_at)}: {error}"
    reset = QuotaReset(resets_at=error.resets_at, reason=reason, account=provider.name)
    await job.services.quota_resets.note(sandbox_account(provider.account), reset)
    return reset


async def _last_reset(job: Job, models: Iterable[str], plan: SandboxPlan) -> QuotaReset | None:
    """The last reset of these models and of the plan's sandboxes. Closed hours are noted too, so that
    `perdure accounts list` shows them."""
    now, resets = job.activity_attempt.now(), job.services.quota_resets
    settings, provider = job.services.settings, plan.provider
    url, default = named_engine(settings).url, settings.engine.model or DEFAULT_MODEL
    closed: dict[str, QuotaReset | None] = {}
    for model in {default if name == DEFAULT_MODEL else name for name in models}:
        opening = models_open(settings.engine.open_hours, now, model_name(url, model))
        closed[model_account(url, model)] = opening
    hours = settings.sandbox.open_hours.get(provider.name, "")
    if not provider.host_bound:
        closed[sandbox_account(provider.account)] = sandboxes_open(hours, now, provider.name)
    elif hours:
        raise ConfigurationError(
            f"sandbox.open_hours names {provider.name!r}, whose sandboxes have no account: leave it out"
        )
    for account, opening in closed.items():
        if opening is not None:
            await resets.note(account, opening)
    return await resets.last(closed, now)

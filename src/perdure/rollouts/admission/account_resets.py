"""When the accounts that a rollout needs are open again: its models' and its sandboxes'."""

from perdure.engines.open_hours import closed_reason, opens_at
from perdure.engines.quota_resets import QuotaReset, model_account, sandbox_account, utc_minute
from perdure.engines.reported_model import named_engine
from perdure.errors import AccountExhausted
from perdure.rollouts.attempt_job import Job, SandboxPlan
from perdure.types import DEFAULT_MODEL


async def reset_before_boot(job: Job) -> QuotaReset | None:
    """The reset that the rollout waits for before its agent's sandbox; None if nothing is closed."""
    now = job.activity_attempt.now()
    hours = job.services.settings.engine.open_hours if job.agent.needs_model else ""
    if until := opens_at(hours, now):
        return QuotaReset(resets_at=until, reason=closed_reason(hours, until))
    accounts = [*_model_accounts(job), *_sandbox_accounts(job.agent_sandbox)]
    return await job.services.quota_resets.last(accounts, now)


async def reset_before_grading(job: Job) -> QuotaReset | None:
    accounts = _sandbox_accounts(job.grade_sandbox)
    return await job.services.quota_resets.last(accounts, job.activity_attempt.now())


async def note_exhausted(job: Job, plan: SandboxPlan, error: AccountExhausted) -> QuotaReset:
    """Tell all workers. Rollouts of the account create no sandbox before the reset."""
    provider = plan.provider
    reason = f"{provider.name} is asked again at {utc_minute(error.resets_at)}: {error}"
    reset = QuotaReset(resets_at=error.resets_at, reason=reason, account=provider.name)
    await job.services.quota_resets.note(sandbox_account(provider.account), reset)
    return reset


def _model_accounts(job: Job) -> list[str]:
    if not job.agent.needs_model:
        return []
    settings = job.services.settings
    default = settings.engine.model or DEFAULT_MODEL
    named = (job.request.model, *job.request.models.values())
    models = {default if name == DEFAULT_MODEL else name for name in named}
    url = named_engine(settings).url
    return [model_account(url, model) for model in models]


def _sandbox_accounts(plan: SandboxPlan) -> list[str]:
    provider = plan.provider
    return [] if provider.host_bound else [sandbox_account(provider.account)]

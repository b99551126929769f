"""The boot stage: refuse bad input, prepare the environment, boot the agent's sandbox."""

import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import structlog
from pydantic import JsonValue

from perdure.agents import mcp_config, skills
from perdure.agents.base import install
from perdure.client.request_comparison import Identity
from perdure.data_source_handlers import AgentHandler, runs_own_agent
from perdure.engines.hosted_sampling import check_hosted_sampling, hosted_kind
from perdure.engines.quota_resets import QuotaReset
from perdure.engines.reported_model import engine_settings
from perdure.episodes.episode_store import read_episode
from perdure.errors import (
    AccountExhausted,
    AttemptDamaged,
    ConfigurationError,
    InstanceError,
    NotFound,
    RateLimited,
    SandboxLost,
)
from perdure.graders.diff.diff_capture import BASE_GIT, prepare_capture
from perdure.graders.image.image_setup import set_up_image
from perdure.instances.environment_builder import Prepared
from perdure.rollouts import handler_hooks, run_identity
from perdure.rollouts.activity_messages import AgentRun, Booted
from perdure.rollouts.admission import account_resets
from perdure.rollouts.attempt_job import Job
from perdure.rollouts.handler_hooks import Initialised
from perdure.rollouts.request_models import TOKENIZER, check_models, engine_of_roster
from perdure.rollouts.reward_model.scoring import check_reward_model
from perdure.rollouts.sandbox.allowed_network import allowed_network, check_row_hosts
from perdure.rollouts.sandbox.health_check import wait_until_healthy
from perdure.rollouts.sandbox.host_term import first_term
from perdure.rollouts.sandbox.sandbox_creation import create_sandbox
from perdure.rollouts.simulated_user.user_validation import check_user
from perdure.sandboxes import phase_specs
from perdure.sandboxes.base import Mount, Sandbox, SandboxSpec
from perdure.storage import store_keys
from perdure.types import EpisodeRef, Frozen, RolloutStatus

CHECKPOINT = "sandbox.json"

log = structlog.get_logger()


class BootRecord(Frozen):
    """`sandbox.json`: the attempt's sandbox and its host."""

    identity: str
    provider: str
    host: str
    booted_at: float
    seconds: float
    base_git: str = ""
    """The pristine git directory inside the sandbox, against which the diff is taken."""
    term: int = 0
    """The host's term in which the sandbox was booted."""
    metadata: JsonValue = None
    """The metadata that the handler's `init` returned, if it is JSON."""
    round: int = 0
    """The round of the request. A later round starts with a new attempt."""


async def boot(job: Job) -> Booted:
    asked = await rollout_identity(job)
    await run_identity.check_rollout(
        job.services.store, job.request, job.activity_attempt.play, asked
    )
    done = await _finished(job)
    if done is not None:
        await job.agent_sandbox.admission.release()
        return Booted(done=done)
    if job.request.expires_at is not None and job.activity_attempt.now() > job.request.expires_at:
        await job.agent_sandbox.admission.release()
        return Booted(expired=True)
    uri = f"{job.services.store.url}/{store_keys.rollout_of(job.request)}"
    if job.request.start_at == "grade":
        await check_reward_model(job.services.settings, job.services.store, job.request)
        attempt = await _last_captured(job)
        await run_identity.keep_rollout(
            job.services.store, job.request, job.activity_attempt.play, asked
        )
        return Booted(uri=uri, attempt=attempt)
    while True:
        try:
            earlier = await job.read(CHECKPOINT, BootRecord)
            if earlier is None:
                break
            if earlier.round >= job.request.round:
                if await _is_captured(job):
                    return Booted(uri=uri, attempt=job.attempt)
                if await _may_live(job, earlier):
                    return _booted(job, uri, earlier)
        except AttemptDamaged as error:
            log.warning("skipping a damaged attempt", error=str(error))
        # An attempt whose sandbox is gone and that left no diff is only evidence. This also skips
        # the attempts of earlier workflows of this rollout that were cancelled or terminated.
        job = job.next_attempt()
    if (reset := await account_resets.reset_before_boot(job)) is not None:
        return await _parked(job, uri, reset)
    try:
        record = await _boot_sandbox(job, asked)
    except AccountExhausted as error:
        reset = await account_resets.note_exhausted(job, job.agent_sandbox, error)
        return await _parked(job, uri, reset)
    if record is None:
        return Booted(uri=uri, waits_for=job.agent_step)
    return _booted(job, uri, record)


async def _parked(job: Job, uri: str, reset: QuotaReset) -> Booted:
    await job.agent_sandbox.admission.release()
    return Booted(uri=uri, resets_at=reset.resets_at, reason=reset.reason)


async def attach(job: Job) -> Sandbox:
    """The sandbox of this attempt's agent. Raises: SandboxLost."""
    identity, plan = job.agent_identity, job.agent_sandbox
    job.services.held[identity] = plan.placement.provider
    try:
        return await plan.provider.attach(identity)
    except NotFound as error:
        raise SandboxLost(f"sandbox {identity} is gone") from error


def _booted(job: Job, uri: str, record: BootRecord) -> Booted:
    fields: dict[str, Any] = {}  # an unset field stays out of the history
    if job.agent_sandbox.provider.host_bound:
        fields["host"] = record.host
    if job.instance.grading.in_place:
        fields["tests_s"] = job.request.grade_timeout_s or job.instance.grading.timeout_s
    return Booted(uri=uri, attempt=job.attempt, **fields)


async def _finished(job: Job) -> EpisodeRef | None:
    """The episode, if it ends the rollout in this round: it is graded, adopted, or ungraded and
    need not be graded now. Failed and cancelled rollouts may run again."""
    try:
        episode = await read_episode(job.services.store, job.request)
    except ValueError as error:  # damaged: grade its patch again and write a new episode
        log.warning("ignoring a damaged episode", error=str(error))
        return None
    if episode is None or not episode.is_final:
        return None
    if episode.status is RolloutStatus.UNGRADED and job.request.grades_now:
        return None
    if episode.round < job.request.round:
        return None
    return episode.ref(job.services.store.url)


async def _last_captured(job: Job) -> int:
    """The attempt whose patch is graded: the last attempt of the stored episode.

    Raises: InstanceError if that attempt left no patch.
    """
    episode = await read_episode(job.services.store, job.request)
    number = len(episode.attempts) if episode is not None else job.attempt
    if not await job.services.store.exists(f"{store_keys.attempt(job.request, number)}/patch.json"):
        raise InstanceError(
            f"{job.request.workflow_id.removeprefix('rollout/')} has no captured patch to grade"
        )
    return number


async def _is_captured(job: Job) -> bool:
    """Whether the agent is done and its diff is stored, so that the attempt needs no sandbox."""
    run = await job.read("agent.json", AgentRun)
    done = run is not None and not run.broke and not run.stopped
    return done and await job.services.store.exists(job.key("patch.json"))


async def _may_live(job: Job, record: BootRecord) -> bool:
    provider = job.agent_sandbox.provider
    if provider.host_bound and record.host != job.services.host:
        # Only that host can tell. The agent stage runs there, unless the host has been lost since.
        return record.term >= await first_term(job.services.store, record.host)
    try:
        await provider.attach(record.identity)
    except (NotFound, SandboxLost):
        return False
    return True


async def rollout_identity(job: Job) -> Identity:
    """If the request names a policy version, its engine contributes only the tokenizer, because the
    rest changes with each weight update."""
    request, services = job.request, job.services
    engine = engine_settings(services.settings)
    if job.agent.needs_model and (kind := hosted_kind(engine)):
        check_hosted_sampling(request.sampling, kind, engine["url"])
    found = await run_identity.identity_of(
        services.settings, services.store, request, [request.instance], {}
    )
    if not job.agent.needs_model:
        return found
    of_roster = await engine_of_roster(services.settings, services.store, request, engine)
    if request.policy_version is None:
        found |= of_roster or await services.reported_engine(request.model)
    elif TOKENIZER in of_roster:
        found[TOKENIZER] = of_roster[TOKENIZER]
    return found


async def _boot_sandbox(job: Job, asked: Identity) -> BootRecord | None:
    """None if the account has not granted this rollout a sandbox yet."""
    started = time.monotonic()
    await _refuse_what_cannot_run(job)
    await run_identity.keep_rollout(
        job.services.store, job.request, job.activity_attempt.play, asked
    )
    plan = job.agent_sandbox
    if plan.provider.host_bound:
        job.services.term.check()
    _says(job, f"the environment of {job.request.instance_id}; its first use builds it")
    prepared = await job.prepared(plan)
    _says(job, f"the packages of {job.request.agent}; their first use fetches them")
    tools: tuple[Mount, ...] = ()
    if not runs_own_agent(handler_hooks.handler_of(job)):
        tools = await install(
            job.agent,
            job.services.tools,
            job.services.settings.agents,
            job.request.agent_options,
        )
    spec = _spec(job, prepared, tools)
    _says(job, f"a sandbox of {plan.provider.name}")
    sandbox = await _create(job, spec)
    if sandbox is None:
        return None
    await plan.admission.started()
    async with allowed_network(job, "agent", sandbox):
        base_git = await base_git_of(job, sandbox, prepared)
        await wait_until_healthy(sandbox, job.instance.environment.healthcheck)
        made = await _init(job, sandbox)
    metadata = made.stored_metadata if made is not None else None
    record = await _record(job, sandbox, started, base_git, metadata)
    if made is not None:
        handler_hooks.remember(job, made)
    job.services.seats.take(sandbox.identity)
    return record


def _says(job: Job, what: str) -> None:
    """Show `what` next to the pending activity in the Web UI, with the next heartbeat."""
    job.activity_attempt.report(doing={"what": what, "since": round(time.time())})


async def _create(job: Job, spec: SandboxSpec) -> Sandbox | None:
    """None if the account has not granted it yet. Raises: AccountExhausted."""
    plan = job.agent_sandbox
    if plan.admission.metered and job.permit != job.agent_step:
        await plan.admission.ask(job.agent_step)
        return None
    try:
        async with plan.admission.starting():
            return await create_sandbox(
                job.activity_attempt, plan.provider, spec, job.agent_identity
            )
    except RateLimited as error:
        if isinstance(error, AccountExhausted) or not plan.admission.metered:
            raise
        # The account usually queues a refused rollout itself. Asking again changes nothing then.
        await plan.admission.ask(job.agent_step)
        return None


async def _init(job: Job, sandbox: Sandbox) -> Initialised | None:
    """None if the handler does not override `init`."""
    if type(handler_hooks.handler_of(job)).init is AgentHandler.init:
        return None
    return await handler_hooks.init(job, sandbox)


async def init_metadata(job: Job) -> Any:
    """The metadata that the handler's `init` returned in this attempt. If another process called
    `init`, it is the JSON copy."""
    if (made := handler_hooks.remembered(job)) is not None:
        return made.metadata
    record = await job.recall(CHECKPOINT, BootRecord)
    return record.metadata if record is not None else None


async def _record(
    job: Job, sandbox: Sandbox, started: float, base_git: str, metadata: JsonValue
) -> BootRecord:
    record = BootRecord(
        identity=sandbox.identity,
        provider=job.agent_sandbox.provider.name,
        host=job.services.host,
        booted_at=time.time(),
        seconds=time.monotonic() - started,
        base_git=base_git,
        metadata=metadata,
        term=job.services.term.number,
        round=job.request.round,
    )
    return await job.write(CHECKPOINT, record)


async def _refuse_what_cannot_run(job: Job) -> None:
    """Report mistakes in the row or the options before anything boots."""
    services = job.services
    if job.agent.needs_model:
        engine = engine_settings(services.settings)
        await check_models(services.settings, services.store, job.request, engine)
    await check_reward_model(services.settings, services.store, job.request)
    try:
        instance = job.instance
    except NotFound as error:
        raise InstanceError(str(error)) from error
    services.handler(instance.data_source).validate(instance)
    phase_specs.check(job.request, instance, services.provider)
    services.reach(job.agent_sandbox.placement.provider)
    mcp_config.check(job.request.agent, job.agent, job.mcp_servers)
    skills.check(job.request.agent, job.agent, instance)
    await check_user(job)
    _check_mcp_hosts(job)
    for phase in phase_specs.PHASES:
        check_row_hosts(job, phase)
    workdir = instance.environment.workdir or "/"
    job.agent.launch(job.task(workdir=workdir, gateway_url="http://127.0.0.1", session_key=""))


def _check_mcp_hosts(job: Job) -> None:
    """A row must not choose what the gateway's host calls. Raises: ConfigurationError."""
    allowed = job.services.settings.gateway.mcp_hosts.lower().replace(",", " ").split()
    if not job.agent.needs_model:
        return
    for name, server in job.mcp_servers.items():
        host = urlsplit(server.url).netloc.lower()
        is_rows = name not in job.request.mcp_servers
        if is_rows and server.is_behind_gateway and host not in allowed:
            raise ConfigurationError(
                f"{job.request.instance} names the MCP server {name!r} at {host}: allow the host with "
                f"PERDURE_GATEWAY__MCP_HOSTS={host}, or name another server {name!r} with --mcp FILE"
            )


def _spec(job: Job, prepared: Prepared, tools: Sequence[Mount]) -> SandboxSpec:
    services, placement = job.services, job.agent_sandbox.placement
    by_socket = job.agent.needs_model and services.reach(placement.provider) == "socket"
    return SandboxSpec(
        workdir=prepared.workdir,
        tree=prepared.tree,
        image=prepared.image,
        mounts=(*prepared.mounts, *tools, *pristine_git(prepared)),
        env=prepared.env,
        sidecars=prepared.sidecars,
        folders=prepared.folders,
        limits=placement.limits,
        network=placement.network,
        allowed_hosts=placement.allowed_hosts,
        gateway=services.settings.gateway_socket if by_socket else None,
        labels=job.labels("agent"),
        ttl_s=services.settings.sandbox.ttl_s,
    )


async def base_git_of(job: Job, sandbox: Sandbox, prepared: Prepared) -> str:
    """Path of the pristine git directory inside. An image's is copied without later commits."""
    if prepared.tree:
        return BASE_GIT
    await set_up_image(sandbox, job.instance)
    return await prepare_capture(sandbox)


def pristine_git(prepared: Prepared) -> tuple[Mount, ...]:
    """Mount a read-only `.git` to take the diff against, because the agent can change its own."""
    return (Mount(prepared.tree / ".git", BASE_GIT),) if prepared.tree else ()

"""boot_sandbox: refuse bad input, prepare the environment, boot sandbox A."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from temporalio import activity

from activities import checkpoints, making
from activities.admission import Admission, agent_step
from activities.messages import AgentRun, Attempt, Booted
from activities.ready import taken_by
from activities.services import Services
from activities.shell import shell
from perdure.agents.base import AgentTask
from perdure.episodes.files import read_episode
from perdure.errors import InstanceError, NotFound, RateLimited, SandboxLost
from perdure.graders import patch
from perdure.graders.patch import BASE_GIT
from perdure.instances.environments import Prepared
from perdure.sandboxes import phases
from perdure.sandboxes.base import Mount, Sandbox, SandboxProvider, SandboxSpec
from perdure.sandboxes.phases import Place
from perdure.storage import keys
from perdure.types import EpisodeRef, Frozen, Instance, RolloutRequest, RolloutStatus


class BootRecord(Frozen):
    """`sandbox.json`: which sandbox an attempt had, and where."""

    identity: str
    provider: str
    host: str
    booted_at: float
    seconds: float
    base_git: str = ""
    """The pristine git directory inside the sandbox, against which its diff is taken."""


class BootSandbox:
    def __init__(self, services: Services) -> None:
        self.services = services

    @shell("boot_sandbox")
    async def boot(self, attempt: Attempt) -> Booted:
        request = attempt.request
        done = await self._finished(request)
        if done is not None:
            await self._release(request)
            return Booted(done=done)
        if request.expires_at is not None and time.time() > request.expires_at:
            await self._release(request)
            return Booted(expired=True)
        uri = f"{self.services.store.url}/{keys.rollout_of(request)}"
        while (earlier := await self._record(attempt)) is not None:
            if await self._is_captured(attempt):
                return Booted(uri=uri, attempt=attempt.attempt)
            if await self._may_live(request, earlier):
                return await self._booted(attempt, uri, earlier)
            # Its sandbox is gone, with nothing to go on from: evidence, not a start. So is every
            # attempt of an earlier workflow of this rollout that was cancelled or terminated.
            attempt = attempt.model_copy(update={"attempt": attempt.attempt + 1})
        record = await self._create(attempt)
        if record is None:
            return Booted(uri=uri, waits_for=agent_step(attempt))
        return await self._booted(attempt, uri, record)

    async def _booted(self, attempt: Attempt, uri: str, record: BootRecord) -> Booted:
        place = await self.services.place(attempt.request, "agent")
        bound = self.services.provider(place.provider).host_bound
        host = {"host": record.host} if bound else {}
        return Booted(uri=uri, attempt=attempt.attempt, **host)

    async def _record(self, attempt: Attempt) -> BootRecord | None:
        key = f"{keys.attempt(attempt.request, attempt.attempt)}/sandbox.json"
        return await checkpoints.read(self.services.store, key, BootRecord)

    async def _is_captured(self, attempt: Attempt) -> bool:
        """The agent is done and its diff is in the store: the attempt needs no sandbox any more."""
        folder, store = keys.attempt(attempt.request, attempt.attempt), self.services.store
        run = await checkpoints.read(store, f"{folder}/agent.json", AgentRun)
        done = run is not None and not run.end.is_error()
        return done and await store.exists(f"{folder}/patch.json")

    async def _may_live(self, request: RolloutRequest, record: BootRecord) -> bool:
        place = await self.services.place(request, "agent")
        provider = self.services.provider(place.provider)
        if provider.host_bound and record.host != self.services.host:
            return True  # only that host can tell, and its watchers will
        try:
            await provider.attach(record.identity)
        except (NotFound, SandboxLost):
            return False
        return True

    async def _release(self, request: RolloutRequest) -> None:
        place = await self.services.place(request, "agent")
        await Admission(self.services, place.provider, request).release()

    async def _create(self, attempt: Attempt) -> BootRecord | None:
        """None: it is not this rollout's turn on the account yet."""
        request = attempt.request
        started = time.time()
        instance = await self._instance(request)
        self._refuse_what_cannot_run(request, instance)
        place = phases.place(request, instance, "agent")
        prepared = await self.services.prepared(request, instance, "agent")
        tools = await self.services.agent(request.agent).install(self.services.tools)
        provider = self.services.provider(place.provider)
        identity = self.services.agent_identity(request, attempt.attempt)
        admission = Admission(self.services, place.provider, request)
        spec, step = self._spec(attempt, place, prepared, tools), agent_step(attempt)
        ready = await self.ready_one(attempt, provider, spec)
        if ready is None and admission.metered and attempt.permit != step:
            await admission.ask(step)
            return None
        try:
            async with admission.starting():
                sandbox = ready or await making.make(provider, spec, identity)
        except RateLimited:
            if not admission.metered:
                raise
            await admission.ask(step)  # a keeper that knew it has queued it already
            return None
        async with _kept(sandbox, if_unknown=ready is None) as kept:
            if ready is None:
                await admission.started()
            else:
                await admission.took(ready.identity, step)
            base_git = BASE_GIT if prepared.tree else await patch.prepare_capture(sandbox)
            record = BootRecord(
                identity=sandbox.identity,
                provider=provider.name,
                host=self.services.host,
                booted_at=time.time(),
                seconds=time.time() - started,
                base_git=base_git,
            )
            folder = keys.attempt(request, attempt.attempt)
            record = await checkpoints.write(self.services.store, f"{folder}/sandbox.json", record)
            kept(record.identity == sandbox.identity)
        if ready is not None and record.identity == sandbox.identity:
            await sandbox.touch(spec.ttl_s)
        self.services.ready.refill(provider, spec, admission.ahead())
        return record

    async def ready_one(
        self, attempt: Attempt, provider: SandboxProvider, spec: SandboxSpec
    ) -> Sandbox | None:
        """One that was booted ahead; a later try takes none but its own, as an earlier one may have
        begun to make a sandbox of the attempt's identity."""
        rollout, shelves = attempt.request.workflow_id, self.services.ready
        taking = keys.taking(attempt.request, attempt.attempt)
        if activity.info().attempt > 1:
            return await shelves.taken_before(provider, rollout, taking)
        return await shelves.take(provider, spec, rollout, taking)

    async def _finished(self, request: RolloutRequest) -> EpisodeRef | None:
        """The episode of a graded rollout; one that failed or was cancelled is worth another try."""
        episode = await read_episode(self.services.store, request)
        if episode is None or episode.status is not RolloutStatus.GRADED:
            return None
        return episode.ref(self.services.store.url)

    async def _instance(self, request: RolloutRequest) -> Instance:
        try:
            return await self.services.instance(request)
        except NotFound as error:
            raise InstanceError(str(error)) from error

    def _refuse_what_cannot_run(self, request: RolloutRequest, instance: Instance) -> None:
        """Every mistake in the row or the options is named before anything boots."""
        self.services.grader(instance.grading.protocol).validate(instance)
        phases.check(request, instance, self.services.provider)
        self.services.reach(phases.place(request, instance, "agent").provider)
        agent = self.services.agent(request.agent)
        agent.launch(agent_task(request, instance, gateway_url="http://127.0.0.1", session_key=""))

    def _spec(
        self, attempt: Attempt, place: Place, prepared: Prepared, tools: tuple[Mount, ...]
    ) -> SandboxSpec:
        request = attempt.request
        needs_model = self.services.agent(request.agent).needs_model
        by_socket = needs_model and self.services.reach(place.provider) == "socket"
        return SandboxSpec(
            workdir=prepared.workdir,
            tree=prepared.tree,
            image=prepared.image,
            mounts=(*prepared.mounts, *tools, *_pristine_git(prepared)),
            env=prepared.env,
            limits=place.limits,
            network=place.network,
            gateway=self.services.settings.gateway_socket if by_socket else None,
            labels=self.services.labels(request, attempt.attempt, "agent"),
            ttl_s=self.services.settings.sandbox.ttl_s,
        )


@asynccontextmanager
async def _kept(sandbox: Sandbox, *, if_unknown: bool) -> AsyncIterator[Callable[[bool], None]]:
    """Kill the sandbox unless `kept` was told that it is the rollout's.

    `if_unknown`: one that another try finds by its identity stays where nobody said anything.
    """
    fate = if_unknown

    def kept(is_ours: bool) -> None:
        nonlocal fate
        fate = is_ours

    try:
        yield kept
    finally:
        if not fate:
            await asyncio.shield(sandbox.kill())


async def sandbox_of(services: Services, attempt: Attempt) -> str:
    """Identity of the sandbox that this attempt's agent has, or would have."""
    key = f"{keys.attempt(attempt.request, attempt.attempt)}/sandbox.json"
    record = await checkpoints.read(services.store, key, BootRecord)
    if record is not None:
        return record.identity
    request, taking = attempt.request, keys.taking(attempt.request, attempt.attempt)
    taken = await taken_by(services.store, request.workflow_id, taking)
    return taken or services.agent_identity(request, attempt.attempt)


def _pristine_git(prepared: Prepared) -> tuple[Mount, ...]:
    """The agent owns its own `.git`; the diff is taken against this one."""
    return (Mount(prepared.tree / ".git", BASE_GIT),) if prepared.tree else ()


def agent_task(
    request: RolloutRequest, instance: Instance, *, gateway_url: str | None, session_key: str
) -> AgentTask:
    return AgentTask(
        instance=instance,
        workdir=instance.environment.workdir,
        gateway_url=gateway_url,
        session_key=session_key,
        model=request.model,
        sampling=request.sampling,
        budget_s=request.agent_budget_s,
        options=request.agent_options,
    )

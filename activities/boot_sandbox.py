"""boot_sandbox: refuse bad input, prepare the environment, boot sandbox A."""

import time

from activities import checkpoints
from activities.messages import Attempt, Booted
from activities.services import Services
from activities.shell import shell
from perdure.agents.base import AgentTask
from perdure.episodes import assemble
from perdure.errors import InstanceError, NotFound
from perdure.instances.environments import Prepared
from perdure.sandboxes.base import Mount, SandboxSpec
from perdure.storage import keys
from perdure.types import EpisodeRef, Frozen, Instance, RolloutRequest


class BootRecord(Frozen):
    """`sandbox.json`: which sandbox an attempt had, and where."""

    identity: str
    provider: str
    host: str
    booted_at: float
    seconds: float


class BootSandbox:
    def __init__(self, services: Services) -> None:
        self.services = services

    @shell("boot_sandbox")
    async def boot(self, attempt: Attempt) -> Booted:
        request = attempt.request
        done = await self._finished(request)
        if done is not None:
            return Booted(done=done)
        if request.expires_at is not None and time.time() > request.expires_at:
            return Booted(expired=True)
        started = time.time()
        instance = await self._instance(request)
        self._refuse_what_cannot_run(request, instance)
        prepared = await self.services.environments(request.sandbox).prepare(instance)
        tools = await self.services.agent(request.agent).install(self.services.tools)
        provider = self.services.provider(request.sandbox)
        identity = self.services.agent_identity(request, attempt.attempt)
        await provider.create(self._spec(attempt, prepared, tools), identity)
        record = BootRecord(
            identity=identity,
            provider=provider.name,
            host=self.services.host,
            booted_at=time.time(),
            seconds=time.time() - started,
        )
        folder = keys.attempt(request, attempt.attempt)
        await checkpoints.write(self.services.store, f"{folder}/sandbox.json", record)
        host = {"host": self.services.host} if provider.host_bound else {}
        return Booted(uri=f"{self.services.store.url}/{keys.rollout_of(request)}", **host)

    async def _finished(self, request: RolloutRequest) -> EpisodeRef | None:
        episode = await assemble.read(self.services.store, request)
        return None if episode is None else episode.ref(self.services.store.url)

    async def _instance(self, request: RolloutRequest) -> Instance:
        try:
            return await self.services.instance(request)
        except NotFound as error:
            raise InstanceError(str(error)) from error

    def _refuse_what_cannot_run(self, request: RolloutRequest, instance: Instance) -> None:
        """Every mistake in the row or the options is named before anything boots."""
        self.services.grader(instance.grading.protocol).validate(instance)
        agent = self.services.agent(request.agent)
        agent.launch(agent_task(request, instance, gateway_url="http://127.0.0.1", session_key=""))

    def _spec(self, attempt: Attempt, prepared: Prepared, tools: tuple[Mount, ...]) -> SandboxSpec:
        request = attempt.request
        needs_model = self.services.agent(request.agent).needs_model
        return SandboxSpec(
            workdir=prepared.workdir,
            tree=prepared.tree,
            image=prepared.image,
            mounts=(*prepared.mounts, *tools),
            env=prepared.env,
            limits=request.limits,
            gateway=self.services.settings.gateway_socket if needs_model else None,
            labels=self.services.labels(request, attempt.attempt, "agent"),
            ttl_s=self.services.settings.sandbox_ttl_s,
        )


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

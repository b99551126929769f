"""What the activities are built with: one of each per worker process, made once."""

import contextlib
import functools
from pathlib import Path

from activities.hosts import host_of
from activities.ready import ReadySandboxes
from perdure import home, registry
from perdure.agents.base import Agent
from perdure.errors import ConfigurationError, NotFound
from perdure.gateway.control import GatewayControl
from perdure.graders.base import Grader
from perdure.home import load_secret
from perdure.instances import catalog
from perdure.instances.environments import Environments, Prepared
from perdure.sandboxes import phases
from perdure.sandboxes.base import SandboxProvider, identity_of
from perdure.sandboxes.phases import Place
from perdure.sandboxes.relay.choice import Reach, choose_reach
from perdure.settings.tree import Settings
from perdure.storage.base import Store, open_store
from perdure.types import AccountCaps, Instance, PhaseName, RolloutRequest


class Services:
    """Lazily made parts, shared by all activities of a process."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.host = host_of(settings)
        self.home: Path = settings.home.absolute()
        self.tools: Path = self.home / "tools"

    @functools.cached_property
    def store(self) -> Store:
        return open_store(self.settings)

    async def close(self) -> None:
        """What only this process keeps is given up."""
        if "ready" in self.__dict__:
            await self.ready.close()

    @functools.cached_property
    def ready(self) -> ReadySandboxes:
        labels = {"app": "perdure", "owner": self.host}
        return ReadySandboxes(self.settings, self.store, labels)

    @functools.cached_property
    def gateway(self) -> GatewayControl:
        return GatewayControl(self.settings.gateway_base_url, load_secret(self.settings))

    @functools.cache  # noqa: B019  one Services per process, for its whole life
    def provider(self, name: str) -> SandboxProvider:
        """Raises: ConfigurationError for an unknown name."""
        make = registry.load("sandbox", registry.SANDBOXES, name)
        provider: SandboxProvider = make(self.home)
        named = self.settings.sandbox.caps.get(name)
        provider.waits_at_caps = named is None and provider.account_caps is None
        home.remember_sandboxes(self.home, name)
        return provider

    def caps(self, name: str) -> AccountCaps | None:
        """What the account of this provider may do; None where nothing is metered.

        Raises: ConfigurationError for caps of a provider that has no account.
        """
        provider, named = self.provider(name), self.settings.sandbox.caps.get(name)
        if named is not None and provider.host_bound:
            raise ConfigurationError(
                f"sandbox.caps names {name!r}, whose sandboxes are bound to a host and not to an "
                "account: set slots.boot and slots.grade of its workers instead"
            )
        return named or provider.account_caps

    def reach(self, sandbox: str) -> Reach:
        """How sandboxes of this provider reach the gateway. Raises: ConfigurationError."""
        settings = self.settings
        return choose_reach(
            settings.gateway.reach, self.provider(sandbox), settings.gateway_base_url
        )

    @functools.cache  # noqa: B019
    def environments(self, sandbox: str, builder_name: str = "") -> Environments:
        """What runs elsewhere is built here all the same, and uploaded."""
        runs_on = self.provider(sandbox)
        if not builder_name:
            builder_name = sandbox if runs_on.sees_host else "bubblewrap"
        builder = self.provider(builder_name)
        return Environments(self.home / "environments", self.store, builder, runs_on=runs_on)

    async def prepared(
        self, request: RolloutRequest, instance: Instance, phase: PhaseName
    ) -> Prepared:
        """The instance's environment for the sandbox of this phase. Raises as `prepare` does."""
        build = phases.place(request, instance, "boot")
        provider = phases.place(request, instance, phase).provider
        environments = self.environments(provider, build.provider)
        return await environments.prepare(instance, limits=build.limits, network=build.network)

    async def place(self, request: RolloutRequest, phase: PhaseName) -> Place:
        """Where this phase's sandbox is made. An instance that is gone asks for nothing."""
        instance = None
        if not getattr(request.phases, phase).provider:
            with contextlib.suppress(NotFound):
                instance = await self.instance(request)
        return phases.place(request, instance, phase)

    @functools.cache  # noqa: B019
    def agent(self, name: str) -> Agent:
        agent: Agent = registry.load("agent", registry.AGENTS, name)()
        return agent

    @functools.cache  # noqa: B019
    def grader(self, protocol: str) -> Grader:
        grader: Grader = registry.load("grader", registry.GRADERS, protocol)()
        return grader

    async def instance(self, request: RolloutRequest) -> Instance:
        """Raises: NotFound naming the instance and how to get it."""
        return await catalog.load(self.store, request.instance)

    def agent_identity(self, request: RolloutRequest, attempt: int) -> str:
        return identity_of(request.run_id, request.workflow_id, "agent", attempt)

    def grade_identity(self, request: RolloutRequest, attempt: int) -> str:
        return identity_of(request.run_id, request.workflow_id, "grade", attempt)

    def labels(self, request: RolloutRequest, attempt: int, purpose: str) -> dict[str, str]:
        return {
            "app": "perdure",
            "run": request.run_id,
            "rollout": request.workflow_id,
            "attempt": str(attempt),
            "purpose": purpose,
            "owner": self.host,
        }

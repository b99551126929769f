"""The services that stages use: one of each per worker process, created on first use."""

import asyncio
import contextlib
import functools
import math
import time
from collections.abc import Mapping
from pathlib import Path

from perdure import data_source_handlers, home_folder, variant_registry
from perdure.agents.base import Agent
from perdure.data_source_handlers import AgentHandler
from perdure.engines.quota_resets import QuotaResets
from perdure.engines.reported_model import engine_settings, reported
from perdure.errors import ConfigurationError, PerdureError
from perdure.gateway.control_client import FailoverTransport, GatewayControl
from perdure.gateway.gateway_addresses import Gateways
from perdure.graders.diff.signal_rules import read_signal_rules
from perdure.home_folder import host_of, load_secret, load_secrets
from perdure.instances.environment_builder import Environments
from perdure.rollouts.admission.host_seats import Seats
from perdure.rollouts.sandbox.host_term import HostTerm
from perdure.rollouts.worker_memory import Memory
from perdure.sandboxes.base import SandboxProvider
from perdure.sandboxes.relay.gateway_route import Reach, choose_reach
from perdure.settings.settings_tree import Settings
from perdure.storage.base import Store
from perdure.storage.store_url import open_store
from perdure.types import AccountCaps

ENGINE_ASKED_EVERY_S = 60.0


class Services:
    """Objects that all stages of a process share. Each is created on first use."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.host = host_of(settings)
        self.home: Path = settings.home.absolute()
        self.tools: Path = self.home / "tools"
        self.held: dict[str, str] = {}
        """Identity -> provider of the agent sandboxes that this process has attached to."""
        self.memory = Memory()
        self.unwritten_away: set[str] = set()
        """Keys of notes about gateway outages that could not be written to the store."""
        self._providers: dict[str, SandboxProvider] = {}
        self._environments: dict[tuple[str, str], Environments] = {}
        self._agents: dict[str, Agent] = {}
        self._asks_engine = asyncio.Lock()
        self._reported: dict[str, tuple[float, Mapping[str, str]]] = {}
        self.signal_rules = read_signal_rules(settings.grading.signals_file)
        data_source_handlers.import_handlers(settings.handlers)

    @functools.cached_property
    def store(self) -> Store:
        return open_store(self.settings)

    @functools.cached_property
    def term(self) -> HostTerm:
        return HostTerm(self.home / "run" / "term", self.settings.host.silent_s)

    @functools.cached_property
    def seats(self) -> Seats:
        return Seats(self.home / "run" / "seats", self.settings.slots.agent)

    @functools.cached_property
    def gateway(self) -> GatewayControl:
        secrets, to = load_secrets(self.settings), FailoverTransport(self.gateways)
        given = self.settings.gateway.url
        base_url = given or self.settings.gateway_base_url
        return GatewayControl(base_url, secrets, transport=None if given else to)

    @functools.cached_property
    def gateways(self) -> Gateways:
        return Gateways(self.settings, self.store, load_secrets(self.settings))

    @functools.cached_property
    def quota_resets(self) -> QuotaResets:
        return QuotaResets(self.store, load_secret(self.settings))

    def provider(self, name: str) -> SandboxProvider:
        """Raises: ConfigurationError for an unknown name."""
        if name not in self._providers:
            provider: SandboxProvider = variant_registry.load(
                "sandbox", variant_registry.SANDBOXES, name
            )(self.settings)
            caps = self.settings.sandbox.caps.get(name)
            provider.waits_at_caps = caps is None and provider.account_caps is None
            home_folder.record_provider(self.home, name)
            self._providers[name] = provider
        return self._providers[name]

    def providers_used(self) -> list[SandboxProvider]:
        """The providers that may have sandboxes of this home and can be loaded."""
        found = []
        for name in home_folder.list_recorded_providers(self.home):
            try:
                found.append(self.provider(name))
            except PerdureError:
                continue
        return found

    def caps(self, name: str) -> AccountCaps | None:
        """Caps of this provider's account; None if it is not metered.

        Raises: ConfigurationError if caps are set for a provider that has no account.
        """
        provider, caps = self.provider(name), self.settings.sandbox.caps.get(name)
        if caps is not None and provider.host_bound:
            raise ConfigurationError(
                f"sandbox.caps names {name!r}, whose sandboxes are bound to a host and not to an "
                "account: set slots.boot and slots.grade of its workers instead"
            )
        return caps or provider.account_caps

    def reach(self, sandbox: str) -> Reach:
        """How sandboxes of this provider reach the gateway. Raises: ConfigurationError."""
        settings = self.settings
        return choose_reach(
            settings.gateway.reach, self.provider(sandbox), settings.gateway_base_url
        )

    def environments(self, sandbox: str, builder: str = "") -> Environments:
        """Environments for sandboxes of one provider.

        `builder`: the provider that builds them. If empty, the provider itself builds them if it
        runs on this host. Otherwise bubblewrap builds them here, and they are uploaded.
        """
        runs_on = self.provider(sandbox)
        if not builder:
            builder = sandbox if runs_on.sees_host else "bubblewrap"
        key = sandbox, builder
        if key not in self._environments:
            self._environments[key] = Environments(
                self.home / "environments",
                self.store,
                self.provider(builder),
                runs_on=runs_on,
                build_hosts=self.settings.sandbox.build_hosts,
            )
        return self._environments[key]

    async def reported_engine(self, model: str) -> Mapping[str, str]:
        """What the endpoint says it serves. Cached for a minute, because many rollouts boot at
        once.

        Empty if the endpoint does not list `model`. `request_models` refuses such a model where it
        can.
        """
        async with self._asks_engine:
            until, found = self._reported.get(model, (-math.inf, {}))
            if time.monotonic() >= until:
                found = {}
                with contextlib.suppress(ConfigurationError):
                    found = await reported(self.settings, engine_settings(self.settings), model)
                self._reported[model] = time.monotonic() + ENGINE_ASKED_EVERY_S, found
            return found

    def agent(self, name: str) -> Agent:
        """Raises: ConfigurationError for an unknown name."""
        if name not in self._agents:
            self._agents[name] = variant_registry.load("agent", variant_registry.AGENTS, name)()
        return self._agents[name]

    def handler(self, data_source: str) -> AgentHandler:
        """Raises: ConfigurationError for an unknown data source."""
        return data_source_handlers.handler_of(data_source)

"""Finds the engine that the settings name, after the gateway has started, so that it always starts.

Keys come from environment variables that the settings name. Their values are never logged or shown.
"""

import asyncio
import contextlib
from collections.abc import Callable

import httpx

from perdure.engines.api_allowance import ApiAllowance
from perdure.engines.base import Engine, HostedEngine, Wait
from perdure.engines.clients.anthropic_hosted import AnthropicHosted
from perdure.engines.clients.hosted_requests import engine_name
from perdure.engines.clients.openai_hosted import OpenAIHosted
from perdure.engines.engine_roster import InMemoryRoster, SharedRoster
from perdure.engines.engine_state import EngineSpec, name_of
from perdure.engines.health_check import TokenizerCanary
from perdure.engines.model_choice import ChosenModel, chosen_model, engines_of
from perdure.engines.pool.engine_fleet import PoolOptions
from perdure.engines.pool.engine_pool import EnginePool
from perdure.engines.reported_model import HOSTED, key_variable, named_engine, probed_kind
from perdure.errors import Boundary, ConfigurationError, GatewayUnavailable, PerdureError
from perdure.settings import process_environment
from perdure.settings.settings_tree import Settings
from perdure.types import DEFAULT_MODEL, ApiLimits

KINDS = ("vllm", "sglang", *HOSTED)
TOKENS = ("auto", "vllm", "sglang")
POLL_S = 1.0
"""Seconds between two searches for an engine while none is configured or registered."""
NO_ENGINE = (
    "no engine is configured: set PERDURE_ENGINE__URL (an inference server), "
    "or OPENAI_BASE_URL / ANTHROPIC_BASE_URL (a hosted API)"
)
LIMITS_OF_OWN = (
    "PERDURE_ENGINE__LIMITS is for hosted APIs, and the engine has token ids: leave it out, or set "
    "PERDURE_ENGINE__KIND=openai"
)


class ConfiguredEngine:
    """The engine that the settings name (the pool of token engines, or one hosted API), and the
    pool for other models."""

    def __init__(
        self,
        settings: Settings,
        client: httpx.AsyncClient,
        roster: SharedRoster | None = None,
        *,
        home_key: str = "",
        vocabulary: int | None = None,
        canary: Callable[[str], TokenizerCanary] | None = None,
        allowance: ApiAllowance | None = None,
    ) -> None:
        """`roster`: the roster that the gateways of a home share; a single process needs none.
        `home_key`: the key of engines behind an `EngineProxy`. `vocabulary`: how many token ids the
        settings' model has. `canary`: as in `PoolOptions`. `allowance`: the account's limits, if the
        engine is a hosted API."""
        self._settings = settings
        self._client = client
        self._allowance = allowance
        self._roster = roster or InMemoryRoster()
        self._engine: Engine | HostedEngine | None = None
        self._probing = asyncio.Lock()
        key_source = settings.engine.api_key_env
        options = PoolOptions(
            model=settings.engine.model or DEFAULT_MODEL,
            api_key=process_environment.named(key_source),
            key_source=key_source,
            home_key=home_key,
            vocabulary=vocabulary,
            tokenizer=settings.engine.tokenizer,
            canary=canary,
            agents=settings.engine.agents,
            hang_s=settings.engine.hang_s,
        )
        own = engine_specs(settings.engine.url, settings.engine.kind)
        self.pool = EnginePool(self._roster, client, own, options)
        """All engines of the roster. If the settings name a hosted API, only those of other models."""

    @property
    def name(self) -> str:
        """The engine in use, for /healthz; before the first call, the configured one."""
        return self._engine.name if self._engine else named_engine(self._settings).url or "none"

    def waits(self, session_id: str) -> Wait | None:
        """Since when the session's oldest call has waited for a usable answer, and why."""
        hosted = isinstance(self._engine, HostedEngine) and self._engine.chat.waits(session_id)
        return hosted or self.pool.waits(session_id)

    async def follow(self) -> None:
        """Find the token engines before a turn needs one, so that a trainer can publish at once.

        Returns once there are any. Cancel it at shutdown.
        """
        url = named_engine(self._settings).url
        while True:
            with contextlib.suppress(PerdureError):  # a turn that needs an engine reports it
                registered = await self._registered()
                if (url or registered) and (await self._has_token_ids() or registered):
                    await self.pool.start()
                    return
            await asyncio.sleep(POLL_S)

    async def _has_token_ids(self) -> bool:
        """Whether the settings' engine has token ids. Raises: GatewayUnavailable."""
        return isinstance(await self.current(), Engine)

    async def pool_engine(self) -> Engine:
        """The engine of models that only the roster has."""
        return Engine("engine pool", self.pool)

    async def choose(self, name: str, run: str) -> ChosenModel | None:
        """The model that a session of this run asks for as `name`; None if it is the settings'
        model, on engines of every run.

        Raises: ConfigurationError, which lists the available models; GatewayUnavailable,
        StoreUnavailable.
        """
        default, configured = self.pool.model, bool(named_engine(self._settings).url)
        roster = self.pool.fleet.used(await self._roster.read())
        try:
            model = chosen_model(roster, name, run=run, default=default, configured=configured)
        except (ConfigurationError, GatewayUnavailable):
            if not configured:
                raise
            if not await self._has_token_ids():  # a hosted API may have any model
                return ChosenModel(name=name, is_hosted=True)
            await self.pool.start()  # adds the settings' engines to the roster
            roster = self.pool.fleet.used(await self._roster.read())
            model = chosen_model(roster, name, run=run, default=default, configured=configured)
        reserved = any(one.run for one in engines_of(roster.engines, model, run, default))
        if model == default and not reserved:
            return None
        return ChosenModel(name=model, format=roster.formats.get(model), is_reserved=reserved)

    async def current(self) -> Engine | HostedEngine:
        """The engine. Raises: GatewayUnavailable, which names the missing setting or the unreachable
        engine."""
        if self._engine is None:
            async with self._probing:
                self._engine = self._engine or await self._find()
        return self._engine

    async def _find(self) -> Engine | HostedEngine:
        url, kind, _ = named_engine(self._settings)
        if not url and not await self._registered():
            raise GatewayUnavailable(NO_ENGINE, boundary=Boundary.ENGINE)
        specs = engine_specs(url) if url else ()
        if kind == "auto":
            kind = "vllm"
            if len(specs) == 1:
                kind = await probed_kind(specs[0].url, self._settings, self._client)
        if kind in TOKENS:
            if self._settings.engine.limits != ApiLimits():
                raise GatewayUnavailable(LIMITS_OF_OWN, boundary=Boundary.ENGINE)
            return Engine(", ".join(engine_name(kind, spec.url) for spec in specs), self.pool)
        return self._hosted(kind, url)

    async def _registered(self) -> bool:
        """Whether engines were added at run time. Engines from other gateways' settings do not count."""
        roster = await self._roster.read()
        return any(not (one.removed or one.from_settings) for one in roster.engines)

    def _hosted(self, kind: str, url: str) -> HostedEngine:
        model = self._settings.engine.model or process_environment.foreign(f"{kind.upper()}_MODEL")
        self.pool.fleet.ignore_settings_engines()
        hosted = OpenAIHosted if kind == "openai" else AnthropicHosted
        key_source = key_variable(self._settings, kind)
        api_key = process_environment.named(key_source)
        chat = hosted(
            url,
            model,
            self._client,
            api_key=api_key,
            key_source=key_source,
            park_after_s=self._settings.engine.park_after_s,
            allowance=self._allowance,
        )
        return HostedEngine(chat.name, chat)


def engine_specs(text: str, kind: str = "auto") -> list[EngineSpec]:
    """Parse `http://a:8000, http://b:8000=2` into engines with weights; none if the kind is hosted.

    Raises: ConfigurationError, which names the wrong part.
    """
    specs = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        url, _, weight = part.partition("=")
        try:
            name_of(url)
        except ValueError as error:
            raise ConfigurationError(f"PERDURE_ENGINE__URL: {part!r}: {error}") from None
        try:
            share = float(weight or 1)
        except ValueError:
            share = 0.0
        if not 0 < share < float("inf"):
            raise ConfigurationError(
                f"PERDURE_ENGINE__URL: the weight in {part!r} must be a number above 0"
            )
        specs.append(EngineSpec(url, share, "sglang" if kind == "sglang" else "vllm"))
    return specs if kind in TOKENS else []


def check_engine_settings(settings: Settings) -> None:
    """Raises: ConfigurationError, which names the setting."""
    kind = settings.engine.kind
    if kind not in ("auto", *KINDS):
        raise ConfigurationError(
            f"PERDURE_ENGINE__KIND is {kind!r}: use auto, {', '.join(KINDS[:-1])} or {KINDS[-1]}"
        )
    if kind in TOKENS and kind != "auto" and settings.engine.limits != ApiLimits():
        raise ConfigurationError(LIMITS_OF_OWN)
    url = named_engine(settings).url
    if any(not part.strip().startswith(("http://", "https://")) for part in url.split(",") if url):
        raise ConfigurationError("the engine's URL must start with http:// or https://")
    if len(engine_specs(url)) > 1 and kind not in TOKENS:
        raise ConfigurationError(
            f"PERDURE_ENGINE__URL names several engines, so PERDURE_ENGINE__KIND cannot be {kind}: "
            "use vllm or sglang"
        )

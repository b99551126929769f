"""Which engine the settings mean; asked when the first turn needs one, so a gateway always starts.

Keys come from variables named in the settings; their values are never logged or shown.
"""

import asyncio
import os

import httpx

from perdure.errors import Boundary, ConfigurationError, GatewayUnavailable
from perdure.gateway.base import DEFAULT_MODEL, Engine
from perdure.gateway.engines.anthropic_hosted import AnthropicHosted
from perdure.gateway.engines.openai_hosted import OpenAIHosted
from perdure.gateway.engines.vllm import VllmEngine
from perdure.settings import Settings

KINDS = ("vllm", "openai", "anthropic")
NO_ENGINE = (
    "no engine is configured: set PERDURE_ENGINE_URL (an inference server), "
    "or OPENAI_BASE_URL / ANTHROPIC_BASE_URL (a hosted API)"
)


class Engines:
    """The one engine of this gateway, found once. A pool with leases takes this seam later."""

    def __init__(self, settings: Settings, client: httpx.AsyncClient) -> None:
        self._settings = settings
        self._client = client
        self._engine: Engine | None = None
        self._probing = asyncio.Lock()

    @property
    def name(self) -> str:
        """The engine in use, for /healthz; what is configured while none was needed yet."""
        return self._engine.name if self._engine else _url_and_kind(self._settings)[0] or "none"

    async def current(self) -> Engine:
        """Raises: GatewayUnavailable naming the setting, or the engine that cannot be reached."""
        if self._engine is None:
            async with self._probing:
                self._engine = self._engine or await self._find()
        return self._engine

    async def _find(self) -> Engine:
        url, kind = _url_and_kind(self._settings)
        if not url:
            raise GatewayUnavailable(NO_ENGINE, boundary=Boundary.ENGINE)
        if kind == "auto":
            kind = await self._probe(url)
        return self._build(kind, url)

    async def _probe(self, url: str) -> str:
        """vLLM answers an empty request on its token route with a complaint, others with 404."""
        route = f"{url.rstrip('/').removesuffix('/v1')}/inference/v1/generate"
        try:
            response = await self._client.post(route, json={}, timeout=10.0)
        except httpx.TransportError as error:
            raise GatewayUnavailable(
                f"the engine at PERDURE_ENGINE_URL cannot be reached: {type(error).__name__}",
                boundary=Boundary.ENGINE,
            ) from None
        if response.status_code == httpx.codes.FORBIDDEN:
            raise GatewayUnavailable(
                "the engine refuses its token endpoint: start vLLM with --enable-scale-out, "
                "or set PERDURE_ENGINE_KIND=openai (trainable: false)",
                boundary=Boundary.ENGINE,
            )
        absent = (httpx.codes.NOT_FOUND, httpx.codes.METHOD_NOT_ALLOWED)
        return "openai" if response.status_code in absent else "vllm"

    def _build(self, kind: str, url: str) -> Engine:
        model = self._settings.engine_model
        if not model and kind != "vllm":
            model = os.environ.get(f"{kind.upper()}_MODEL", "")
        key_source = self._settings.engine_api_key_env
        if kind == "vllm":
            api_key = os.environ.get(key_source, "")
            vllm = VllmEngine(
                url, model or DEFAULT_MODEL, self._client, api_key=api_key, key_source=key_source
            )
            return Engine(vllm.name, tokens=vllm)
        hosted = OpenAIHosted if kind == "openai" else AnthropicHosted
        key_source = key_source or f"{kind.upper()}_API_KEY"
        api_key = os.environ.get(key_source, "")
        chat = hosted(url, model, self._client, api_key=api_key, key_source=key_source)
        return Engine(chat.name, chat=chat)


def check_engine_settings(settings: Settings) -> None:
    """Raises: ConfigurationError naming the setting."""
    kind = settings.engine_kind
    if kind not in ("auto", *KINDS):
        raise ConfigurationError(
            f"PERDURE_ENGINE_KIND is {kind!r}: use auto, {', '.join(KINDS[:-1])} or {KINDS[-1]}"
        )
    url = _url_and_kind(settings)[0]
    if url and not url.startswith(("http://", "https://")):
        raise ConfigurationError("the engine's URL must start with http:// or https://")


def _url_and_kind(settings: Settings) -> tuple[str, str]:
    if settings.engine_url:
        return settings.engine_url, settings.engine_kind
    for kind in ("openai", "anthropic"):
        url = os.environ.get(f"{kind.upper()}_BASE_URL", "")
        if url and settings.engine_kind in ("auto", kind):
            return url, kind
    return "", settings.engine_kind

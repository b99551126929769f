"""Finds the engine that the settings name and the model that its endpoint reports, which both belong to a
run's identity."""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from perdure.engines.engine_state import is_fenced, name_of
from perdure.errors import Boundary, ConfigurationError, GatewayUnavailable
from perdure.settings import process_environment
from perdure.settings.settings_tree import Settings
from perdure.types import DEFAULT_MODEL

if TYPE_CHECKING:
    import httpx

HOSTED = ("openai", "anthropic")
KIND_BY_STATUS = {400: "vllm", 422: "vllm", 404: "openai", 405: "openai"}
"""A server's kind, by the status of its answer to an empty request on vLLM's token route."""
ASK_S = 5.0
LISTED = 6
"""How many models an error message lists."""


class NamedEngine(NamedTuple):
    """The engine that settings or *_BASE_URL name, without `--engine`."""

    url: str
    """One URL, or several with weights; empty if none is named."""
    kind: str
    key_variable: str
    """The environment variable of its key; empty if none is known."""


def named_engine(settings: Settings) -> NamedEngine:
    url, kind = settings.engine.url, settings.engine.kind
    for hosted in HOSTED:
        named = process_environment.foreign(f"{hosted.upper()}_BASE_URL")
        if not url and named and kind in ("auto", hosted):
            url, kind = named, hosted
    return NamedEngine(url, kind, key_variable(settings, kind))


def engine_names(urls: str) -> set[str]:
    """`host:port` of each engine in `URL=WEIGHT,URL`."""
    names = set()
    for part in urls.split(","):
        with contextlib.suppress(ValueError):
            names.add(name_of(part.strip().partition("=")[0]))
    return names


def key_variable(settings: Settings, kind: str) -> str:
    """The environment variable of the key of an engine of this kind; empty if none is known."""
    return settings.engine.api_key_env or (f"{kind.upper()}_API_KEY" if kind in HOSTED else "")


async def probed_kind(url: str, settings: Settings, client: "httpx.AsyncClient") -> str:
    """The server's kind: vLLM answers an empty request on its token route with 400, other servers with 404.

    Raises: GatewayUnavailable for any other answer, which may come from a proxy or a busy server.
    """
    import httpx

    from perdure.engines.clients.engine_errors import trouble

    route = f"{url.rstrip('/').removesuffix('/v1')}/inference/v1/generate"
    key_source = settings.engine.api_key_env
    key = process_environment.named(key_source)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        response = await client.post(route, json={}, headers=headers, timeout=10.0)
    except httpx.TransportError as error:
        raise GatewayUnavailable(
            f"the engine at PERDURE_ENGINE__URL cannot be reached: {type(error).__name__}",
            boundary=Boundary.ENGINE,
        ) from None
    if response.status_code == httpx.codes.FORBIDDEN:
        raise GatewayUnavailable(
            "the engine refuses its token endpoint: start vLLM with --enable-scale-out, "
            "or set PERDURE_ENGINE__KIND=openai (trainable: false)",
            boundary=Boundary.ENGINE,
        )
    kind = KIND_BY_STATUS.get(response.status_code)
    if kind is None:
        told = trouble("PERDURE_ENGINE__URL", response.status_code, response.text, key_source)
        raise GatewayUnavailable(told, boundary=Boundary.ENGINE)
    return kind


def engine_settings(settings: Settings) -> dict[str, str]:
    """The settings that decide which model samples."""
    named = process_environment.foreign("OPENAI_MODEL") or process_environment.foreign(
        "ANTHROPIC_MODEL"
    )
    folder = Path(settings.engine.tokenizer)
    is_folder = (folder / "tokenizer.json").exists()
    return {
        "url": named_engine(settings).url,
        "kind": settings.engine.kind,
        "model": settings.engine.model or named,
        "tokenizer": str(folder.absolute()) if is_folder else str(folder),
    }


async def reported(
    settings: Settings, named: Mapping[str, str], asked: str = DEFAULT_MODEL
) -> dict[str, str]:
    """Model, root and tokenizer. `named`: from `engine_settings`; `asked`: the model in the request.

    Values that the endpoint does not report are left out. Raises: ConfigurationError if the request, the
    settings and the endpoint contradict each other.
    """
    url, setting = named.get("url", ""), named.get("model", "")
    served = await _served(url.split(",")[0].partition("=")[0].strip(), settings)
    _check_model("" if asked == DEFAULT_MODEL else asked, setting, url, served)
    model = setting or ("" if asked == DEFAULT_MODEL else asked)
    name = model or DEFAULT_MODEL
    # A fenced engine's name carries the number of its start, which is not part of the model's identity.
    of_name = [
        one for one in served if one.get("id") == name or is_fenced(name, str(one.get("id")))
    ]
    one = (of_name or served or [{}])[0]
    served_name = name if of_name else one.get("id")
    found = {"engine.model": model or served_name, "engine.root": one.get("root")}
    if served:
        found["engine.tokenizer"] = named.get("tokenizer")
    return {name: value for name, value in found.items() if isinstance(value, str) and value}


def _check_model(asked: str, setting: str, url: str, served: Sequence[Mapping[str, Any]]) -> None:
    """Raises: ConfigurationError. A dated or shortened name is accepted, because turns record the model
    that answered."""
    roots = {str(one.get("root")) for one in served if setting and one.get("id") == setting}
    if asked and setting and asked not in {setting, *roots}:
        raise ConfigurationError(
            f"--model {asked} contradicts the engine's setting, which asks for {setting} in every"
            " call: leave out either --model or PERDURE_ENGINE__MODEL"
        )
    names = [str(one[key]) for one in served for key in ("id", "root") if one.get(key)]
    wanted = setting or asked
    if wanted and names and not any(_alike(wanted, name) for name in names):
        some = ", ".join(dict.fromkeys(names[:LISTED]))
        how = "PERDURE_ENGINE__MODEL" if setting else "--model"
        raise ConfigurationError(
            f"{url} serves no model {wanted}: set {how} to one that it lists (such as {some})"
        )


def _alike(one: str, other: str) -> bool:
    """Whether two names may mean one model: `gpt-x` and `gpt-x-2026-01-01`, `org/name` and `name`."""
    short, long = sorted((name.lower().rpartition("/")[2] for name in (one, other)), key=len)
    return bool(short) and long.startswith(short)


async def _served(url: str, settings: Settings) -> list[dict[str, Any]]:
    """The models that `GET /v1/models` lists; empty if the endpoint lists none, or is Anthropic's."""
    if not url.startswith("http") or named_engine(settings).kind == "anthropic":
        return []
    import httpx

    try:
        answer, _ = await _asked_for_models(url, settings)
        listed = answer.raise_for_status().json()["data"]
    except (httpx.HTTPError, GatewayUnavailable, ValueError, LookupError, TypeError):
        return []
    return [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []


async def key_refusal(url: str, settings: Settings) -> str:
    """Why the endpoint refuses the key of the settings; empty if it accepts the key or does not answer.

    Raises: GatewayUnavailable if the engine's kind cannot be found out.
    """
    import httpx

    from perdure.engines.clients.engine_errors import KEY_STATUSES, trouble

    try:
        answer, key_source = await _asked_for_models(url, settings)
    except httpx.HTTPError:
        return ""
    if answer.status_code not in KEY_STATUSES:
        return ""
    return trouble(url, answer.status_code, answer.text, key_source)


async def _asked_for_models(url: str, settings: Settings) -> "tuple[httpx.Response, str]":
    """The answer to `GET /v1/models` with the engine's key, and the variable of that key.

    Raises: httpx.HTTPError; GatewayUnavailable.
    """
    import httpx

    base = url.rstrip("/")
    async with httpx.AsyncClient(timeout=ASK_S) as client:
        key_source = await _key_source(url, settings, client)
        key = process_environment.named(key_source)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        if named_engine(settings).kind == "anthropic":
            from perdure.engines.clients.anthropic_hosted import API_VERSION

            headers = {"anthropic-version": API_VERSION, "x-api-key": key}
        models = f"{base if base.endswith('/v1') else f'{base}/v1'}/models"
        return await client.get(models, headers=headers), key_source


async def _key_source(url: str, settings: Settings, client: "httpx.AsyncClient") -> str:
    """The variable of the key, as the gateway finds it: OpenAI's, if the server has no token endpoint."""
    named = named_engine(settings)
    known = named.key_variable or named.kind != "auto" or url != named.url
    if known or not process_environment.foreign("OPENAI_API_KEY"):
        return named.key_variable
    return key_variable(settings, await probed_kind(url, settings, client))

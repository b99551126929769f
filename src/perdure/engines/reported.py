"""Which engine the settings name, and what its endpoint says that it serves: part of a run's identity."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perdure.errors import ConfigurationError
from perdure.settings import environment
from perdure.settings.tree import Settings
from perdure.types import DEFAULT_MODEL

if TYPE_CHECKING:
    import httpx

ASK_S = 5.0
LISTED = 6
"""Models that an error names."""


def configured_engine(settings: Settings) -> str:
    """The engine that settings or *_BASE_URL name, without `--engine`; empty when there is none."""
    hosted = environment.foreign("OPENAI_BASE_URL") or environment.foreign("ANTHROPIC_BASE_URL")
    return settings.engine.url or hosted


def key_variable(settings: Settings) -> str:
    """The variable that the key of the configured engine comes from; empty when none is known."""
    if settings.engine.api_key_env or not (url := configured_engine(settings)):
        return settings.engine.api_key_env
    if settings.engine.url:
        hosted = {"openai": "OPENAI_API_KEY", "anthropic": "ANTHROPIC_API_KEY"}
        return hosted.get(settings.engine.kind, "")
    return (
        "OPENAI_API_KEY" if url == environment.foreign("OPENAI_BASE_URL") else "ANTHROPIC_API_KEY"
    )


def engine_settings(settings: Settings) -> dict[str, str]:
    """What decides who samples."""
    named = environment.foreign("OPENAI_MODEL") or environment.foreign("ANTHROPIC_MODEL")
    folder = Path(settings.engine.tokenizer)
    is_folder = (folder / "tokenizer.json").exists()
    return {
        "url": configured_engine(settings),
        "kind": settings.engine.kind,
        "model": settings.engine.model or named,
        "tokenizer": str(folder.absolute()) if is_folder else str(folder),
    }


async def reported(
    settings: Settings, named: Mapping[str, str], asked: str = DEFAULT_MODEL
) -> dict[str, str]:
    """Model, revision and tokenizer. `named`: as of `engine_settings`; `asked`: as the request says.

    What the endpoint does not say is left out; nothing is said where no engine is named. Raises:
    ConfigurationError if the request, the settings and the endpoint contradict each other.
    """
    url, setting = named.get("url", ""), named.get("model", "")
    served = await _served(url.split(",")[0].partition("=")[0].strip(), settings)
    _check_model("" if asked == DEFAULT_MODEL else asked, setting, url, served)
    model = setting or ("" if asked == DEFAULT_MODEL else asked)
    of_name = [one for one in served if one.get("id") == model]
    one = (of_name or served or [{}])[0]
    found = {"engine.model": model or one.get("id"), "engine.root": one.get("root")}
    if served:
        found["engine.tokenizer"] = named.get("tokenizer")
    return {name: value for name, value in found.items() if isinstance(value, str) and value}


def _check_model(asked: str, setting: str, url: str, served: Sequence[Mapping[str, Any]]) -> None:
    """A dated or shortened name is no contradiction: the turns record what answers."""
    roots = {str(one.get("root")) for one in served if setting and one.get("id") == setting}
    if asked and setting and asked not in {setting, *roots}:
        raise ConfigurationError(
            f"--model {asked} contradicts the engine's setting, which asks for {setting} in every"
            " call: leave one of --model and PERDURE_ENGINE__MODEL out"
        )
    names = [str(one[key]) for one in served for key in ("id", "root") if one.get(key)]
    wanted = setting or asked
    if wanted and names and not any(_alike(wanted, name) for name in names):
        some = ", ".join(dict.fromkeys(names[:LISTED]))
        how = "PERDURE_ENGINE__MODEL" if setting else "--model"
        raise ConfigurationError(
            f"{url} serves no model {wanted}: name one that it lists with {how} (such as {some})"
        )


def _alike(one: str, other: str) -> bool:
    """`gpt-x` and `gpt-x-2026-01-01`, `org/name` and `name`."""
    short, long = sorted((name.lower().rpartition("/")[2] for name in (one, other)), key=len)
    return bool(short) and long.startswith(short)


async def _served(url: str, settings: Settings) -> list[dict[str, Any]]:
    """What `GET /models` lists; empty if the endpoint does not say, or is Anthropic's."""
    if not url.startswith("http") or _is_anthropics(url, settings):
        return []
    import httpx

    try:
        listed = (await _asked_for_models(url, settings)).raise_for_status().json()["data"]
    except (httpx.HTTPError, ValueError, LookupError, TypeError):
        return []
    return [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []


async def key_refusal(url: str, settings: Settings) -> str:
    """What the endpoint says against the key of the settings; empty if it takes the key, or does not answer."""
    import httpx

    from perdure.engines.clients.engine_refusal import KEY_STATUSES, trouble

    try:
        answer = await _asked_for_models(url, settings)
    except httpx.HTTPError:
        return ""
    if answer.status_code not in KEY_STATUSES:
        return ""
    return trouble(url, answer.status_code, answer.text, key_variable(settings))


async def _asked_for_models(url: str, settings: Settings) -> "httpx.Response":
    """The answer to `GET /v1/models` with the engine's key. Raises: httpx.HTTPError."""
    import httpx

    base, key = url.rstrip("/"), environment.named(key_variable(settings))
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    if _is_anthropics(url, settings):
        from perdure.engines.clients.anthropic_hosted import API_VERSION

        headers = {"anthropic-version": API_VERSION, "x-api-key": key}
    async with httpx.AsyncClient(timeout=ASK_S) as client:
        models = f"{base if base.endswith('/v1') else f'{base}/v1'}/models"
        return await client.get(models, headers=headers)


def _is_anthropics(url: str, settings: Settings) -> bool:
    return settings.engine.kind == "anthropic" or url == environment.foreign("ANTHROPIC_BASE_URL")

"""The sampling parameters that hosted APIs accept. Others are refused by name, never dropped.

Imports little, so that a command can refuse a parameter before it starts a run.
"""

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from perdure.errors import ConfigurationError
from perdure.settings import process_environment
from perdure.types import Sampling

OPENAI = frozenset(
    {"temperature", "top_p", "presence_penalty", "frequency_penalty", "stop", "seed"}
)
OTHER_SERVERS = frozenset({"top_k", "min_p", "repetition_penalty"})
"""Parameters that vLLM and other servers accept in a chat completion, but that OpenAI refuses."""
ANTHROPIC = frozenset({"temperature", "top_p", "top_k", "stop"})
GATEWAY_FIELDS = frozenset({"decided_by", "max_tokens_per_turn", "max_context_tokens"})
"""Fields of `Sampling` that the gateway applies itself."""


def fields_of(kind: str, url: str) -> frozenset[str]:
    """The fields of `Sampling` that a hosted API of this kind accepts."""
    if kind == "anthropic":
        return ANTHROPIC
    return OPENAI if is_openai_api(url) else OPENAI | OTHER_SERVERS


def is_openai_api(url: str) -> bool:
    """Whether this is OpenAI's own API, which differs from other servers with the same protocol."""
    return (urlsplit(url).hostname or "").endswith("openai.com")


def set_fields(rules: Sampling) -> dict[str, Any]:
    """The sampling parameters that differ from their defaults."""
    default = Sampling().model_dump()
    found = {name: value for name, value in rules.model_dump().items() if value != default[name]}
    if found.get("top_k") == 0:  # off, like the default
        del found["top_k"]
    return {name: value for name, value in found.items() if name not in GATEWAY_FIELDS}


def check_hosted_sampling(rules: Sampling, kind: str, url: str) -> None:
    """Raises: ConfigurationError, which names the parameters that a hosted API of this kind lacks."""
    lacking = sorted(set(set_fields(rules)) - fields_of(kind, url))
    if lacking:
        names = ", ".join(f"sampling.{name}" for name in lacking)
        raise ConfigurationError(
            f"{names}: not supported by hosted APIs of kind {kind}. Leave it out, or use an engine "
            "with token ids"
        )


def hosted_kind(engine: Mapping[str, str]) -> str:
    """The kind of a hosted API, if the settings tell it; empty for other engines.

    `engine`: from `reported.engine_settings`.
    """
    url, kind = engine.get("url", ""), engine.get("kind", "")
    if kind in ("openai", "anthropic"):
        return kind
    hosted = (one for one in ("openai", "anthropic") if kind == "auto" and url)
    return next(
        (one for one in hosted if process_environment.foreign(f"{one.upper()}_BASE_URL") == url), ""
    )

"""The process's environment. No other module reads it. Light, so that commands start fast."""

import os
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

OWN = {
    "PERDURE_CONFIG": "the TOML file to read, `perdure.toml` by default",
    "PERDURE_DEBUG": "`1` shows the traceback of an error",
}
"""Perdure's variables that are not settings, because they are read before the settings."""

INSIDE = frozenset(("PERDURE_BOX", "PERDURE_EXEC", "PERDURE_OWNER", "PERDURE_SESSION_KEY"))
"""Variables that Perdure sets inside sandboxes: a process's sandbox, its command, the owner of the
files, the agent's key for the gateway."""


class Foreign(NamedTuple):
    """Variables of another tool. `names` may end in `*`. uv's and npm's count in either letter
    case."""

    tool: str
    names: tuple[str, ...]
    about: str


FOREIGN = (
    Foreign("Temporal", ("TEMPORAL_*",), "the server and its profile"),
    Foreign("OpenTelemetry", ("OTEL_*",), "destination and sampling of traces"),
    Foreign("AWS SDK", ("AWS_*",), "credentials and region of S3"),
    Foreign(
        "OpenAI",
        ("OPENAI_BASE_URL", "OPENAI_API_KEY", "OPENAI_MODEL"),
        "engine, key and model, if the `engine` settings set none",
    ),
    Foreign(
        "Anthropic",
        ("ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY", "ANTHROPIC_MODEL"),
        "the same, if OpenAI's are not set",
    ),
    Foreign("MCP servers", ("MCP_*",), "values of `${...}` in their headers, for gateways"),
    Foreign("Docker", ("DOCKER_HOST", "DOCKER_CONTEXT", "DOCKER_CONFIG"), "which engine to use"),
    Foreign(
        "Podman",
        ("XDG_RUNTIME_DIR", "CONTAINERS_CONF", "CONTAINERS_STORAGE_CONF", "REGISTRY_AUTH_FILE"),
        "settings, logins, and location of images and containers",
    ),
    Foreign(
        "Apptainer",
        ("APPTAINER_CONFIGDIR", "APPTAINER_CACHEDIR", "APPTAINER_TMPDIR"),
        "location of the user's instances and cache",
    ),
    Foreign(
        "Kubernetes",
        ("KUBECONFIG", "KUBERNETES_SERVICE_HOST"),
        "the cluster",
    ),
    Foreign("E2B", ("E2B_*",), "account and address"),
    Foreign("Daytona", ("DAYTONA_*",), "account and address"),
    Foreign("Modal", ("MODAL_*",), "account and address"),
    Foreign("Ray", ("RAY_*",), "the cluster, and Ray's options"),
    Foreign("Slurm", ("SLURM*",), "a worker's task and node"),
    Foreign("npm", ("NPM_CONFIG_*",), "the registry of agent programs"),
    Foreign(
        "uv and pip",
        ("UV_*", "PIP_*"),
        "the index of packages",
    ),
    Foreign("pyenv", ("PYENV_ROOT",), "other versions of Python"),
    Foreign(
        "TLS libraries",
        ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
        "certificates to trust, also in builds",
    ),
    Foreign(
        "HTTP clients",
        ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"),
        "the proxy for downloads, also in builds",
    ),
    Foreign("Hugging Face", ("HF_*",), "cache and token for datasets"),
    Foreign("the system", ("HOME", "USER", "PATH", "PYTHONPATH"), "their usual meaning"),
)
"""Variables of other tools keep their names, so that a host configured for those tools needs no
change."""


def toml_file() -> Path:
    """The TOML file to read. It need not exist."""
    return Path(os.environ.get("PERDURE_CONFIG") or "perdure.toml").absolute()


def debug() -> bool:
    """Whether to show the traceback of an error."""
    return os.environ.get("PERDURE_DEBUG") == "1"


def foreign(name: str) -> str:
    """The value of another tool's variable, or "".

    Raises: LookupError for a variable that `FOREIGN` does not list.
    """
    if not any(fnmatchcase(name.upper(), one) for tool in FOREIGN for one in tool.names):
        raise LookupError(f"{name} is missing in perdure.settings.process_environment.FOREIGN")
    return os.environ.get(name, "")


def assignments(names: Iterable[str]) -> list[str]:
    """`NAME=value` for each of these variables that is set, as arguments of `env`."""
    return [f"{name}={value}" for name in names if (value := foreign(name))]


def matching(pattern: re.Pattern[str]) -> dict[str, str]:
    """All variables whose names match."""
    return {name: value for name, value in os.environ.items() if pattern.match(name)}


def named(name: str) -> str:
    """The value of a variable that a setting names, such as the variable of an API key, or ""."""
    return os.environ.get(name, "") if name else ""


def variables() -> Mapping[str, str]:
    """All variables, for a child process or a search."""
    return os.environ


def preset(values: Mapping[str, str]) -> None:
    """Set variables for a library that reads them at import. Values that the user set stay."""
    for name, value in values.items():
        os.environ.setdefault(name, value)


def force(values: Mapping[str, str]) -> None:
    """Like `preset`, but overrides values that the user set."""
    os.environ.update(values)

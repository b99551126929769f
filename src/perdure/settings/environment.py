"""The process's environment: no other module reads it. Light, so that a command may start with it."""

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
"""Ours, in the environment only: they are read before the settings."""

INSIDE = {
    "PERDURE_BOX": "the sandbox that a process belongs to",
    "PERDURE_EXEC": "the command that a process belongs to",
    "PERDURE_OWNER": "the user of a sandbox's files",
    "PERDURE_SESSION_KEY": "the agent's key for the gateway",
}
"""Perdure sets them inside sandboxes."""


class Foreign(NamedTuple):
    """Variables of another tool. `names` may end in `*`; uv's and npm's count in either case."""

    tool: str
    names: tuple[str, ...]
    about: str


FOREIGN = (
    Foreign("Temporal", ("TEMPORAL_*",), "address, namespace, TLS and profile of the server"),
    Foreign("OpenTelemetry", ("OTEL_*",), "where traces go, sampling, names of services"),
    Foreign("AWS SDK", ("AWS_*",), "credentials and region of an S3 store"),
    Foreign(
        "OpenAI",
        ("OPENAI_BASE_URL", "OPENAI_API_KEY", "OPENAI_MODEL"),
        "the engine, its key and its model, if `engine` does not say them",
    ),
    Foreign(
        "Anthropic",
        ("ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY", "ANTHROPIC_MODEL"),
        "the same, if OpenAI's are not set",
    ),
    Foreign("Docker", ("DOCKER_HOST", "DOCKER_CONTEXT", "DOCKER_CONFIG"), "which engine to use"),
    Foreign(
        "Podman",
        ("XDG_RUNTIME_DIR", "CONTAINERS_STORAGE_CONF"),
        "where the user's images and containers are",
    ),
    Foreign(
        "Apptainer",
        ("APPTAINER_CONFIGDIR", "APPTAINER_CACHEDIR", "APPTAINER_TMPDIR"),
        "where the user's instances and cache are",
    ),
    Foreign(
        "Kubernetes",
        ("KUBECONFIG", "KUBERNETES_SERVICE_HOST"),
        "which cluster; the second is set in every pod",
    ),
    Foreign("E2B", ("E2B_*",), "account and address of the service"),
    Foreign("Daytona", ("DAYTONA_*",), "account and address of the service"),
    Foreign("Ray", ("RAY_*",), "the cluster to join, and Ray's own options"),
    Foreign("npm", ("NPM_CONFIG_*",), "the registry that agents' programs come from, and its keys"),
    Foreign(
        "uv and pip",
        ("UV_*", "PIP_*"),
        "the index that environments and agents' programs come from",
    ),
    Foreign("pyenv", ("PYENV_ROOT",), "where other versions of Python are"),
    Foreign(
        "TLS libraries",
        ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
        "certificates to trust; builds of environments get them too",
    ),
    Foreign(
        "HTTP clients",
        ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"),
        "the proxy of downloads; builds of environments get them too",
    ),
    Foreign("Hugging Face", ("HF_*",), "cache and token for datasets; its library reads them"),
    Foreign("the system", ("HOME", "USER", "PATH", "PYTHONPATH"), "as everywhere"),
)
"""Variables of other tools keep their names, so that a host that is set up for those tools needs no
change."""


def toml_file() -> Path:
    """The file that would be read; it need not exist."""
    return Path(os.environ.get("PERDURE_CONFIG") or "perdure.toml").absolute()


def debug() -> bool:
    """Errors come with their traceback."""
    return os.environ.get("PERDURE_DEBUG") == "1"


def foreign(name: str) -> str:
    """The value of another tool's variable, or "".

    Raises: LookupError for a variable that `FOREIGN` does not list.
    """
    if not any(fnmatchcase(name.upper(), one) for tool in FOREIGN for one in tool.names):
        raise LookupError(f"{name} is missing in perdure.settings.environment.FOREIGN")
    return os.environ.get(name, "")


def assignments(names: Iterable[str]) -> list[str]:
    """`NAME=value` for each of these variables of other tools that is set, as `env` takes them."""
    return [f"{name}={value}" for name in names if (value := foreign(name))]


def matching(pattern: re.Pattern[str]) -> dict[str, str]:
    """All variables whose names match."""
    return {name: value for name, value in os.environ.items() if pattern.match(name)}


def named(name: str) -> str:
    """The value of the variable that a setting names, or "": keys are given so."""
    return os.environ.get(name, "") if name else ""


def variables() -> Mapping[str, str]:
    """All of them, for a child process or a search."""
    return os.environ


def preset(values: Mapping[str, str]) -> None:
    """For a library that reads them when it is imported: what the user set stays."""
    for name, value in values.items():
        os.environ.setdefault(name, value)


def force(values: Mapping[str, str]) -> None:
    """As `preset`, over what the user set."""
    os.environ.update(values)

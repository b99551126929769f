"""Image names as each provider uses them, mirrors and routing tags, and one pull per host.

Owns the names, the lock around a pull, and what a failed pull means. The providers run the commands
that pull. A row names the image of its instance (`perdure.instances.images`).
"""

import hashlib
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from perdure.errors import (
    Boundary,
    ConfigurationError,
    ControlPlaneError,
    InstanceError,
    PerdureError,
)
from perdure.sandboxes.locks import locked

MIRROR_VARIABLE = "PERDURE_SANDBOX__IMAGE_MIRROR"
"""`mirror.example/hub/` is put before every name that is pulled; `docker.io=mirror.example/hub,...`
replaces registries instead."""

MAP_VARIABLE = "PERDURE_SANDBOX__IMAGE_MAP"
"""A JSON file: image -> what was built from it, for all providers or `{"e2b": ..., "daytona": ...}`."""
TAGS_VARIABLES = (
    "PERDURE_E2B__METADATA_FILE",
    "SWE_SANDBOX_METADATA_FILE",
    "SLIME_AGENT_SANDBOX_METADATA_FILE",
)
"""A JSON file of routing tags, for a gateway that finds the image of a sandbox by its metadata."""
KEY_VARIABLES = (
    "PERDURE_E2B__METADATA_IMAGE_KEY",
    "SWE_SANDBOX_IMAGE_METADATA_KEY",
    "SLIME_AGENT_SANDBOX_IMAGE_METADATA_KEY",
)

PULL_TIMEOUT_S = 1200.0
LIMIT_PASSES_S = 60.0
"""Seconds to wait after a registry's rate limit. Registries count over minutes or hours, so an earlier
try only adds to the count."""

NEVER_TO_BE_PULLED = (
    "manifest unknown",
    "manifest for",
    "name unknown",
    "not found",
    "no matching manifest",
    "does not exist",
    "unauthorized",
    "denied",
    "invalid reference",
)
TOO_MANY = ("toomanyrequests", "too many requests", "rate limit")
NOT_REACHED = ("no such host", "timeout", "connection refused", "tls handshake", "server error")


def prebuilt(provider: str, image: str | None) -> str | None:
    """The template, snapshot or image that this provider has for an image, by `PERDURE_SANDBOX__IMAGE_MAP`.

    Raises: ConfigurationError naming the file and what is wrong in it.
    """
    path = os.environ.get(MAP_VARIABLE)
    if image is None or not path:
        return image
    found = _json_object(path, MAP_VARIABLE).get(image, image)
    if isinstance(found, dict):
        found = found.get(provider, image)
    if not isinstance(found, str):
        raise ConfigurationError(f"{MAP_VARIABLE}: {path}: {image!r} must name a string")
    return found


def routing_tags(image: str | None) -> dict[str, str]:
    """Tags to give a sandbox at its creation, the image among them; empty where none are set.

    Raises: ConfigurationError naming the variable and the fix.
    """
    variable, path = _first_set(TAGS_VARIABLES)
    if not path:
        return {}
    tags = {str(key): str(value) for key, value in _json_object(path, variable).items()}
    key_variable, key = _first_set(KEY_VARIABLES)
    if not key:
        raise ConfigurationError(f"{variable} is set: set {key_variable} to its key of the image")
    if key not in tags:
        raise ConfigurationError(
            f"{variable}: {path} lacks the key {key!r} that {key_variable} names"
        )
    return {**tags, key: image} if image is not None else tags


def _first_set(names: tuple[str, ...]) -> tuple[str, str]:
    return next(((name, v) for name in names if (v := os.environ.get(name))), (names[0], ""))


def _json_object(path: str, variable: str) -> dict[str, Any]:
    try:
        found = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{variable}: {path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ConfigurationError(f"{variable}: {path} must hold one JSON object")
    return found


def mirrored(name: str) -> str:
    """The name to pull, after `PERDURE_SANDBOX__IMAGE_MIRROR`.

    Example: with `docker.io=mirror.example/hub`, "python:3.11" -> "mirror.example/hub/library/python:3.11"
    """
    setting = os.environ.get(MIRROR_VARIABLE, "")
    if "=" not in setting:
        return setting + name
    registry, path = _parts(name)
    for rule in setting.split(","):
        wanted, _, instead = rule.strip().partition("=")
        if wanted == registry:
            return f"{instead.rstrip('/')}/{path}"
    return name


def _parts(name: str) -> tuple[str, str]:
    """Registry and the rest, as Docker reads a name."""
    first, slash, rest = name.partition("/")
    if slash and ("." in first or ":" in first or first == "localhost"):
        return first, rest
    return "docker.io", name if slash else f"library/{name}"


def key_of(name: str) -> str:
    """The file name that stands for an image."""
    return hashlib.sha256(name.encode()).hexdigest()[:32]


async def present(
    name: str,
    locks: Path,
    find: Callable[[str], Awaitable[str | None]],
    pull: Callable[[str], Awaitable[str]],
) -> str:
    """The id of the image. Processes of this host that ask for it at once pull it only once.

    Raises: InstanceError when the registry does not have the image or denies it; ControlPlaneError
    when it does not answer.
    """
    if found := await _found(name, find):
        return found
    async with locked(locks / key_of(name)):
        return await _found(name, find) or await pull(mirrored(name))


async def _found(name: str, find: Callable[[str], Awaitable[str | None]]) -> str | None:
    found = await find(name)
    if found is None and (other := mirrored(name)) != name:
        return await find(other)
    return found


def refused(name: str, said: str) -> PerdureError:
    """The error of a failed pull: InstanceError when it cannot succeed, else one that is retried."""
    words = said.lower()
    if any(word in words for word in TOO_MANY):
        return ControlPlaneError(f"image {name!r}: {said}", retry_after=LIMIT_PASSES_S)
    passing = any(word in words for word in NOT_REACHED)
    if not passing and any(word in words for word in NEVER_TO_BE_PULLED):
        return InstanceError(
            f"image {name!r} cannot be pulled: {said}; correct environment.image of the row, or log in "
            "to its registry",
            boundary=Boundary.INSTANCE,
        )
    return ControlPlaneError(f"image {name!r}: {said}")

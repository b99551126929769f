"""Image names as each provider uses them, mirrors and routing tags, and one pull per host.

Owns the names, the lock around a pull, and what a failed pull means. The providers choose the
commands that pull. A row names the image of its instance (`perdure.instances.rows.images`).
"""

import hashlib
import json
import subprocess
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from perdure.errors import (
    Boundary,
    ConfigurationError,
    ControlPlaneError,
    InstanceError,
    PerdureError,
    RetryHere,
)
from perdure.sandboxes.locks import locked

MAP_VARIABLE = "PERDURE_SANDBOX__IMAGE_MAP"
TAGS_VARIABLE = "PERDURE_E2B__METADATA_FILE"
KEY_VARIABLE = "PERDURE_E2B__METADATA_IMAGE_KEY"

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


def prebuilt(provider: str, image: str | None, image_map: Path | None) -> str | None:
    """The template, snapshot or image that this provider has for an image, by the JSON file
    `image_map`: image -> what was built from it, for all providers or `{"e2b": ..., "daytona": ...}`.

    Raises: ConfigurationError naming the file and what is wrong in it.
    """
    if image is None or image_map is None:
        return image
    found = json_object(image_map, MAP_VARIABLE).get(image, image)
    if isinstance(found, dict):
        found = found.get(provider, image)
    if not isinstance(found, str):
        raise ConfigurationError(f"{MAP_VARIABLE}: {image_map}: {image!r} must name a string")
    return found


def routing_tags(image: str | None, file: Path | None, key: str) -> dict[str, str]:
    """Tags to give a sandbox at its creation, the image among them under `key`; empty without a
    file. A gateway that finds the image of a sandbox by its metadata asks for them.

    Raises: ConfigurationError naming the variable and the fix.
    """
    if file is None:
        return {}
    tags = {str(name): str(value) for name, value in json_object(file, TAGS_VARIABLE).items()}
    if not key:
        raise ConfigurationError(
            f"{TAGS_VARIABLE} is set: set {KEY_VARIABLE} to its key of the image"
        )
    if key not in tags:
        raise ConfigurationError(
            f"{TAGS_VARIABLE}: {file} lacks the key {key!r} that {KEY_VARIABLE} names"
        )
    return {**tags, key: image} if image is not None else tags


def json_object(path: Path, variable: str) -> dict[str, Any]:
    """The JSON file that a variable names. Raises: ConfigurationError naming both."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{variable}: {path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ConfigurationError(f"{variable}: {path} must hold one JSON object")
    return found


def mirrored(name: str, mirror: str) -> str:
    """The name to pull. `mirror`: `mirror.example/hub/` is put before every name;
    `docker.io=mirror.example/hub,...` replaces registries.

    Example: mirrored("python:3.11", "docker.io=mirror.example/hub") -> "mirror.example/hub/library/python:3.11"
    """
    if "=" not in mirror:
        return mirror + name
    registry, path = _parts(name)
    for rule in mirror.split(","):
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
    """The file name that Perdure uses for an image."""
    return hashlib.sha256(name.encode()).hexdigest()[:32]


async def present(
    name: str,
    locks: Path,
    mirror: str,
    find: Callable[[str], Awaitable[str | None]],
    pull: Callable[[str], Awaitable[str]],
) -> str:
    """The id of the image. Processes of this host that ask for it at once pull it only once.

    Raises: InstanceError when the registry does not have the image or denies it; ControlPlaneError
    when it does not answer.
    """
    if found := await _found(name, mirror, find):
        return found
    async with locked(locks / key_of(name)):
        return await _found(name, mirror, find) or await pull(mirrored(name, mirror))


async def _found(
    name: str, mirror: str, find: Callable[[str], Awaitable[str | None]]
) -> str | None:
    found = await find(name)
    if found is None and (other := mirrored(name, mirror)) != name:
        return await find(other)
    return found


def printed(command: Sequence[str], what: str) -> str:
    """What a program that handles images printed. Raises: RetryHere with its last line."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            check=False,
            timeout=PULL_TIMEOUT_S,
            text=True,
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        raise RetryHere(
            f"{what} took more than {PULL_TIMEOUT_S:.0f} s", boundary=Boundary.SANDBOX
        ) from None
    if done.returncode:
        words = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise RetryHere(f"{what}: {words[0]}", boundary=Boundary.SANDBOX)
    return done.stdout


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

"""Images for providers with a store of their own: where to pull from, one pull for all who wait.

Owns the names, the lock and the verdict on a refused pull; the engines' commands are the providers'.
"""

import hashlib
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

from perdure.errors import Boundary, ControlPlaneError, InstanceError, PerdureError
from perdure.sandboxes.box import locked

MIRROR_VARIABLE = "PERDURE_IMAGE_MIRROR"
"""`mirror.example/hub/` is put before every name that is pulled; `docker.io=mirror.example/hub,...`
replaces registries instead."""

PULL_TIMEOUT_S = 1200.0
LIMIT_PASSES_S = 60.0
"""Registries count pulls for minutes or hours: asking sooner only adds to the count."""

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


def mirrored(name: str) -> str:
    """The name to pull, by `PERDURE_IMAGE_MIRROR`.

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
    """A file name for an image."""
    return hashlib.sha256(name.encode()).hexdigest()[:32]


async def present(
    name: str,
    locks: Path,
    find: Callable[[str], Awaitable[str | None]],
    pull: Callable[[str], Awaitable[str]],
) -> str:
    """The id of the image, pulled once however many processes of this host ask for it.

    Raises: InstanceError when the registry has no such image for us; ControlPlaneError when it does
    not answer.
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
    """What to do about a pull that failed: nothing for this instance, or again."""
    words = said.lower()
    if any(word in words for word in TOO_MANY):
        return ControlPlaneError(f"image {name!r}: {said}", retry_after=LIMIT_PASSES_S)
    passing = any(word in words for word in NOT_REACHED)
    if not passing and any(word in words for word in NEVER_TO_BE_PULLED):
        return InstanceError(
            f"image {name!r} cannot be had: {said}; correct environment.image of the row, or log in "
            "to its registry",
            boundary=Boundary.INSTANCE,
        )
    return ControlPlaneError(f"image {name!r}: {said}")

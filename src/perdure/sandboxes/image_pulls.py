"""One pull of an image at a time on a host, and what a failed pull means.

The providers choose the commands that find and pull an image. Names and mirrors are in `image_names`.
"""

import asyncio
import re
import subprocess
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from perdure.errors import (
    Boundary,
    ConfigurationError,
    ControlPlaneError,
    InstanceError,
    PerdureError,
    RetryHere,
)
from perdure.sandboxes import image_names
from perdure.sandboxes.file_locks import locked

MIRROR_VARIABLE = "PERDURE_SANDBOX__IMAGE_MIRROR"
PULL_TIMEOUT_S = 1200.0
LIMIT_PASSES_S = 60.0
"""Seconds to wait after a registry's rate limit that names no time, or after a full disk. Registries
count over minutes or hours, so an earlier pull only adds to the count."""

FULL_DISK = ("no space left on device", "disk quota exceeded")
TOO_MANY = ("toomanyrequests", "too many requests", "rate limit")
NOT_REACHED = ("no such host", "timeout", "connection refused", "tls handshake", "server error")
LOG_IN = (
    "unauthorized",
    "authentication required",
    "no basic auth credentials",
    "getting credentials",
    "username and password",
    "username or password",
)
PERMANENT_PULL_ERRORS = (
    "manifest unknown",
    "manifest for",
    "name unknown",
    "not found",
    "does not exist",
    "denied",
    "invalid reference",
)
"""`denied` is also what registries answer for a repository that does not exist."""
OTHER_ARCHITECTURE = (
    "no matching manifest",
    "no match for platform",
    "no image found in manifest list for architecture",
    "no image found in image index for architecture",
)
"""What Docker and Podman say if an image was published only for other machines."""
AFTER = re.compile(r"retry-after: *((?:[\d.]+(?:µs|us|ms|s|m|h))+|\d+)")
PART = re.compile(r"([\d.]+)(µs|us|ms|s|m|h)")
UNITS = {"µs": 1e-6, "us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}

Find = Callable[[str], Awaitable[str | None]]
Pull = Callable[[str], Awaitable[str]]


@dataclass(frozen=True)
class Puller:
    """Advice in error messages about the program that pulls."""

    log_in: str
    """How to give it the credentials of `{registry}`."""
    storage: str
    """Where it keeps images."""


class PullFailed(PerdureError):
    """The message is what the program that pulls printed."""


class Pulls:
    """The pulls of one process. `locks`: the lock folder that all processes of this host share."""

    def __init__(self, locks: Path, mirror: str, puller: Puller) -> None:
        self._locks = locks
        self._mirror = mirror
        self._puller = puller
        self._running: dict[str, asyncio.Task[str]] = {}

    async def present(self, name: str, find: Find, pull: Pull) -> str:
        """The id of the image. Callers that ask for it during a pull get that pull's image or error.

        `pull` raises PullFailed. Raises: InstanceError when the registry does not have the image;
        ConfigurationError when it refuses the credentials; ControlPlaneError when it does not answer
        or the disk is full.
        """
        if found := await self._found(name, find):
            return found
        if (pulling := self._running.get(name)) is None:
            pulling = asyncio.create_task(self._pulled(name, find, pull))
            self._running[name] = pulling
            pulling.add_done_callback(lambda done: self._ended(name, done))
        return await asyncio.shield(pulling)

    async def _pulled(self, name: str, find: Find, pull: Pull) -> str:
        wanted = image_names.mirrored(name, self._mirror)
        async with locked(self._locks / image_names.key_of(name)):
            try:
                return await self._found(name, find) or await pull(wanted)
            except PullFailed as error:
                raise refused(wanted, str(error), self._puller, asked=name) from None

    async def _found(self, name: str, find: Find) -> str | None:
        found = await find(name)
        if found is None and (other := image_names.mirrored(name, self._mirror)) != name:
            return await find(other)
        return found

    def _ended(self, name: str, pulling: asyncio.Task[str]) -> None:
        del self._running[name]
        if not pulling.cancelled():
            pulling.exception()  # no caller may be left to retrieve it


def refused(name: str, said: str, puller: Puller, *, asked: str = "") -> PerdureError:
    """The error for a failed pull of `name`; its type says whether a retry can help.

    `asked`: the image's name in the row, if a mirror's name was pulled.
    """
    words = said.lower().replace("permission denied", "")  # from the disk, not from a registry

    def says(phrases: Sequence[str]) -> bool:
        return any(phrase in words for phrase in phrases)

    what = f"image {name!r}: {said}"
    fix = "correct environment.image of the row"
    if asked not in ("", name):
        fix += f" ({asked!r}) or {MIRROR_VARIABLE}"
    if says(FULL_DISK):
        free = f"{what}; free space on the disk of {puller.storage}"
        return ControlPlaneError(free, retry_after=LIMIT_PASSES_S)
    if says(TOO_MANY):
        return ControlPlaneError(what, retry_after=_seconds(words))
    if says(NOT_REACHED):
        return ControlPlaneError(what)
    if says(OTHER_ARCHITECTURE):
        return InstanceError(
            f"{what}; it was published for other architectures: run the workers in a VM of one of "
            "these, or use --sandbox e2b, daytona, modal, or kubernetes"
        )
    registry = image_names.registry_of(name)
    log_in = puller.log_in.format(registry=registry)
    if says(PERMANENT_PULL_ERRORS) and not says(("getting credentials",)):
        return InstanceError(f"{what}; {fix}, or, if it is private, {log_in}")
    if says(LOG_IN):
        return ConfigurationError(
            f"registry {registry} refused the credentials: {what}; {log_in}, or {fix}",
            boundary=Boundary.SANDBOX,
        )
    return ControlPlaneError(what)


def _seconds(words: str) -> float:
    """Registries print Go's form of a duration, such as `1m30s`, or seconds."""
    found = AFTER.search(words)
    if found is None:
        return LIMIT_PASSES_S
    parts = PART.findall(found[1])
    return sum(float(n) * UNITS[unit] for n, unit in parts) if parts else float(found[1])


def printed(command: Sequence[str], what: str, timeout_s: float = PULL_TIMEOUT_S) -> str:
    """The output of a program that handles images. Raises: RetryHere with its error."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            check=False,
            timeout=timeout_s,
            text=True,
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        raise RetryHere(
            f"{what} took more than {timeout_s:.0f} s", boundary=Boundary.SANDBOX
        ) from None
    if done.returncode:
        said = last_error(done.stderr) or f"exit code {done.returncode}"
        raise RetryHere(f"{what}: {said}", boundary=Boundary.SANDBOX)
    return done.stdout


def last_error(stderr: str) -> str:
    """The last line, or podman's last error, which may span several lines."""
    lines = stderr.strip().splitlines()
    starts = [n for n, line in enumerate(lines) if line.startswith("Error: ")]
    return " ".join(line.strip() for line in lines[starts[-1] if starts else -1 :])

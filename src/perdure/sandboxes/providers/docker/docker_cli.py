"""Calls of the `docker` program, one process each, with typed failures.

Exit codes 125, 126 and 127 may come from the client or from the command, so only the printed text
decides. The program itself reads `DOCKER_HOST`, contexts and TLS settings.
"""

import asyncio
import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from perdure.errors import ConfigurationError, ControlPlaneError, PerdureError
from perdure.sandboxes.guest.service_retries import Conflict, Missing
from perdure.sandboxes.host.sandbox_programs import program
from perdure.settings import process_environment

GONE = (
    "no such container",
    "is not running",
    "no such object",
    "marked for removal",
    "is restarting",
)
TAKEN = ("is already in use by container", "removal of container")
NOT_HERE = ("cannot connect to the docker daemon", "is the docker daemon running")
REFUSALS = ("Error response from daemon", "Error:", "Cannot connect", "error during connect")
"""How messages begin that are the engine's or its client's."""
OUT_OF_PIDS = ("resource temporarily unavailable", "can't start new thread", "cannot fork")


class CliOutput(NamedTuple):
    """What a call printed. Its exit code is only a hint."""

    code: int
    out: bytes
    err: str


async def call(
    *arguments: str, seconds: float, given: bytes | Path | None = None, what: str = ""
) -> CliOutput:
    """Raises: MissingDependency; ControlPlaneError when it takes longer than `seconds`."""
    file = given.open("rb") if isinstance(given, Path) else None
    stdin = file or (asyncio.subprocess.PIPE if given is not None else asyncio.subprocess.DEVNULL)
    with file or contextlib.nullcontext():
        process = await asyncio.create_subprocess_exec(
            program("docker"),
            *arguments,
            stdin=stdin,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(seconds):
                out, err = await process.communicate(given if isinstance(given, bytes) else None)
        except TimeoutError:
            raise ControlPlaneError(
                f"docker {what or arguments[0]} took more than {seconds:.0f} s"
            ) from None
        finally:
            if process.returncode is None:
                # this ends the client; the engine may still execute the call
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await asyncio.shield(process.wait())
    return CliOutput(process.returncode or 0, out, err.decode("utf-8", "replace").strip())


async def done(*arguments: str, seconds: float, what: str = "") -> str:
    """What a successful call printed. Raises: the errors of `typed`."""
    said = await call(*arguments, seconds=seconds, what=what)
    if said.code:
        raise typed(what or arguments[0], said.err or f"exit code {said.code}")
    return said.out.decode("utf-8", "replace").strip()


def typed(what: str, said: str) -> PerdureError:
    """The failure as one of our errors, from the engine's message: its client has no error codes."""
    words = said.lower()
    line = f"docker {what}: {said[-400:]}"
    if any(word in words for word in NOT_HERE):
        return ControlPlaneError(f"{line}; start it, or set DOCKER_HOST")
    if "permission denied while trying to connect" in words:
        return ConfigurationError(f"{line}; add this user to the group docker, or set DOCKER_HOST")
    if any(word in words for word in TAKEN):
        return Conflict(line)
    if any(word in words for word in GONE):
        return Missing(line)
    if "unknown or invalid runtime" in words or ("network" in words and "not found" in words):
        return ConfigurationError(
            f"{line}; correct PERDURE_DOCKER__RUNTIME or PERDURE_DOCKER__NETWORK"
        )
    return ControlPlaneError(line)


def objects(printed: bytes) -> list[dict[str, Any]]:
    """What `inspect` printed, without objects that have vanished."""
    found = json.loads(printed or b"[]")
    return [entry for entry in found if isinstance(entry, dict)]


def is_on_this_host() -> bool:
    """Whether the engine's address is a unix socket. It does not call the engine."""
    if address := process_environment.foreign("DOCKER_HOST"):
        return address.startswith("unix:")
    return _context() in ("", "default") or not _is_remote(_context())


def _context() -> str:
    if named := process_environment.foreign("DOCKER_CONTEXT"):
        return named
    folder = Path(process_environment.foreign("DOCKER_CONFIG") or Path.home() / ".docker")
    try:
        return str(json.loads((folder / "config.json").read_text()).get("currentContext", ""))
    except (OSError, ValueError, AttributeError):
        return ""


def _is_remote(context: str) -> bool:
    """Reads every context, because their folders are named by digests."""
    folder = Path(process_environment.foreign("DOCKER_CONFIG") or Path.home() / ".docker")
    for path in folder.glob("contexts/meta/*/meta.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            meta = json.loads(path.read_text())
            if meta["Name"] == context:
                return not str(meta["Endpoints"]["docker"]["Host"]).startswith("unix:")
    return True


def lacks_processes(said: str) -> bool:
    return any(word in said.lower() for word in OUT_OF_PIDS)


def with_label(name: str, value: str) -> Sequence[str]:
    return ("--label", f"{name}={value}")

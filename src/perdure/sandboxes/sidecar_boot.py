"""Starts the sidecars of one sandbox, in the order of their dependencies, and waits until all are up.

Owns the order, health checks and errors. A `SidecarEngine` runs the containers.
"""

import asyncio
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

from perdure.errors import Boundary, RetryHere
from perdure.types import Healthcheck, Limits, Sidecar
from perdure.types.containers import start_order

COMPLETION_S = 300.0
"""Seconds that a sidecar with one job may take."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
"""Seconds between two health checks, unless the sidecar's own interval is shorter."""
LOG_LINES = 10
LOG_OPTIONS = ("--log-opt", "max-size=1m")
CAPABILITIES = (
    "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "NET_BIND_SERVICE", "SETGID", "SETUID",
)  # fmt: skip
"""The subset of Docker's default capabilities that start scripts of images need."""


class SidecarFailed(RetryHere):
    """A sidecar did not start, or is not healthy in time. It is no verdict on an agent."""

    boundary = Boundary.SANDBOX


class SidecarState(NamedTuple):
    is_running: bool
    code: int
    """Exit code, if it is not running."""


class SidecarEngine(ABC):
    """The containers of one sandbox's sidecars."""

    @abstractmethod
    async def start(self, name: str, sidecar: Sidecar) -> None:
        """Start the container. One that exists stays as it is.

        Raises: SandboxLost if the sandbox has ended; any error of a create.
        """

    @abstractmethod
    async def state(self, name: str) -> SidecarState: ...

    @abstractmethod
    async def healthcheck(self, name: str, sidecar: Sidecar) -> Healthcheck | None:
        """The sidecar's own check, or its image's."""

    @abstractmethod
    async def passes(self, name: str, check: Healthcheck) -> bool:
        """Run the check once. False also if it takes too long."""

    @abstractmethod
    async def log(self, name: str) -> str:
        """The last LOG_LINES lines that the container wrote."""


async def boot_sidecars(sidecars: Mapping[str, Sidecar], engine: SidecarEngine) -> None:
    """May run repeatedly. Raises: SidecarFailed with the last lines of the log; as `start`."""
    for name in start_order(dict(sidecars)):
        for other, condition in sidecars[name].depends_on.items():
            if condition == "healthy" or sidecars[other].completes:
                await _wait_until_up(other, sidecars[other], engine)
        await engine.start(name, sidecars[name])
    for name, sidecar in sidecars.items():
        await _wait_until_up(name, sidecar, engine)


async def _wait_until_up(name: str, sidecar: Sidecar, engine: SidecarEngine) -> None:
    check = None if sidecar.completes else await engine.healthcheck(name, sidecar)
    limit_s = COMPLETION_S if check is None else check.limit_s
    longest = LONGEST_PAUSE_S if check is None else min(LONGEST_PAUSE_S, check.interval_s)
    until, pause = time.monotonic() + limit_s, min(FIRST_PAUSE_S, longest)
    while True:
        is_up = check is not None and await engine.passes(name, check)
        state = await engine.state(name)
        if not state.is_running and not (sidecar.completes and state.code == 0):
            raise await _failed(name, f"exited with code {state.code}", engine)
        if is_up or (not state.is_running if sidecar.completes else check is None):
            return
        if time.monotonic() > until:
            lacks = "is not done" if check is None else "is not healthy"
            raise await _failed(name, f"{lacks} after {limit_s:g} s", engine)
        await asyncio.sleep(pause)
        pause = min(pause * 1.5, longest)


async def _failed(name: str, what: str, engine: SidecarEngine) -> SidecarFailed:
    return SidecarFailed(f"the sidecar {name!r} {what}: {await engine.log(name) or 'no output'}")


def limits_of(sidecar: Sidecar, sandbox: Limits) -> Limits:
    """The sandbox's limits, or the sidecar's own lower ones."""
    return sandbox.model_copy(
        update={
            "memory_mb": min(sidecar.memory_mb or sandbox.memory_mb, sandbox.memory_mb),
            "cpus": min(sidecar.cpus or sandbox.cpus, sandbox.cpus),
        }
    )


def common_options(sidecar: Sidecar, limits: Limits) -> list[str]:
    """Options of `docker run` and of `podman run`. `limits`: as `limits_of` gives them."""
    memory = f"{limits.memory_mb}m"
    return [
        *("--restart", sidecar.restart),
        *("--security-opt", "no-new-privileges", "--cap-drop", "ALL"),
        *(part for capability in CAPABILITIES for part in ("--cap-add", capability)),
        *("--memory", memory, "--memory-swap", memory),
        *("--pids-limit", str(limits.pids), "--cpus", f"{limits.cpus:g}"),
        *("--ulimit", "core=0:0", "--ulimit", "msgqueue=0:0"),
        *(part for key, value in sidecar.env.items() for part in ("--env", f"{key}={value}")),
        *(("--workdir", sidecar.workdir) if sidecar.workdir else ()),
        *(("--user", sidecar.user) if sidecar.user else ()),
    ]


def image_healthcheck(printed: str) -> Healthcheck | None:
    """The health check of an image, from its configuration in JSON. Times are nanoseconds."""
    found = json.loads(printed or "null") or {}
    kind, *words = found.get("Test") or ["NONE"]
    if kind == "NONE":
        return None
    given = {
        field: found[key] / 1e9
        for key, field in (
            ("Interval", "interval_s"),
            ("Timeout", "timeout_s"),
            ("StartPeriod", "start_period_s"),
        )
        if found.get(key)
    }
    argv = words if kind == "CMD" else ["/bin/sh", "-c", *words]
    retries = {"retries": found["Retries"]} if found.get("Retries") else {}
    return Healthcheck(command=tuple(argv), **given, **retries)

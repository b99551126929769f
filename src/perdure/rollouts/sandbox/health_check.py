"""Waits until a new sandbox is healthy, if its environment has a health check."""

import asyncio
import time

from perdure.errors import Boundary, RetryHere
from perdure.sandboxes.base import Sandbox
from perdure.types import Healthcheck


class Unhealthy(RetryHere):
    """The sandbox's own health check failed. It says nothing about the agent."""

    boundary = Boundary.SANDBOX


async def wait_until_healthy(sandbox: Sandbox, check: Healthcheck | None) -> None:
    """Run the check until it passes. As in Docker, failures in the start period do not count.

    Raises: Unhealthy after `retries` failures in a row; SandboxLost.
    """
    if check is None:
        return
    started = time.monotonic()
    failures = 0
    while failures < check.retries:
        is_starting = time.monotonic() < started + check.start_period_s
        done = await sandbox.exec(check.command, timeout=check.timeout_s)
        if done.status.ok:
            return
        failures += not is_starting
        pause = check.start_interval_s if is_starting else check.interval_s
        await asyncio.sleep(pause if failures < check.retries else 0)
    said = (done.stderr or done.stdout)[-200:].decode("utf-8", "replace").strip()
    raise Unhealthy(
        f"`environment.healthcheck` of sandbox {sandbox.identity} failed {check.retries} times in a "
        f"row: {said or done.status}"
    )

"""The current step of an open rollout, asked from Temporal: running, retried or waiting.

The store has the finished steps.
"""

import asyncio
import time
from datetime import timedelta
from typing import Any

from temporalio.api.workflow.v1 import PendingActivityInfo
from temporalio.client import Client, WorkflowExecutionStatus, WorkflowQueryFailedError
from temporalio.service import RPCError

from perdure.cli.console import many
from perdure.cli.runs.run_text import clock
from perdure.client.rollout_listing import (
    PARKED,
    any_open,
    count_open,
    heartbeat_of,
    is_not_taken,
    oldest_open,
)
from perdure.client.sdk import CODE_FAILS, FAILING

QUIET = timedelta(seconds=1)
"""If a rollout's workflow does not answer a query for this long, we say that no worker answers."""
FAILED = "; last failure: "
WAITS_FOR = ": waits for "
BUSY_WITH = ": busy with "
BOOT = "boot_sandbox"
HOST_ACTIVITIES = ("run_agent", "capture_diff")
HOST_WORKER_HINT = (
    "a worker that reaches its sandbox (is its host down, or does another stack with this store "
    "run it?)"
)
SHOWN = 5
"""How many rollouts of a run to show: most wait for the same thing."""


async def current_step(client: Client, workflow_id: str, quiet: timedelta = QUIET) -> str:
    """One line for a running rollout; empty if it is closed or unknown."""
    handle = client.get_workflow_handle(workflow_id)
    try:
        described = await handle.describe()
    except RPCError:
        return ""
    if described.status is not WorkflowExecutionStatus.RUNNING:
        return ""
    pending = list(described.raw_description.pending_activities)
    if pending:
        step = max(pending, key=lambda step: step.attempt)
        failed = await _failure(client, step)
        return _of_step(step, failed, await heartbeat_of(client, step))
    try:
        state = await handle.query("state", result_type=dict, rpc_timeout=quiet)
    except (RPCError, WorkflowQueryFailedError) as error:
        if FAILING in error.message:
            return f"{CODE_FAILS}: start the build that started it, or `perdure cancel` the run"
        return "no worker answers: see `perdure status`"
    last = state["story"][-1:] or [state["stage"]]
    return str(last[0])


async def parked_rollouts(client: Client) -> str:
    """How many rollouts are parked, and what one of them says; empty if none is. Raises: RPCError."""
    if not (one := await any_open(client, PARKED)):
        return ""
    count = many(await count_open(client, None, PARKED), "rollout")
    return f"{count} {await current_step(client, one)}"


async def _failure(client: Client, step: PendingActivityInfo) -> str:
    """The message of the last failed try; empty if no try failed."""
    if not step.HasField("last_failure"):
        return ""
    error = await client.data_converter.decode_failure(step.last_failure)
    return str(getattr(error, "message", error))


def _of_step(step: PendingActivityInfo, failed: str, progress: dict[str, Any]) -> str:
    if is_not_taken(step) and step.activity_type.name == BOOT:
        return f"waits for a free seat on a host{_since(step.scheduled_time.seconds)}"
    if is_not_taken(step) and step.activity_type.name in HOST_ACTIVITIES:
        since = _since(step.scheduled_time.seconds)
        return f"{step.activity_type.name}{WAITS_FOR}{HOST_WORKER_HINT}{since}"
    turns, waits, doing = (progress.get(name) for name in ("turns", "waits", "doing"))
    line = step.activity_type.name
    line += "" if turns is None else f", {many(turns, 'turn')}"
    line += f", try {step.attempt}" if failed else ""
    if waits:
        return line + _wait(waits)
    if doing:
        line += f"{BUSY_WITH}{doing['what']} ({clock(max(0.0, time.time() - doing['since']))})"
    return line + (f"{FAILED}{failed}" if failed else "")


def _wait(waits: dict[str, Any]) -> str:
    """`: waits for an engine since 16:31:05 (2:10): vllm at 10.0.0.7:8000 is suspect`."""
    return f"{WAITS_FOR}an engine{_since(waits['since'])}: {waits['reason']}"


def _since(began: float) -> str:
    """` since 16:31:05 (2:10)`. `began`: Unix seconds."""
    at = time.strftime("%H:%M:%S", time.localtime(began))
    return f" since {at} ({clock(max(0.0, time.time() - began))})"


async def current_steps(client: Client, run_id: str, quiet: timedelta = QUIET) -> list[str]:
    """The current steps of a run's oldest open rollouts: `calc-1/0: boot_sandbox, try 3; ...`."""
    oldest = await oldest_open(client, run_id, SHOWN)
    steps = (current_step(client, one.workflow_id, quiet) for one in oldest)
    lines = await asyncio.gather(*steps)
    names = [one.workflow_id.removeprefix("rollout/").partition("/")[2] for one in oldest]
    return [f"{name}: {line}" for name, line in zip(names, lines, strict=True) if line]

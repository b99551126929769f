"""Many rollouts at once on a metered account: the double with its caps, and the result of the
burst."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from temporalio.api.enums.v1 import EventType
from temporalio.client import WorkflowExecutionStatus
from temporalio.service import RPCError

from perdure.client import temporal_names
from perdure.rollouts.admission.permit_rules import Account
from perdure.sandboxes.providers.e2b.provider import E2BProvider
from perdure.settings.settings_tree import Settings
from perdure.types import RolloutRequest
from tests.service_harness import E2B, serving
from tests.stack.running_stack import Stack, running
from tests.stack.wait_until import until

ERRORS = {
    EventType.EVENT_TYPE_ACTIVITY_TASK_FAILED,
    EventType.EVENT_TYPE_ACTIVITY_TASK_TIMED_OUT,
    EventType.EVENT_TYPE_ACTIVITY_TASK_CANCELED,
    EventType.EVENT_TYPE_WORKFLOW_TASK_FAILED,
    EventType.EVENT_TYPE_WORKFLOW_EXECUTION_FAILED,
}
CREATES = ("POST /sandboxes", "POST /v2/sandboxes")


@dataclass(frozen=True)
class Burst:
    """How it ended. `refused`: creates that the service answered with 429. `held`: permits that
    were not given back."""

    graded: int
    errors: int
    creates: int
    refused: int
    left: int
    held: int


@asynccontextmanager
async def capped(
    folder: Path, patch: pytest.MonkeyPatch, *, live: int, rate: float, said: str, workers: int = 2
) -> AsyncIterator[tuple[Stack, Any]]:
    """A stack whose e2b account has these caps, and is said to have those of `said` (JSON)."""
    async with serving(E2B, folder / "server", patch) as (server, _):
        server.settings.update(max_live=live, creates_per_s=rate)
        patch.setenv("PERDURE_SANDBOX__CAPS", said)
        async with running(folder / "stack", workers=workers) as stack:
            yield stack, server


async def run_burst(
    stack: Stack, server: Any, count: int, *, limit_s: float, **fields: Any
) -> Burst:
    """Start them all at once and wait until every one is over."""
    fields = {"sandbox": "e2b", "agent": "nop", **fields}
    asked = [stack.request("burst", sample_index=n, **fields) for n in range(count)]
    for request in asked:
        await stack.perdure.start_rollout(request)
    query = f"WorkflowType = '{temporal_names.ROLLOUT}' AND ExecutionStatus = 'Running'"

    async def all_over() -> bool:
        try:
            return (await stack.client.count_workflows(query)).count == 0
        except RPCError:  # a busy server; its list lags behind anyway
            return False

    await until(all_over, f"{count} rollouts are over{stack.last_words()}", limit_s)
    return await _burst(stack, server, asked)


async def _burst(stack: Stack, server: Any, asked: Sequence[RolloutRequest]) -> Burst:
    graded = errors = 0
    for request in asked:
        handle = stack.handle(request)
        episode = await stack.episode(request)
        graded += episode.reward is not None
        described = await handle.describe()
        errors += described.status is not WorkflowExecutionStatus.COMPLETED
        errors += sum(e.event_type in ERRORS for e in (await handle.fetch_history()).events)
    posts = sum(entry["line"] in CREATES for entry in server.faults.log)
    made = len(server.keys.all())
    keeper = stack.client.get_workflow_handle(
        temporal_names.account_id(E2BProvider(Settings(home=stack.home)).account)
    )
    held = (await keeper.query("state", result_type=Account)).permits
    return Burst(graded, errors, made, posts - made, len(server.sandboxes.all()), len(held))

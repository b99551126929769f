"""Open rollouts that make no progress: in which step, for how long, why, and what would help.

Temporal's lists show neither the tries nor the waits of activities, so rollouts must be described
one by one. We describe only the oldest ones, because a stuck rollout becomes one of them.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

from temporalio.api.common.v1 import WorkflowExecution as ExecutionId
from temporalio.api.workflow.v1 import PendingActivityInfo, PendingWorkflowTaskInfo
from temporalio.api.workflowservice.v1 import GetWorkflowExecutionHistoryReverseRequest
from temporalio.client import (
    Client,
    WorkflowExecutionDescription,
    WorkflowExecutionStatus,
    WorkflowQueryFailedError,
)
from temporalio.service import RPCError, RPCStatusCode

from perdure.cli.runs import stuck_advice
from perdure.cli.runs.stage_bounds import Bound, StageBounds
from perdure.client import temporal_names
from perdure.client.rollout_listing import (
    FAILS_AFTER,
    PARKED,
    RolloutInfo,
    count_open,
    heartbeat_of,
    is_not_taken,
    oldest_open,
)
from perdure.storage.base import Store
from perdure.telemetry import STUCK_TRIES

CHECKED = 500
"""Maximum number of rollouts to describe. Describing this many takes about a second."""
AT_ONCE = 32
UNTAKEN_S = 60.0
"""Seconds after which work counts as stuck in a queue where it never waits for a free slot."""
NO_ENGINE_S = 300.0
"""Seconds of waiting for an engine, as in the alert CallsWithoutEngine."""
LOST_ATTEMPTS = 3
EVENTS = 100
"""Events of a history that are searched for the start of a step. A rollout has about 40."""
SENTENCE = 300
"""Characters of an error's sentence."""
QUERIES, PATIENCE = 20, timedelta(seconds=1)
"""Maximum number of rollouts to ask what they wait for, and the timeout of each query."""
BOOT = "boot_sandbox"


class Reason(NamedTuple):
    """`why`: one sentence. `helps`: what to do, in the same words for every rollout with this
    problem."""

    why: str
    helps: str


@dataclass(frozen=True)
class StuckRollout:
    """One rollout. `step`: an activity, or `RolloutWorkflow` if no activity is pending."""

    rollout: RolloutInfo
    step: str
    seconds: float
    """Over all tries of the step."""
    tries: int
    reason: Reason


@dataclass(frozen=True)
class StuckRollouts:
    """The longest stuck first. `checked`: how many of the `open` ones were described."""

    stuck: Sequence[StuckRollout]
    checked: int
    open: int


async def find(client: Client, store: Store | None, run_id: str | None) -> StuckRollouts:
    """The stuck rollouts of one run or of all. `store`: None if it cannot be read here.

    Raises: RPCError.
    """
    oldest, is_open, seated = await asyncio.gather(
        oldest_open(client, run_id, CHECKED),
        count_open(client, run_id),
        count_open(client, None, "boot", "agent"),
    )
    runs = {_run_of(one) for one in oldest}
    search = _Search(client, await StageBounds.read(client, store, runs), seats_taken=seated > 0)
    found = [one for one in await asyncio.gather(*map(search.look, oldest)) if one is not None]
    found.sort(key=lambda one: -one.seconds)
    return StuckRollouts(found, len(oldest), max(is_open, len(oldest)))


class _Search:
    def __init__(self, client: Client, bounds: StageBounds, *, seats_taken: bool) -> None:
        """`seats_taken`: boots wait for the seats and permits of other rollouts, as they should."""
        self._client = client
        self._bounds = bounds
        self._seats_taken = seats_taken
        self._queries = 0
        self._slots = asyncio.Semaphore(AT_ONCE)

    async def look(self, one: RolloutInfo) -> StuckRollout | None:
        """None if the rollout makes progress or has ended."""
        async with self._slots:
            try:
                described = await self._client.get_workflow_handle(one.workflow_id).describe()
            except RPCError as error:
                if error.status is RPCStatusCode.NOT_FOUND:
                    return None
                raise
            if described.status is not WorkflowExecutionStatus.RUNNING:
                return None
            pending = described.raw_description.pending_activities
            if pending:
                return await self._in_activity(one, max(pending, key=lambda step: step.attempt))
            return await self._in_workflow(one, described)

    async def _in_activity(
        self, one: RolloutInfo, step: PendingActivityInfo
    ) -> StuckRollout | None:
        name = step.activity_type.name
        seconds = time.time() - await self._began(one.workflow_id, step)
        bound = self._bounds.of(_run_of(one), name)
        reason = (
            await self._failure(step)
            or await self._engine_wait(step)
            or (self._untaken if is_not_taken(step) else _slow)(step, seconds, bound)
        )
        return StuckRollout(one, name, seconds, step.attempt, reason) if reason else None

    async def _began(self, workflow_id: str, step: PendingActivityInfo) -> float:
        """Unix seconds at which the step was scheduled. After a retry, only the history knows."""
        if step.attempt <= 1 and is_not_taken(step):
            return step.scheduled_time.ToMicroseconds() / 1e6
        if step.attempt <= 1 and step.HasField("last_started_time"):
            return step.last_started_time.ToMicroseconds() / 1e6
        request = GetWorkflowExecutionHistoryReverseRequest(
            namespace=self._client.namespace,
            execution=ExecutionId(workflow_id=workflow_id),
            maximum_page_size=EVENTS,
        )
        service = self._client.workflow_service
        answer = await service.get_workflow_execution_history_reverse(request)
        times = [
            event.event_time.ToMicroseconds() / 1e6
            for event in answer.history.events
            if event.activity_task_scheduled_event_attributes.activity_id == step.activity_id
        ]
        return times[0] if times else time.time()

    async def _failure(self, step: PendingActivityInfo) -> Reason | None:
        if step.attempt <= STUCK_TRIES or not step.HasField("last_failure"):
            return None
        error = await self._client.data_converter.decode_failure(step.last_failure)
        kind = getattr(error, "type", None)  # a timeout has a number
        name = kind if isinstance(kind, str) else type(error).__name__
        message = " ".join(str(getattr(error, "message", error)).split())
        return Reason(f"{name}: {message}"[:SENTENCE], stuck_advice.of_error(name))

    async def _engine_wait(self, step: PendingActivityInfo) -> Reason | None:
        waits = (await heartbeat_of(self._client, step)).get("waits")
        if not waits or time.time() - waits["since"] < NO_ENGINE_S:
            return None
        return Reason(f"waits for an engine: {waits['reason']}", stuck_advice.NO_ENGINE)

    def _untaken(self, step: PendingActivityInfo, seconds: float, bound: Bound) -> Reason | None:
        queue = step.activity_options.task_queue.name
        is_boot = step.activity_type.name == BOOT
        limit = UNTAKEN_S if is_boot or "@" in queue else bound.seconds
        if seconds <= limit or (is_boot and self._seats_taken):
            return None
        return _no_worker(queue)

    async def _in_workflow(
        self, one: RolloutInfo, described: WorkflowExecutionDescription
    ) -> StuckRollout | None:
        """A rollout without a pending activity waits for a workflow worker, a permit, or its next
        attempt."""
        task = described.raw_description.pending_workflow_task
        if not task.attempt:
            reason = await self._pause(one)
            seconds, tries = one.seconds, one.attempt
        else:
            seconds = time.time() - task.original_scheduled_time.ToMicroseconds() / 1e6
            reason, tries = _workflow_task(task, seconds), task.attempt
        return StuckRollout(one, temporal_names.ROLLOUT, seconds, tries, reason) if reason else None

    async def _pause(self, one: RolloutInfo) -> Reason | None:
        if one.stage == PARKED:
            return Reason(await self._last_event(one.workflow_id), stuck_advice.PARKED)
        if one.attempt >= LOST_ATTEMPTS:
            return Reason(await self._last_event(one.workflow_id), stuck_advice.NO_ENGINE)
        if self._seats_taken or one.seconds <= UNTAKEN_S:
            return None
        return Reason(await self._last_event(one.workflow_id), stuck_advice.NO_PERMIT)

    async def _last_event(self, workflow_id: str) -> str:
        """What the rollout's page in the Web UI says last."""
        self._queries += 1
        if self._queries > QUERIES:
            return "not asked; its page in the Web UI says what it waits for"
        handle = self._client.get_workflow_handle(workflow_id)
        try:
            state = await handle.query("state", result_type=dict, rpc_timeout=PATIENCE)
        except (RPCError, WorkflowQueryFailedError):
            return "no workflow worker says what it waits for"
        event = (state["story"][-1:] or [f"stage {state['stage']}"])[0]
        return str(event).replace("**", "").replace("`", "")[:SENTENCE]


def _workflow_task(task: PendingWorkflowTaskInfo, seconds: float) -> Reason | None:
    if task.attempt >= FAILS_AFTER:
        why = "its workflow code fails, or its worker ends each time"
        return Reason(why, stuck_advice.CODE_FAILS)
    return _no_worker(temporal_names.WORKFLOWS_QUEUE) if seconds > UNTAKEN_S else None


def _no_worker(queue: str) -> Reason:
    return Reason(f"no worker takes it from the queue {queue}", stuck_advice.of_queue(queue))


def _slow(step: PendingActivityInfo, seconds: float, bound: Bound) -> Reason | None:
    return Reason(f"longer than {bound}", stuck_advice.SLOW) if seconds > bound.seconds else None


def _run_of(one: RolloutInfo) -> str:
    return one.workflow_id.split("/")[1]

"""Rollouts as Temporal lists them: all of a run, the newest ones, or the oldest open ones."""

import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from temporalio.api.common.v1 import WorkflowExecution as ExecutionId
from temporalio.api.enums.v1 import EventType, PendingActivityState, WorkflowTaskFailedCause
from temporalio.api.workflow.v1 import PendingActivityInfo
from temporalio.api.workflowservice.v1 import GetWorkflowExecutionHistoryReverseRequest
from temporalio.client import Client, WorkflowExecution, WorkflowExecutionStatus

from perdure.client import search_attribute_keys as attributes
from perdure.client import temporal_names
from perdure.types import EpisodeRef

PAGE = 1000
FEW = 50
"""Maximum number of rollouts to list beyond the wanted ones. Listing one costs the server 1 ms,
counting thousands 10 ms."""
WAITING = "waiting"
"""The stage of a rollout before its boot begins."""
PARKED = "parked"
"""The stage of a rollout that waits without a sandbox for the quota of an account."""
INSTANT = timedelta(milliseconds=1)
FAILS_AFTER = 3
"""Tries of a workflow task after which its failure does not count as transient."""
TASK_ENDS = {
    EventType.EVENT_TYPE_WORKFLOW_TASK_COMPLETED,
    EventType.EVENT_TYPE_WORKFLOW_TASK_FAILED,
    EventType.EVENT_TYPE_WORKFLOW_TASK_TIMED_OUT,
}
CODE_FAULTS = {
    WorkflowTaskFailedCause.WORKFLOW_TASK_FAILED_CAUSE_WORKFLOW_WORKER_UNHANDLED_FAILURE,
    WorkflowTaskFailedCause.WORKFLOW_TASK_FAILED_CAUSE_NON_DETERMINISTIC_ERROR,
}
TOO_SLOW = "_DeadlockError"
"""The SDK's failure type if a busy worker did not finish a workflow task within two seconds."""


@dataclass(frozen=True)
class RolloutInfo:
    """One rollout as Temporal lists it."""

    workflow_id: str
    instance: str
    sample_index: int
    agent: str
    stage: str
    execution: str
    """Temporal's name of the status: Running, Completed, Canceled, Failed, Terminated."""
    outcome: str
    attempt: int
    seconds: float
    episode: EpisodeRef | None


async def of_run(client: Client, run_id: str) -> list[RolloutInfo]:
    """The last execution of each started rollout of a run, ordered by instance and sample."""
    found = [one async for one in client.list_workflows(_query(run_id), page_size=PAGE)]
    return sorted(
        [await info(one) for one in latest_executions(found)],
        key=lambda r: (r.instance, r.sample_index),
    )


async def all_of_run(client: Client, run_id: str) -> list[WorkflowExecution]:
    """All executions of the workflows of a run: itself, its shards, groups and rollouts."""
    own = f"WorkflowId = 'run/{run_id}' OR WorkflowId STARTS_WITH 'run/{run_id}/shard/'"
    query = f"{attributes.RUN.name} = '{run_id}' OR {own}"
    return [one async for one in client.list_workflows(query, page_size=PAGE)]


async def of_instance(client: Client, run_id: str, instance_id: str) -> list[RolloutInfo]:
    """The rollouts of one instance of a run, in any state."""
    here = f"WorkflowId STARTS_WITH 'rollout/{run_id}/{instance_id}/'"
    query = f"WorkflowType = '{temporal_names.ROLLOUT}' AND {here}"
    return [await info(one) async for one in client.list_workflows(query, page_size=PAGE)]


def summarize_rollouts(found: Sequence[RolloutInfo], n_samples: int) -> str:
    """One line about the rollouts of a group, some of which may not have started."""
    if not found:
        return "no rollout has started: `perdure status` says whether workers poll"
    running = [one for one in found if one.execution == "Running"]
    stages = {one.stage: max(o.seconds for o in running if o.stage == one.stage) for one in running}
    count = Counter(one.stage for one in running)
    doing = [
        f"{count[stage]} in stage {stage or 'start'}, for up to {seconds:.0f} s"
        for stage, seconds in sorted(stages.items())
    ]
    return "; ".join([f"{len(found) - len(running)} of {n_samples} rollouts have ended", *doing])


async def engine_wait(client: Client, found: Sequence[RolloutInfo]) -> str:
    """Why the longest-running agent waits for an engine; empty if it does not. Raises: RPCError."""
    agents = [one for one in found if one.execution == "Running" and one.stage == "agent"]
    if not agents:
        return ""
    oldest = max(agents, key=lambda one: one.seconds)
    described = await client.get_workflow_handle(oldest.workflow_id).describe()
    for step in described.raw_description.pending_activities:
        if waits := (await heartbeat_of(client, step)).get("waits"):
            return str(waits["reason"])
    return ""


async def heartbeat_of(client: Client, step: PendingActivityInfo) -> dict[str, Any]:
    """Details of the last heartbeat (`activities.heartbeats.report`). The server keeps them between
    two tries, so they count only while the activity is running."""
    if step.state != PendingActivityState.PENDING_ACTIVITY_STATE_STARTED:
        return {}
    details = await client.data_converter.decode(list(step.heartbeat_details.payloads))
    return details[0] if details and isinstance(details[0], dict) else {}


def is_not_taken(step: PendingActivityInfo) -> bool:
    """Whether no worker has it yet, and none has tried it."""
    waits = step.state == PendingActivityState.PENDING_ACTIVITY_STATE_SCHEDULED
    return waits and not step.HasField("last_failure")


async def newest(client: Client, run_id: str, limit: int) -> list[RolloutInfo]:
    """Rollouts in Temporal's order: open ones by start, then ended ones by end, the latest first.
    If a rollout was rerun or reset, its last execution."""
    listed = client.list_workflows(_query(run_id), page_size=limit, limit=limit)
    return [await info(w) for w in latest_executions([w async for w in listed])]


async def newest_completed(client: Client, run_id: str | None, limit: int) -> list[EpisodeRef]:
    """Episodes of the rollouts that completed last, of one run or of all."""
    query = f"{_query(run_id)} AND ExecutionStatus = 'Completed'"
    listed = client.list_workflows(query, page_size=limit, limit=limit)
    found = [await info(one) async for one in listed]
    return [one.episode for one in found if one.episode is not None]


def latest_executions(found: Sequence[WorkflowExecution]) -> list[WorkflowExecution]:
    """The last started execution of each workflow id, in the order of `found`."""
    last: dict[str, WorkflowExecution] = {}
    for one in found:
        if one.id not in last or last[one.id].start_time < one.start_time:
            last[one.id] = one
    return [one for one in found if last[one.id] is one]


async def waiting(client: Client, run_id: str) -> int:
    """How many open rollouts of a run have no seat on a host yet."""
    return await count_open(client, run_id, WAITING)


async def list_failing_workflows(client: Client, run_id: str) -> AsyncIterator[str]:
    """Open workflows of a run whose code keeps failing at the same task, for example after an
    upgrade."""
    query = f"{attributes.RUN.name} = '{run_id}' AND ExecutionStatus = 'Running'"
    async for one in client.list_workflows(query):
        described = await client.get_workflow_handle(one.id).describe()
        tries = described.raw_description.pending_workflow_task.attempt
        if tries >= FAILS_AFTER and await _last_task_failed(client, one.id):
            yield one.id


async def _last_task_failed(client: Client, workflow_id: str) -> bool:
    """Whether the code failed at the pending task. Otherwise its worker was too slow, or ended.

    Of several failed tries in a row, only the first has events in the history.
    """
    request = GetWorkflowExecutionHistoryReverseRequest(
        namespace=client.namespace,
        execution=ExecutionId(workflow_id=workflow_id),
        maximum_page_size=FEW,
    )
    answer = await client.workflow_service.get_workflow_execution_history_reverse(request)
    for event in answer.history.events:
        if event.event_type in TASK_ENDS:
            failed = event.workflow_task_failed_event_attributes
            what = failed.failure.application_failure_info.type
            return failed.cause in CODE_FAULTS and what != TOO_SLOW
    return False


async def oldest_open(client: Client, run_id: str | None, limit: int) -> list[RolloutInfo]:
    """The oldest open rollouts of one run or of all, the oldest first.

    Temporal lists the newest first. If there are many, count queries find a time before which only
    a few of the open rollouts started.
    """
    query, most = f"{_query(run_id)} AND ExecutionStatus = 'Running'", limit + FEW
    listed = client.list_workflows(query, page_size=most, limit=most)
    found = [w async for w in listed]
    if len(found) == most:
        until = await _few_before(client, query, found[-1].start_time, limit, most)
        listed = client.list_workflows(_before(query, until), page_size=most, limit=most)
        found = [w async for w in listed]
    return [await info(w) for w in reversed(found[-limit:])]


async def _few_before(
    client: Client, query: str, late: datetime, wanted: int, most: int
) -> datetime:
    """A time before which at least `wanted` and at most `most` workflows started. If more than
    `most` started within one millisecond, the end of that millisecond."""

    async def started(time: datetime) -> int:
        return (await client.count_workflows(_before(query, time))).count

    back = timedelta(seconds=1)
    early = late - back
    while await started(early) > most:
        late, back = early, back * 2
        early = late - back
    while await started(early) < wanted:
        if late - early <= INSTANT:
            return late
        middle = early + (late - early) / 2
        if await started(middle) > most:
            late = middle
        else:
            early = middle
    return early


async def count_open(client: Client, run_id: str | None, *stages: str) -> int:
    """The open rollouts of one run or of all, in these stages or in any."""
    return (await client.count_workflows(_open_query(run_id, *stages))).count


async def any_open(client: Client, stage: str) -> str:
    """The workflow id of an open rollout in this stage; empty if there is none."""
    listed = client.list_workflows(_open_query(None, stage), page_size=1, limit=1)
    return "".join([one.id async for one in listed])


async def parked(client: Client) -> list[str]:
    """The workflow ids of all parked rollouts. Raises: RPCError."""
    return [one.id async for one in client.list_workflows(_open_query(None, PARKED))]


async def count(client: Client, run_id: str) -> dict[str, int]:
    """Number of started rollouts of a run, by Temporal's name of their status."""
    found = await client.count_workflows(f"{_query(run_id)} GROUP BY ExecutionStatus")
    return {str(group.group_values[0]): group.count for group in found.groups}


async def info(found: WorkflowExecution) -> RolloutInfo:
    known = found.typed_search_attributes
    memo = await found.memo()
    episode = EpisodeRef.model_validate(memo["episode"]) if "episode" in memo else None
    end = found.close_time.timestamp() if found.close_time else time.time()
    return RolloutInfo(
        workflow_id=found.id,
        # A refused input sets no instance, so show the workflow id.
        instance=known.get(attributes.INSTANCE) or found.id,
        sample_index=known.get(attributes.SAMPLE) or 0,
        agent=known.get(attributes.AGENT) or "",
        stage=known.get(attributes.STAGE) or "",
        execution=execution_name(found.status),
        outcome=known.get(attributes.OUTCOME) or "",
        attempt=known.get(attributes.ATTEMPT) or 1,
        seconds=round(end - found.start_time.timestamp(), 3),
        episode=episode,
    )


async def began_at(run: WorkflowExecution) -> float:
    """Unix seconds at which a run started, before it continued as new."""
    began = (await run.memo()).get(temporal_names.BEGAN, run.start_time.timestamp())
    return float(began)


def execution_name(status: WorkflowExecutionStatus | None) -> str:
    return status.name.title().replace("_", "") if status is not None else "Unknown"


def _query(run_id: str | None) -> str:
    rollouts = f"WorkflowType = '{temporal_names.ROLLOUT}'"
    return rollouts if run_id is None else f"{rollouts} AND {attributes.RUN.name} = '{run_id}'"


def _open_query(run_id: str | None, *stages: str) -> str:
    named = ", ".join(f"'{stage}'" for stage in stages)
    within = f" AND {attributes.STAGE.name} IN ({named})" if stages else ""
    return f"{_query(run_id)} AND ExecutionStatus = 'Running'{within}"


def _before(query: str, time: datetime) -> str:
    return f"{query} AND StartTime <= '{time.isoformat()}'"

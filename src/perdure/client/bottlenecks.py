"""What waits for capacity (boots for seats, gradings for slots, calls for engines) and what to
add."""

import asyncio
from collections.abc import Sequence
from typing import Any

from temporalio.api.enums.v1 import TaskQueueType
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice.v1 import DescribeTaskQueueRequest
from temporalio.client import Client

from perdure.client import temporal_names
from perdure.types import Frozen

STAGES = {
    "boot": temporal_names.BOOT_QUEUE,
    "grade": temporal_names.GRADE_QUEUE,
    "io": temporal_names.IO_QUEUE,
}
"""Stages whose queues grow if there are too few hosts. Agents never wait in a queue."""
LONG_S = 20.0
"""Seconds of waiting of the oldest task after which more hosts are worth their startup."""
KV_FULL = 0.95


class Backlog(Frozen):
    """Tasks of one stage that no worker has taken."""

    stage: str
    count: int
    age_s: float
    """How long the oldest task has waited."""


class Engines(Frozen):
    """The engines of one model as one gateway sees them."""

    model: str = ""
    """Empty if there is only one model."""
    ready: int
    waiting_calls: int
    """Calls that wait because no engine has room."""
    kv_used: float
    """Mean fraction of the KV cache in use, over the ready engines."""
    lacking: str = ""
    """Why the other engines are not ready."""
    versions: str = ""
    """Policy versions of the ready engines, as text; empty if none is known."""


async def backlogs(client: Client) -> list[Backlog]:
    """One backlog per stage. Raises: RPCError."""
    return list(await asyncio.gather(*(_backlog(client, *one) for one in STAGES.items())))


async def _backlog(client: Client, stage: str, queue: str) -> Backlog:
    answer = await client.workflow_service.describe_task_queue(
        DescribeTaskQueueRequest(
            namespace=client.namespace,
            task_queue=TaskQueue(name=queue),
            task_queue_type=TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY,
            report_stats=True,
        )
    )
    stats = answer.stats
    age_s = stats.approximate_backlog_age.ToNanoseconds() / 1e9
    count = stats.approximate_backlog_count
    return Backlog(stage=stage, count=count, age_s=age_s if count else 0.0)


def engines_of(document: dict[str, Any]) -> list[Engines]:
    """Parse a gateway's answer to `GET /engines`: the engines of each model."""
    waiting: dict[str, int] = document["waiting"]
    models = dict.fromkeys([*(one["model"] for one in document["engines"]), *waiting])
    return [
        _engines_of(
            model if len(models) > 1 else "",
            [one for one in document["engines"] if one["model"] == model],
            waiting.get(model, 0),
        )
        for model in models
    ]


def _engines_of(model: str, engines: list[dict[str, Any]], waiting: int) -> Engines:
    serving = [one for one in engines if one["state"] == "ready"]
    used = [one["kv_used"] for one in serving if "kv_used" in one]
    mean = sum(used) / len(used) if used else 0.0
    lacking = "; ".join(
        f"{one['name']} is {one['state']}" + (f" ({one['reason']})" if one.get("reason") else "")
        for one in engines
        if one["state"] != "ready"
    )
    known = sorted({one["version"] for one in serving if one.get("version") is not None})
    return Engines(
        model=model,
        ready=len(serving),
        waiting_calls=waiting,
        kv_used=mean,
        lacking=lacking,
        versions=" and ".join(map(str, known)),
    )


def sentence(waiting: Sequence[Backlog], engines: Sequence[Engines]) -> str:
    """Example: `12 agents wait for seats, the oldest for 240 s: add hosts`; empty if no wait is
    long."""
    found = {one.stage: one for one in waiting if one.age_s > LONG_S}
    parts = []
    if boots := found.get("boot"):
        parts.append(f"{_many(boots.count, 'agent')} for seats, {_oldest(boots)}: add hosts")
    if grades := found.get("grade"):
        text = f"{_many(grades.count, 'grading')} for slots, {_oldest(grades)}"
        parts.append(f"{text}: add workers of the role grade")
    if io := found.get("io"):
        parts.append(f"{_many(io.count, 'step')} of the role io, {_oldest(io)}: add its workers")
    return "; ".join([*parts, *filter(None, map(_shortage, engines))])


def _shortage(engines: Engines) -> str:
    """What waits for the engines of one model; empty if nothing does."""
    of = f" of {engines.model}" if engines.model else ""
    if engines.waiting_calls:
        stuck = engines.lacking and not engines.ready
        why = f"none is ready: {engines.lacking}" if stuck else "add engines"
        return f"{_many(engines.waiting_calls, 'call')} for engines{of}: {why}"
    if engines.kv_used > KV_FULL:
        return f"KV caches{of} are {engines.kv_used:.0%} full: add engines"
    return ""


def _many(count: int, what: str) -> str:
    return f"{count} {what} waits" if count == 1 else f"{count} {what}s wait"


def _oldest(backlog: Backlog) -> str:
    return f"the oldest for {backlog.age_s:.0f} s"

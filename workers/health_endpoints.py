"""Health endpoints on a unix socket of this worker: GET /healthz succeeds while its event loop
runs, GET /readyz once the server has seen it poll.

The supervisor calls both. A start waits for /readyz. A worker that fails /healthz several times in
a row is restarted.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

from temporalio.api.enums.v1 import TaskQueueType
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice.v1 import DescribeTaskQueueRequest
from temporalio.client import Client
from temporalio.service import RPCError

from perdure.client import temporal_names
from perdure.client.sdk import is_transient
from perdure.stack.part_readiness import POLLED

ANSWERS = {
    ready: f"HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: 0\r\n\r\n".encode()
    for ready, status in ((True, "200 OK"), (False, "503 Service Unavailable"))
}
REQUEST_S = 5.0
PAUSE_S = 0.05
QUEUES = {
    "workflows": (temporal_names.WORKFLOWS_QUEUE, TaskQueueType.TASK_QUEUE_TYPE_WORKFLOW),
    "agent": (temporal_names.AGENT_QUEUE, TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY),
    "grade": (temporal_names.GRADE_QUEUE, TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY),
    "io": (temporal_names.IO_QUEUE, TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY),
}
"""Role -> a queue that its worker always polls. It polls the boot queue only while a seat is
free."""


@contextlib.asynccontextmanager
async def answering(path: Path | None, is_ready: Callable[[], bool]) -> AsyncIterator[None]:
    """Answer at `path` until the block ends. If `path` is None, do nothing."""
    if path is None:
        yield
        return
    path.unlink(missing_ok=True)  # left behind by a killed worker

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
            async with asyncio.timeout(REQUEST_S):
                head = await reader.readuntil(b"\r\n\r\n")
            asked = head.split(b" ", 2)[1:2]
            writer.write(ANSWERS[asked != [POLLED.encode()] or is_ready()])
            await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(answer, path)
    try:
        yield
    finally:
        server.close()
        path.unlink(missing_ok=True)


async def wait_until_polling(client: Client, roles: Sequence[str], identity: str = "") -> None:
    """Return when the server has seen this worker, or the one with `identity`, poll for all
    `roles`.

    Raises: RPCError if the server refuses to say.
    """
    for role in roles:
        if role in QUEUES:
            await wait_for_poller(client, *QUEUES[role], identity or client.identity)


async def wait_for_poller(
    client: Client, queue: str, kind: "TaskQueueType.ValueType", identity: str
) -> None:
    """Return when the server has seen `identity` poll. Raises: RPCError if it refuses to say."""
    request = DescribeTaskQueueRequest(
        namespace=client.namespace, task_queue=TaskQueue(name=queue), task_queue_type=kind
    )
    while True:
        try:
            answer = await client.workflow_service.describe_task_queue(request)
        except RPCError as error:
            if not is_transient(error):
                raise
        else:
            if any(poller.identity == identity for poller in answer.pollers):
                return
        await asyncio.sleep(PAUSE_S)

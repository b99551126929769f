"""Whether a part of the stack is up: each check asks the part itself and trusts no clock.

A `wait_*` returns when the part is up and has no time limit of its own; the caller sets one.
"""

import asyncio
import http.client
import socket
import urllib.error
import urllib.request
from datetime import timedelta
from pathlib import Path

from google.protobuf.duration_pb2 import Duration
from temporalio.api.enums.v1 import IndexedValueType, TaskQueueType
from temporalio.api.namespace.v1 import NamespaceConfig
from temporalio.api.operatorservice.v1 import (
    AddSearchAttributesRequest,
    ListSearchAttributesRequest,
)
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice.v1 import DescribeTaskQueueRequest, UpdateNamespaceRequest
from temporalio.client import Client
from temporalio.service import RPCError

from perdure.client import names, search_attributes
from perdure.client.api import is_passing
from perdure.client.connection import connect, connect_to
from perdure.client.server import dev_server
from perdure.errors import ConfigurationError
from perdure.settings.tree import Settings

PAUSE_S = 0.05
SOCKET_TIMEOUT_S = 5.0
RETENTION = timedelta(days=7)
"""By default the dev server keeps closed workflows for a day; resuming by id should work for a week."""

ACTIVITY_QUEUES = (names.AGENT_QUEUE, names.GRADE_QUEUE, names.IO_QUEUE)
"""Without the boot queue, which a worker polls only while its host has a free seat."""


async def wait_for_temporal(address: str | None, settings: Settings) -> Client:
    """Try to connect until the server answers. `address`: our own dev server's; None: the user's."""
    while True:
        try:
            if address is None:
                return await connect(settings=settings)
            return await connect_to(dev_server(settings, address), settings)
        except ConfigurationError:
            await asyncio.sleep(PAUSE_S)


async def register_search_attributes(client: Client) -> list[str]:
    """Add the missing ones; return their names. Raises: RPCError when that is not allowed."""
    missing = await _missing(client)
    if missing:
        types = {name: _value_type(search_attributes.TYPE_NAMES[name]) for name in missing}
        await client.operator_service.add_search_attributes(
            AddSearchAttributesRequest(search_attributes=types, namespace=client.namespace)
        )
        while await _missing(client):
            await asyncio.sleep(PAUSE_S)
    return missing


async def keep_closed_workflows(client: Client) -> None:
    """Set the namespace's retention to a week."""
    await client.workflow_service.update_namespace(
        UpdateNamespaceRequest(
            namespace=client.namespace,
            config=NamespaceConfig(
                workflow_execution_retention_ttl=Duration(seconds=int(RETENTION.total_seconds()))
            ),
        )
    )


async def wait_for_pollers(client: Client, pid: int) -> None:
    """Return when worker process `pid` of this host polls all our queues."""
    for queue in ACTIVITY_QUEUES:
        await wait_for_poller(client, queue, TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY, pid)
    queue = names.WORKFLOWS_QUEUE
    await wait_for_poller(client, queue, TaskQueueType.TASK_QUEUE_TYPE_WORKFLOW, pid)


async def wait_for_http(url: str) -> None:
    """Return when `url` answers 200."""
    while not await answers(url):
        await asyncio.sleep(PAUSE_S)


async def answers(url: str, timeout_s: float = 5.0) -> bool:
    return await asyncio.to_thread(_get, url, timeout_s)


def _get(url: str, timeout_s: float) -> bool:
    # No proxy: these are our own addresses, usually loopback.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=timeout_s) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


async def wait_for_socket(health: Path) -> None:
    """Return when the gateway process behind the unix socket `health` answers."""
    while not await socket_answers(health):
        await asyncio.sleep(PAUSE_S)


async def socket_answers(health: Path) -> bool:
    """Whether one gateway process answers: each has a unix socket that no other process accepts on."""
    return await asyncio.to_thread(_get_by_socket, health)


def _get_by_socket(health: Path) -> bool:
    connection = _UnixConnection(health)
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("gateway", timeout=SOCKET_TIMEOUT_S)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self.path))


async def wait_for_poller(
    client: Client, queue: str, kind: "TaskQueueType.ValueType", pid: int
) -> None:
    ours = f"{pid}@{socket.gethostname()}"  # the SDK's default identity
    request = DescribeTaskQueueRequest(
        namespace=client.namespace, task_queue=TaskQueue(name=queue), task_queue_type=kind
    )
    while True:
        try:
            answer = await client.workflow_service.describe_task_queue(request)
        except RPCError as error:
            if not is_passing(error):
                raise
        else:
            if any(poller.identity == ours for poller in answer.pollers):
                return
        await asyncio.sleep(PAUSE_S)


async def _missing(client: Client) -> list[str]:
    known = await client.operator_service.list_search_attributes(
        ListSearchAttributesRequest(namespace=client.namespace)
    )
    return [name for name in search_attributes.TYPE_NAMES if name not in known.custom_attributes]


def _value_type(name: str) -> "IndexedValueType.ValueType":
    return IndexedValueType.Value(f"INDEXED_VALUE_TYPE_{name.upper()}")

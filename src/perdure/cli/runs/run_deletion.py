"""Deletes a run from the store, Temporal, the gateways and the viewer's index.

The process may be killed at any point. It first marks the run's label, so that nothing starts or
reports the run. It deletes the label last, so that the same command can delete the rest. Instances,
images and environments stay, because other runs share them.
"""

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from temporalio.api.common.v1 import WorkflowExecution as ExecutionId
from temporalio.api.workflowservice.v1 import DeleteWorkflowExecutionRequest
from temporalio.client import Client, WorkflowExecution, WorkflowExecutionStatus
from temporalio.service import RPCError, RPCStatusCode

from perdure import home_folder
from perdure.client import rollout_listing
from perdure.errors import ConfigurationError, NotFound, PerdureError
from perdure.gateway.control_client import GatewayControl
from perdure.gateway.gateway_addresses import Gateways
from perdure.rollouts import run_label
from perdure.sandboxes.base import identity_of
from perdure.settings.settings_tree import Settings
from perdure.stack import stack_lifecycle
from perdure.storage import store_keys
from perdure.storage.base import Store
from perdure.types import SLUG
from perdure.viewer.search_index import Index, index_path

AT_ONCE = 32
LISTED_S, PAUSE_S = 120.0, 0.2
"""Seconds to wait until the server no longer lists a deleted workflow, and between two checks."""
SHOWN = 3


@dataclass(frozen=True)
class FoundRun:
    """What a deletion removes."""

    run_id: str
    objects: int
    bytes: int
    sessions: Sequence[str]
    """Sessions whose turns are still in a gateway's journal."""
    workflows: int
    """Number of closed workflow executions."""


async def find(store: Store, client: Client, run_id: str) -> FoundRun:
    """Find what a deletion would remove. Raises: NotFound; ConfigurationError if a workflow is
    open."""
    if not re.fullmatch(SLUG, run_id):  # it goes into a query and a prefix
        raise NotFound(f"{run_id!r} is not a run id: `perdure status` lists the runs")
    executions = await _closed(client, run_id)
    sizes = {key: size async for key, size in _objects(store, run_id)}
    if not sizes and not executions:
        raise NotFound(
            f"no run {run_id!r} in {store.url} or in Temporal: `perdure status` lists them"
        )
    journals = [key for key in sizes if key.startswith(store_keys.JOURNAL)]
    sessions = sorted({key.split("/")[1] for key in journals})
    return FoundRun(run_id, len(sizes), sum(sizes.values()), sessions, len(executions))


async def delete(settings: Settings, store: Store, client: Client, found: FoundRun) -> None:
    """Delete the run. Repeat the call after an error. Raises: ConfigurationError if a workflow is
    open."""
    run_id = found.run_id
    await run_label.change(
        store, run_id, lambda label: label.model_copy(update={"is_deleting": True})
    )
    await _delete_workflows(client, run_id)
    await _forget_sessions(settings, store, found.sessions)
    # A manifest shows an ended run, and the sessions are named by the rollouts' keys.
    await store.delete(store_keys.manifest(run_id))
    keys = [key async for key, _ in _objects(store, run_id)]
    label = store_keys.run_label(run_id)
    await store.delete_many([key for key in keys if key.startswith(store_keys.JOURNAL)])
    await store.delete_many([key for key in keys if key != label])
    await asyncio.to_thread(_forget_in_index, settings, store, run_id)
    await _until_unlisted(client, run_id)
    await store.delete(label)


async def _objects(store: Store, run_id: str) -> AsyncIterator[tuple[str, int]]:
    """Keys and bytes of everything that only this run has."""
    rollouts = dict[str, None]()
    own = store_keys.rollouts(run_id)
    async for key, size in store.sizes(store_keys.run_prefix(run_id)):
        yield key, size
        instance, _, rest = key.removeprefix(own).partition("/")
        if key.startswith(own):
            rollouts[f"rollout/{run_id}/{instance}/{rest.partition('/')[0]}"] = None
    for rollout in rollouts:
        # Of all attempts, agents and judges: `p-<digest>-agent-1` -> `p-<digest>-`.
        named = identity_of(run_id, rollout, "agent", 1).removesuffix("agent-1")
        async for one in store.sizes(f"{store_keys.JOURNAL}{named}"):
            yield one
    for key in (store_keys.job(run_id), store_keys.run_label(run_id)):
        async for one in store.sizes(key):
            yield one


async def _closed(client: Client, run_id: str) -> list[WorkflowExecution]:
    """All executions of the run's workflows. Raises: ConfigurationError if one is open."""
    found = await rollout_listing.all_of_run(client, run_id)
    names = [one.id for one in found if one.status is WorkflowExecutionStatus.RUNNING]
    with contextlib.suppress(RPCError):  # a listing may be late
        run = await client.get_workflow_handle(f"run/{run_id}").describe()
        names += [run.id] if run.status is WorkflowExecutionStatus.RUNNING else []
    if names:
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        shown = ", ".join(sorted(set(names))[:SHOWN])
        raise ConfigurationError(
            f"run {run_id} is open: {shown}{more}. `perdure cancel` ends a run or a rollout; "
            "delete it when it has ended"
        )
    return found


async def _delete_workflows(client: Client, run_id: str) -> None:
    room = asyncio.Semaphore(AT_ONCE)
    found = await _closed(client, run_id)
    await asyncio.gather(*(_delete_workflow(client, one, room) for one in found))


async def _until_unlisted(client: Client, run_id: str) -> None:
    """Wait for the server, which deletes a workflow up to a minute after its end.

    Raises: ConfigurationError if it takes longer.
    """
    until = time.monotonic() + LISTED_S
    while left := await _closed(client, run_id):
        if time.monotonic() > until:
            raise ConfigurationError(
                f"Temporal still lists {len(left)} workflows of run {run_id}: repeat the command"
            )
        await asyncio.sleep(PAUSE_S)


async def _delete_workflow(client: Client, one: WorkflowExecution, room: asyncio.Semaphore) -> None:
    execution = ExecutionId(workflow_id=one.id, run_id=one.run_id)
    request = DeleteWorkflowExecutionRequest(
        namespace=client.namespace, workflow_execution=execution
    )
    async with room:
        try:
            await client.workflow_service.delete_workflow_execution(request)
        except RPCError as error:
            if error.status is not RPCStatusCode.NOT_FOUND:
                raise


async def _forget_sessions(settings: Settings, store: Store, sessions: Sequence[str]) -> None:
    """Ask the gateways to drop what they have in memory: the next run of this name has sessions of
    the same names. A gateway that is down has nothing in memory."""
    if not sessions:
        return
    secrets, state = home_folder.load_secrets(settings), stack_lifecycle.running(settings)
    urls = [state.gateway_url] if state else await Gateways(settings, store, secrets).urls()
    for url in urls:
        with contextlib.suppress(PerdureError):
            async with GatewayControl(url, secrets) as control:
                for session in sessions:
                    await control.forget(session)


def _forget_in_index(settings: Settings, store: Store, run_id: str) -> None:
    path = index_path(settings.home, store.url)
    if not path.exists():
        return
    index = Index(path)
    try:
        index.forget_run(run_id)
    finally:
        index.close()

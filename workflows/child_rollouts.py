"""Starts a rollout as a child, with the id, attributes and summary of one that a user starts."""

import asyncio
import contextlib
from datetime import timedelta
from typing import Any

from temporalio import workflow
from temporalio.common import WorkflowIDReusePolicy
from temporalio.exceptions import (
    ChildWorkflowError,
    FailureError,
    WorkflowAlreadyStartedError,
    is_cancelled_exception,
)
from temporalio.workflow import ParentClosePolicy

with workflow.unsafe.imports_passed_through():
    from perdure.client import search_attribute_keys as attributes
    from perdure.client import temporal_names
    from perdure.errors import Boundary
    from perdure.rollouts.activity_messages import Truncation
    from perdure.types import EpisodeRef, Failure, GroupRequest, RolloutRequest, RolloutStatus
    from workflows.workflow_failures import episode_of

WAIT_FOR_OTHER_PARENT_PATCH_ID = "waits-for-the-rollout-of-another-parent"

Child = workflow.ChildWorkflowHandle[Any, Any]


def summary_of(rollout: RolloutRequest) -> str:
    """The summary in the Web UI's list: `click-8.1.3 #0 · oracle`."""
    version = f" · policy {rollout.policy_version}" if rollout.policy_version is not None else ""
    return f"{rollout.instance_id} #{rollout.sample_index} · {rollout.agent}{version}"


def summary_of_group(group: GroupRequest) -> str:
    """`click-8.1.3 · oracle · group of 8`."""
    one = group.rollout
    version = f" · policy {one.policy_version}" if one.policy_version is not None else ""
    return f"{one.instance_id} · {one.agent}{version} · group of {group.n_samples}"


class OpenChildren:
    """The open children that make model calls. Tells them that the run's budget is used up or its
    time is over."""

    def __init__(self) -> None:
        self._open: dict[str, Child] = {}
        self._told: dict[str, list[Any]] = {}
        """Each signal that was sent -> its arguments."""

    async def result_of(self, child: Child) -> Any:
        self._open[child.id] = child
        try:
            for signal, arguments in list(self._told.items()):
                await _tell(child, signal, arguments)
            return await child
        finally:
            del self._open[child.id]

    async def stop(self) -> None:
        """Tell all children that the budget is used up."""
        await self._tell_all(temporal_names.SPENT, [])

    async def truncate(self, truncation: Truncation) -> None:
        """Tell all children that the run's time is over."""
        await self._tell_all(temporal_names.TRUNCATE, [truncation])

    async def _tell_all(self, signal: str, arguments: list[Any]) -> None:
        """Tell all open children, and each child that starts later."""
        if signal not in self._told:
            self._told[signal] = arguments
            children = list(self._open.values())
            await asyncio.gather(*(_tell(child, signal, arguments) for child in children))


async def _tell(child: Child, signal: str, arguments: list[Any]) -> None:
    with contextlib.suppress(FailureError):  # the child has ended
        await child.signal(signal, args=arguments)


async def _started(rollout: RolloutRequest, abandon: bool) -> Child:
    """Start the rollout as a child. If another parent has it, for example after a reset of this
    workflow, wait until it ends there. The child started here then finds its episode.

    Raises: WorkflowAlreadyStartedError in histories of earlier builds.
    """
    pause = timedelta(seconds=5)
    while True:
        try:
            return await workflow.start_child_workflow(
                temporal_names.ROLLOUT,
                rollout,
                id=rollout.workflow_id,
                result_type=EpisodeRef,
                id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
                parent_close_policy=(
                    ParentClosePolicy.ABANDON if abandon else ParentClosePolicy.REQUEST_CANCEL
                ),
                search_attributes=attributes.of_rollout(rollout),
                static_summary=summary_of(rollout),
            )
        except WorkflowAlreadyStartedError:
            if not workflow.patched(WAIT_FOR_OTHER_PARENT_PATCH_ID):
                raise
        await workflow.sleep(pause, summary="another parent has this rollout")
        pause = min(2 * pause, timedelta(minutes=5))


async def play_rollout(
    rollout: RolloutRequest, open_children: OpenChildren | None = None, *, abandon: bool = False
) -> EpisodeRef:
    """Run one rollout. Returns an EpisodeRef, however the child ends.

    `abandon`: the child may outlive its parent (`stragglers: keep`).
    """
    try:
        child = await _started(rollout, abandon)
        episode: EpisodeRef = await (
            child if open_children is None else open_children.result_of(child)
        )
        return episode
    except WorkflowAlreadyStartedError:
        return _failed(rollout, "this rollout is already running under another parent")
    except (FailureError, asyncio.CancelledError) as error:
        if is_cancelled_exception(error):
            return without_episode(rollout, RolloutStatus.CANCELLED)
        cause = error.cause if isinstance(error, ChildWorkflowError) else error
        if (failed := episode_of(cause)) is not None:
            return failed
        return _failed(rollout, f"the workflow failed: {cause}")


def without_episode(
    rollout: RolloutRequest, status: RolloutStatus, failure: Failure | None = None
) -> EpisodeRef:
    """The EpisodeRef of a rollout that left no episode in the store."""
    return EpisodeRef(
        uri="",
        instance_id=rollout.instance_id,
        sample_index=rollout.sample_index,
        agent=rollout.agent,
        status=status,
        failure=failure,
    )


def _failed(rollout: RolloutRequest, message: str) -> EpisodeRef:
    failure = Failure(boundary=Boundary.WORKER, type="WorkflowFailed", message=message[:500])
    return without_episode(rollout, RolloutStatus.FAILED, failure)

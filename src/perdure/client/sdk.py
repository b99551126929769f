"""The SDK for training loops: start runs and groups, wait durably, read episodes.

Waits survive a restart of the server or of the caller: ids are deterministic, so a second start of
the same request joins the first. `perdure.client.sync_client` is the sync version.
"""

import asyncio
import contextlib
import getpass
import logging
import re
import socket
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    Awaitable,
    Callable,
    Iterable,
    Sequence,
)
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel
from temporalio.client import (
    Client,
    WorkflowExecution,
    WorkflowExecutionStatus,
    WorkflowFailureError,
    WorkflowHandle,
    WorkflowQueryFailedError,
    WorkflowUpdateFailedError,
    WorkflowUpdateRPCTimeoutOrCancelledError,
)
from temporalio.common import (
    Priority,
    SearchAttributePair,
    TypedSearchAttributes,
    WorkflowIDConflictPolicy,
    WorkflowIDReusePolicy,
)
from temporalio.exceptions import (
    ApplicationError,
    CancelledError,
    TerminatedError,
    WorkflowAlreadyStartedError,
)
from temporalio.service import RPCError, RPCStatusCode

from perdure import retry
from perdure.agents.agent_validation import check_options
from perdure.client import request_comparison, rollout_listing, temporal_names
from perdure.client import search_attribute_keys as attributes
from perdure.client.batch_collection import Accept, Collector, Leftover, check_positive
from perdure.client.request_defaults import rollout_with_defaults, run_with_defaults
from perdure.client.rollout_listing import RolloutInfo, execution_name, info
from perdure.client.temporal_client import check_namespace, connect
from perdure.errors import Cancelled, ConfigurationError, NoResult, NotFound
from perdure.settings.settings_tree import Settings
from perdure.types import (
    SLUG,
    CalibrationRequest,
    Changeable,
    EpisodeRef,
    GroupRequest,
    GroupResult,
    RolloutRequest,
    RunRequest,
    RunStatus,
    RunSummary,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from perdure.client.gateway_episodes import GatewayEpisodes
    from perdure.episodes.episode import EpisodeSegments
    from perdure.episodes.training_batch import Batch
    from perdure.storage.base import Store

Result = TypeVar("Result")
Model = TypeVar("Model", bound=BaseModel)
Asked = TypeVar("Asked", bound=Changeable)
Request = TypeVar("Request", bound=BaseModel)
logger = logging.getLogger(__name__)

PASSING = {
    RPCStatusCode.UNAVAILABLE,
    RPCStatusCode.RESOURCE_EXHAUSTED,
    RPCStatusCode.DEADLINE_EXCEEDED,
    RPCStatusCode.CANCELLED,  # while a server starts or stops; a cancelled caller raises asyncio's error
}
"""Statuses of transient errors, during which the client keeps waiting."""
BROKEN = "transport error", "h2 protocol error"
"""Messages of a connection that breaks during a call. tonic reports UNKNOWN or INTERNAL, not
UNAVAILABLE."""
UNDECIDED = "closed before WorkflowTaskStarted"
FAILING = "Workflow Task in failed state"
"""Message of a query error that waiting does not fix. Transient errors have the same status,
FAILED_PRECONDITION, so only the message distinguishes them."""
TASK_FAILED, TASK_PATIENCE_S = "unexpected workflow task failure", 300.0
"""Message of an update whose task a worker could not end, because it stopped or was too busy, and the
seconds in which another task may succeed."""
NO_WORKER, CODE_FAILS = "no worker answers", "its workflow code fails"
NO_ANSWER_YET = "no answer yet"
"""States of an open run whose workflow cannot answer."""
BY_HAND = "started by hand"
"""State of rollouts without a run."""

ENDED_AMID_UPDATE = "AcceptedUpdateCompletedWorkflow"
"""The server's error type for an accepted update that was not done when the workflow ended."""

START_PATIENCE_S = 60.0
NAMESPACE_PATIENCE_S = 5.0
"""Seconds for which a busy dev server may not know its namespace after a change of the
namespace."""
START_PAUSE_S = 0.5

QUERY_TRIES = 4
"""Tries of a query, because a busy worker may need a while to replay a closed run."""


class Perdure:
    """A connection to Temporal. Create one per process and share it."""

    def __init__(self, client: Client) -> None:
        self.client = client

    @classmethod
    async def connect(
        cls, address: str | None = None, *, settings: Settings | None = None
    ) -> "Perdure":
        """`settings`: by default those of this process. Raises: ConfigurationError if no server
        answers, or if it lacks the namespace."""
        client = await connect(address, settings=settings)
        await check_namespace(client)
        return cls(client)

    async def start_run(self, request: RunRequest, *, has_new_rows: bool = False) -> "RunHandle":
        """Start the run, or join it if it exists. Raises: ConfigurationError.

        `has_new_rows`: the dataset has instances that the run lacks. An ended run runs them.
        """
        request = run_with_defaults(_a(RunRequest, request))
        _check_rollout_fields(request)
        _check_agent(request.rollout)
        agent = request.rollout.get("agent", "mini_swe_agent")
        handle, joined = await self._start_run(request, str(agent))
        if not joined:
            return RunHandle(self, request.run_id, handle)
        told, handle = await self._change_run(request, handle, has_new_rows)
        _tell_if(joined, handle)
        return RunHandle(self, request.run_id, handle, joined=True, changes=told)

    async def _change_run(
        self, request: RunRequest, handle: WorkflowHandle[Any, Any], has_new_rows: bool
    ) -> tuple[list[str], WorkflowHandle[Any, Any]]:
        """Apply the changeable fields in which the request differs from the run that it joins.

        An open run gets an update. An ended run starts again and runs the rollouts that the store
        lacks. A run that its deadline ended, or that lacks instances, starts again even without a
        change. If the run ends at this moment, try again.
        """
        began = time.monotonic()
        while True:
            current, asks, is_open = await self._changes(request, handle)
            fields = current.changes_to(asks)
            late = not is_open and await _was_ended_by_deadline(handle)
            continues = late or (has_new_rows and not is_open)
            if not fields and not continues:
                return [], handle
            fields["asked_by"] = _person()
            more = current.changed(fields).model_copy(update={"again": None})
            current.check_keeps_instances(more)
            try:
                if is_open:
                    await RunHandle(self, request.run_id, handle).change(fields)
                    return request_comparison.changes(current, asks), handle
            except (ConfigurationError, NotFound) as error:
                if not _is_ending(error) or time.monotonic() - began > START_PATIENCE_S:
                    raise
                await asyncio.sleep(START_PAUSE_S)
                continue
            if not (continues or fields.keys() - {"asked_by", "concurrency", "start_jitter_s"}):
                return [], handle  # the run has ended, and these fields affect no ended rollout
            handle, is_open = await self._start_run(
                more, "changed", again=WorkflowIDReusePolicy.ALLOW_DUPLICATE
            )
            if not is_open:
                told = ["deadline_s: counted from a new start"] if late else []
                told += ["instances: with the dataset's new ones"] if has_new_rows else []
                return [*request_comparison.changes(current, asks), *told], handle

    async def _change_group(
        self, request: GroupRequest, handle: WorkflowHandle[Any, Any]
    ) -> list[str]:
        """Like `_change_run`, for a group. An ended group keeps its result."""
        current, asks, is_open = await self._changes(request, handle)
        fields = current.changes_to(asks)
        if not fields or not is_open:
            return []
        try:
            await _update(handle, f"group '{handle.id.removeprefix('group/')}'", "change", fields)
        except (ConfigurationError, NotFound) as error:
            if not _is_ending(error):
                raise
            return []
        return request_comparison.changes(current, asks)

    async def _changes(
        self, request: Asked, handle: WorkflowHandle[Any, Any]
    ) -> tuple[Asked, Asked, bool]:
        """The current request, the request with the given changes, and whether the workflow is
        open."""
        described = await _durably(handle.describe)
        is_open = described.status is WorkflowExecutionStatus.RUNNING
        current = await self._first_request(handle, type(request))
        if current is None:
            return request, request, is_open
        current = current.changed((await described.memo()).get(temporal_names.CHANGED, {}))
        given = request.model_fields_set.intersection(request.CHANGEABLE)
        given |= set(RunRequest.CHOICE if isinstance(request, RunRequest) else ())
        asks = current.model_copy(update={name: getattr(request, name) for name in given})
        return current, asks, is_open

    async def play_again(self, request: RunRequest) -> "RunHandle":
        """Start an ended run again, for the rollouts that `request.again` selects.

        Raises: ConfigurationError if it is open.
        """
        handle, is_open = await self._start_run(
            request,
            f"again, round {request.again and request.again.round}",
            again=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
        )
        if is_open:
            raise ConfigurationError(
                f"run '{request.run_id}' is open: `perdure watch {request.run_id}` follows it, "
                f"`perdure cancel {request.run_id}` ends it"
            )
        return RunHandle(self, request.run_id, handle)

    async def start_group(self, request: GroupRequest) -> "GroupHandle":
        """Start n samples of one instance, or join them. Raises: ConfigurationError."""
        rollout = rollout_with_defaults(_a(GroupRequest, request).rollout)
        request = request.model_copy(update={"rollout": rollout})
        _check_agent(request.rollout.model_dump())
        handle, joined = await self._start(
            temporal_names.GROUP,
            request,
            request.workflow_id,
            attributes.of_rollout(request.rollout),
            summary=f"{request.rollout.instance_id} · group of {request.n_samples}",
            fairness=request.rollout.run_id,
        )
        told = await self._change_group(request, handle) if joined else []
        _tell_if(joined, handle)
        return GroupHandle(self, request.n_samples, handle, joined=joined, changes=told)

    async def with_first_version(self, request: GroupRequest) -> GroupRequest:
        """The request with the policy version and staleness with which its group was first started,
        so that a loop whose policy has moved on joins it. Unchanged if the group is new."""
        handle = self.client.get_workflow_handle(request.workflow_id)
        try:
            before = await self._first_request(handle, GroupRequest)
        except RPCError as error:
            if error.status is not RPCStatusCode.NOT_FOUND:
                raise
            return request
        if before is None:
            return request
        names = ("policy_version", "max_staleness", "too_stale")
        kept = {name: getattr(before.rollout, name) for name in names}
        return request.model_copy(update={"rollout": request.rollout.model_copy(update=kept)})

    async def batches(
        self,
        requests: Iterable[GroupRequest] | AsyncIterable[GroupRequest],
        *,
        groups_per_batch: int,
        in_flight: int | None = None,
        accept: Accept | None = None,
        std_normalization: bool = True,
        leftover: Leftover = "cancel",
        store: "Store | GatewayEpisodes | None" = None,
    ) -> "AsyncGenerator[Batch[NDArray[Any]], None]":
        """Yield a batch as soon as `groups_per_batch` groups have finished, until `requests` end.
        The last batch may be smaller.

        Example:
            async for batch in perdure.batches(requests(), groups_per_batch=32):
                loss = step(batch.torch("cuda"))  # shapes and dtypes: see Batch

        `requests`: one is taken when its group starts, so a generator can give each the policy
        version of that moment. `in_flight`: by default a group starts only for the current batch,
        so that all its tokens may have one version. A number keeps that many groups running, also
        for later batches and while you train, which needs `max_staleness` of at least 1. A finished
        group waits for its batch as references; only one batch of tokens is in memory.

        A member without a reward has no row, as in the trainers' hooks. Each request says how long
        to wait for members, `quorum`, `deadline_s`, `stragglers`, and `without_verdict` whether they
        are replaced. `accept`, such as `has_signal`, `complete` or `fresh(...)` of
        `batch_collection`, drops whole groups; others take their places.
        `advantages` of the batch: see there; `std_normalization=False` does not divide by the
        standard deviation.

        After a crash, a second loop with the same run ids joins its groups with the policy versions
        that they have: it yields finished groups again, without sampling. To skip groups that are
        already trained, keep `batch.group_ids` in the checkpoint and leave their requests out. One
        loop refuses two requests for one group, because they would train the same episodes twice:
        give each epoch its own run id.

        When the caller leaves the loop, open groups are cancelled; with `leftover="keep"` they
        continue. Use `contextlib.aclosing` to leave at once and not when the generator is collected.

        Raises: ConfigurationError for a bad or repeated request; NoResult if a group failed or was
        terminated; ValueError for numbers below 1; the errors of `read_episodes`.
        """
        from perdure.episodes.training_batch import BatchBuilder  # imports numpy

        check_positive(groups_per_batch=groups_per_batch)
        collector = Collector(self, requests, in_flight=in_flight, accept=accept, store=store)
        try:
            while True:
                builder, groups = BatchBuilder(std_normalization=std_normalization), 0
                async for group in collector.groups(groups_per_batch, count=lambda _: 1):
                    groups += 1
                    for episode in group.episodes:
                        builder.add(episode)
                if not groups:
                    return
                yield builder.batch()
        finally:
            await collector.aclose(leftover)

    async def start_rollout(self, request: RolloutRequest) -> "RolloutHandle":
        """Start one rollout, or join it. Raises: ConfigurationError."""
        request = rollout_with_defaults(_a(RolloutRequest, request))
        _check_agent(request.model_dump())
        handle, joined = await self._start(
            temporal_names.ROLLOUT,
            request,
            request.workflow_id,
            attributes.of_rollout(request),
            summary=f"{request.instance_id} #{request.sample_index} · {request.agent}",
            fairness=request.run_id,
        )
        _tell_if(joined, handle)
        return RolloutHandle(self, handle, joined=joined)

    async def start_calibration(self, request: CalibrationRequest) -> "CalibrationHandle":
        """Start the calibration, or join it if it is open. An ended one starts again and skips rows
        that have a record."""
        handle, _ = await self._start(
            temporal_names.CALIBRATION,
            request,
            request.workflow_id,
            TypedSearchAttributes([]),
            summary=f"calibrate {request.dataset}",
            fairness=f"calibration-{request.dataset}",
            again=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
        )
        return CalibrationHandle(handle)

    async def run(self, run_id: str) -> "RunHandle":
        """Attach to a run by its id. Raises: NotFound."""
        handle = self.client.get_workflow_handle(f"run/{run_id}")
        await _described(handle, f"run '{run_id}'")
        return RunHandle(self, run_id, handle)

    async def standalone_rollouts_status(self, run_id: str) -> RunStatus | None:
        """Status of rollouts that were started one by one under this run id; None if there are
        none."""
        if not re.fullmatch(SLUG, run_id):
            return None
        counted = await self._counted(run_id, BY_HAND)
        closed = counted.started - counted.running  # nothing starts a terminated one again
        update = {"total": counted.started, "done": closed}
        return counted.model_copy(update=update) if counted.started else None

    def rollout(self, workflow_id: str) -> "RolloutHandle":
        return RolloutHandle(self, self.client.get_workflow_handle(workflow_id))

    async def runs(self, limit: int = 50) -> list[WorkflowExecution]:
        """Runs, newest first. If a run was started again, its last execution."""
        query = f"WorkflowType = '{temporal_names.RUN}'"
        found = [w async for w in self.client.list_workflows(query, limit=limit)]
        return rollout_listing.latest_executions(found)

    async def rollouts(self, run_id: str) -> list[RolloutInfo]:
        """All started rollouts of a run, in any state."""
        return await rollout_listing.of_run(self.client, run_id)

    async def _counted(self, run_id: str, state: str) -> RunStatus:
        """Counts of a run's rollouts, which the server knows without a worker. A terminated rollout
        is not done."""
        by_state = await rollout_listing.count(self.client, run_id)
        started, running = sum(by_state.values()), by_state.get("Running", 0)
        done = started - running - by_state.get("Terminated", 0)
        return RunStatus(run_id=run_id, state=state, started=started, running=running, done=done)

    async def _start_run(
        self,
        request: RunRequest,
        what: str,
        again: WorkflowIDReusePolicy = WorkflowIDReusePolicy.ALLOW_DUPLICATE_FAILED_ONLY,
    ) -> tuple[WorkflowHandle[Any, Any], bool]:
        return await self._start(
            temporal_names.RUN,
            request,
            request.workflow_id,
            TypedSearchAttributes([SearchAttributePair(attributes.RUN, request.run_id)]),
            summary=f"run {request.run_id} · {what}",
            fairness=request.run_id,
            priority=request.priority,
            again=again,
        )

    async def _start(
        self,
        workflow: str,
        request: Any,
        workflow_id: str,
        known: TypedSearchAttributes,
        *,
        summary: str,
        fairness: str,
        priority: int | None = None,
        again: WorkflowIDReusePolicy = WorkflowIDReusePolicy.ALLOW_DUPLICATE_FAILED_ONLY,
    ) -> tuple[WorkflowHandle[Any, Any], bool]:
        """Start a workflow. Returns its handle, and whether it had been started before.

        A start that hits a transient error is repeated, which its id makes safe.
        """
        began, repeated = time.monotonic(), False
        while True:
            try:
                await self.client.start_workflow(
                    workflow,
                    request,
                    id=workflow_id,
                    task_queue=temporal_names.WORKFLOWS_QUEUE,
                    id_conflict_policy=WorkflowIDConflictPolicy.FAIL,
                    id_reuse_policy=again,
                    search_attributes=known,
                    static_summary=summary,
                    priority=Priority(priority_key=priority, fairness_key=fairness[:64]),
                )
                # Without a run id, the handle follows the next execution after a reset.
                return self.client.get_workflow_handle(workflow_id), False
            except WorkflowAlreadyStartedError:  # perhaps by this call, if its answer was lost
                handle = self.client.get_workflow_handle(workflow_id)
                await self._check_same(handle, request)
                return handle, not repeated
            except RPCError as error:
                if time.monotonic() - began > _start_patience_s(error):
                    raise
            repeated = True
            await asyncio.sleep(START_PAUSE_S)

    async def _check_same(self, handle: WorkflowHandle[Any, Any], request: BaseModel) -> None:
        """Raises: ConfigurationError if the workflow was started with another request."""
        before = await self._first_request(handle, type(request))
        if before is not None:
            changes = request_comparison.differences(
                request_comparison.request_identity(before),
                request_comparison.request_identity(request),
            )
            request_comparison.refuse(
                handle.id, changes, "give another run_id to start another one"
            )

    async def _first_request(
        self, handle: WorkflowHandle[Any, Any], kind: type[Model]
    ) -> Model | None:
        """The input of a workflow; None if the input is invalid or comes from another version."""
        first = await _durably(lambda: anext(handle.fetch_history_events(page_size=1)))
        given = first.workflow_execution_started_event_attributes.input.payloads
        try:
            (raw,) = await self.client.data_converter.decode(given)
            return kind.model_validate(raw)
        except ValueError:
            return None


class RunHandle:
    """A run that was started or joined."""

    def __init__(
        self,
        perdure: Perdure,
        run_id: str,
        handle: WorkflowHandle[Any, Any],
        *,
        joined: bool = False,
        changes: Sequence[str] = (),
    ) -> None:
        """`joined`: the run had been started before. `changes`: what this start changed, old ->
        new."""
        self.perdure = perdure
        self.run_id = run_id
        self.handle = handle
        self.joined = joined
        self.changes = changes

    async def progress(
        self, *, listed: WorkflowExecution | None = None, patience: timedelta | None = None
    ) -> RunStatus:
        """The run's progress. For a closed run, it comes from the result. Rollouts that wait for a
        seat on a host do not count as running.

        `listed`: the run from a listing, which saves a request. `patience`: how long the workflow
        may take to answer. Without an answer, the server's counts are used.
        """
        described = listed or await _described(self.handle, f"run '{self.run_id}'")
        if described.status is WorkflowExecutionStatus.RUNNING:
            try:
                answer = await self.handle.query("status", result_type=dict, rpc_timeout=patience)
                status = RunStatus.model_validate(answer)
                queued = await rollout_listing.waiting(self.perdure.client, self.run_id)
                return status.model_copy(update={"running": max(0, status.running - queued)})
            except RPCError as error:
                if not _unanswered(error) and FAILING not in error.message:
                    raise
                return await self.perdure._counted(self.run_id, _why_unanswered(error, patience))
        return await self._closed(described.status)

    async def _closed(self, status: WorkflowExecutionStatus | None) -> RunStatus:
        if status is not WorkflowExecutionStatus.COMPLETED:
            return await self._broken_off(status)
        summary = await self.handle.result()
        by_status = summary.get("by_status", {})
        running = by_status.get("running", 0)  # kept stragglers
        return RunStatus(
            run_id=self.run_id,
            state="done",
            total=summary["rollouts"],
            started=summary["rollouts"],
            done=summary["rollouts"] - running,
            running=running,
            by_status=by_status,
            by_outcome=summary.get("by_outcome", {}),
            stopped=summary.get("stopped", ""),
        )

    async def _broken_off(self, status: WorkflowExecutionStatus | None) -> RunStatus:
        """The progress of a closed run without a result. The server's counts if no worker answers."""
        state = (
            "cancelled"
            if status is WorkflowExecutionStatus.CANCELED
            else execution_name(status).lower()
        )
        known = {"state": state, "attention": await self._why(status)}
        for _ in range(QUERY_TRIES):
            try:
                answer = await self.handle.query("status", result_type=dict)
            except (RPCError, WorkflowQueryFailedError):
                await asyncio.sleep(0.5)
                continue
            return RunStatus.model_validate(answer).model_copy(update={**known, "running": 0})
        counted = await self.perdure._counted(self.run_id, state)
        return counted.model_copy(update=known)

    async def _why(self, status: WorkflowExecutionStatus | None) -> str:
        """The reason of a failed run; empty for a cancelled or terminated one."""
        if status is WorkflowExecutionStatus.FAILED:
            try:
                await self.handle.result()
            except WorkflowFailureError as error:
                return _reason(error)
        return ""

    async def result(self) -> RunSummary:
        """Wait for the run's end, through restarts of the server.

        Raises: Cancelled; NoResult if the run failed or was terminated; NotFound.
        """
        return RunSummary.model_validate(await _result(self.handle, f"run '{self.run_id}'"))

    async def pause(self) -> RunStatus:
        return RunStatus.model_validate(await self._update("pause"))

    async def resume(self) -> RunStatus:
        return RunStatus.model_validate(await self._update("resume"))

    async def resize(self, concurrency: int) -> RunStatus:
        """Raises: ConfigurationError."""
        if type(concurrency) is not int or not 1 <= concurrency <= 2000:
            raise ConfigurationError(f"resize({concurrency!r}): give a whole number from 1 to 2000")
        return RunStatus.model_validate(await self._update("resize", concurrency))

    async def change(self, fields: dict[str, Any]) -> RunStatus:
        """Change fields of RunRequest. The run's record keeps who changed them.

        Raises: ConfigurationError.
        """
        return RunStatus.model_validate(await self._update("change", fields))

    async def cancel(self) -> list[str]:
        """Cancel the run and its rollouts in flight, which still leave their episodes.

        A workflow whose code fails cannot handle the cancellation. It is terminated without an
        episode, and a sweep kills its sandbox. Returns the ids of these workflows. A slow workflow
        is cancelled like the others.
        Raises: NotFound if the run had ended before; the message says how.
        """
        failing = [
            one
            async for one in rollout_listing.list_failing_workflows(
                self.perdure.client, self.run_id
            )
        ]
        try:
            await _cancel(self.handle, f"run '{self.run_id}'")
        except NotFound:  # the run may have ended before its rollouts
            if not failing:
                raise
        terminated = []
        for one in failing:
            with contextlib.suppress(RPCError):  # the workflow has ended
                await self.perdure.client.get_workflow_handle(one).terminate(
                    reason="its workflow code fails, so it cannot be cancelled"
                )
                terminated.append(one)
        return terminated

    async def rollouts(self) -> list[RolloutInfo]:
        return await self.perdure.rollouts(self.run_id)

    async def _update(self, name: str, *arguments: Any) -> Any:
        return await _update(self.handle, f"run '{self.run_id}'", name, *arguments)


class CalibrationHandle:
    """A calibration that was started or joined."""

    def __init__(self, handle: WorkflowHandle[Any, Any]) -> None:
        self.handle = handle

    async def progress(self) -> RunStatus:
        """The calibration's progress; `by_outcome` counts rows. Raises: RPCError if no worker
        answers."""
        return RunStatus.model_validate(await self.handle.query("status", result_type=dict))

    async def result(self) -> dict[str, Any]:
        """Wait for the end, like `RunHandle.result`. Returns the fields of `CalibrationSummary`.

        Raises: Cancelled, NoResult, NotFound.
        """
        what = f"calibration '{self.handle.id.removeprefix('calibration/')}'"
        summary: dict[str, Any] = await _result(self.handle, what)
        return summary


class GroupHandle:
    """n samples of one instance."""

    def __init__(
        self,
        perdure: Perdure,
        n_samples: int,
        handle: WorkflowHandle[Any, Any],
        *,
        joined: bool = False,
        changes: Sequence[str] = (),
    ) -> None:
        """`joined`, `changes`: see RunHandle."""
        self.perdure = perdure
        self.n_samples = n_samples
        self.handle = handle
        self.joined = joined
        self.changes = changes

    async def episodes(
        self, store: "Store | GatewayEpisodes | None" = None
    ) -> "AsyncGenerator[EpisodeSegments, None]":
        """Yield episodes as they finish, with their tokens. `store`: as for `read_episodes`.

        Raises: the errors of `read_episodes`.
        """
        from perdure.client.episode_reader import read_episodes  # imports pyarrow

        async for ref in self.refs():
            for episode in await read_episodes([ref], store):
                yield episode

    async def refs(self) -> AsyncGenerator[EpisodeRef, None]:
        """Yield references to episodes as they finish, with rewards and counts. Use one iterator per
        group."""
        cursor = 0
        while cursor < self.n_samples:
            described = await _durably(self.handle.describe)
            if described.status is not WorkflowExecutionStatus.RUNNING:
                for episode in (await self._result_episodes())[cursor:]:
                    yield episode
                return
            for episode in await self._new_since(cursor):
                cursor += 1
                yield episode

    async def result(self) -> GroupResult:
        """Wait for the end, like `RunHandle.result`. Raises: Cancelled, NoResult, NotFound."""
        what = f"group '{self.handle.id.removeprefix('group/')}'"
        return GroupResult.model_validate(await _result(self.handle, what))

    async def describe_open_rollouts(self) -> str:
        """What the group's rollouts are doing, according to the server, without asking a worker.

        Example: "5 of 8 rollouts have ended; 2 in stage agent, for up to 310 s; 1 in stage waiting, ..."
        """
        run_id, _, instance_id = self.handle.id.removeprefix("group/").partition("/")
        found = await rollout_listing.of_instance(self.perdure.client, run_id, instance_id)
        return rollout_listing.summarize_rollouts(found, self.n_samples)

    async def cancel(self) -> None:
        await _durably(self.handle.cancel)

    async def _new_since(self, cursor: int) -> list[EpisodeRef]:
        def asked() -> Awaitable[list[Any]]:
            return _durably(
                lambda: self.handle.execute_update("wait_progress", cursor, result_type=list)
            )

        try:
            found = await retry.retry_call(
                asked,
                RPCError,
                pauses=(0.5, 15.0),
                patience_s=TASK_PATIENCE_S,
                passes=lambda error: TASK_FAILED in error.message,
            )
        except RPCError as error:
            if error.status is RPCStatusCode.NOT_FOUND:  # the group has ended
                return []
            raise
        return [EpisodeRef.model_validate(item) for item in found]

    async def _result_episodes(self) -> list[EpisodeRef]:
        try:
            progress = await _durably(
                lambda: self.handle.query("progress", result_type=dict), passing=_unanswered
            )
        except RPCError as error:
            if UNDECIDED in error.message:  # terminated before any worker saw it
                return []
            raise
        return [EpisodeRef.model_validate(item) for item in progress["episodes"]]


class RolloutHandle:
    def __init__(
        self, perdure: Perdure, handle: WorkflowHandle[Any, Any], *, joined: bool = False
    ) -> None:
        """`joined`: the rollout had been started before."""
        self.perdure = perdure
        self.handle = handle
        self.joined = joined

    async def result(self) -> EpisodeRef:
        """Wait for the end. A failed rollout returns its episode too, with `failure`.

        Raises: Cancelled (the episode is in the store); NoResult; NotFound.
        """
        what = f"rollout '{self.handle.id.removeprefix('rollout/')}'"
        try:
            return EpisodeRef.model_validate(await _result(self.handle, what))
        except NoResult as error:
            if (episode := _episode_in(error.__cause__)) is None:
                raise
            return episode

    async def state(self) -> dict[str, Any]:
        """Stage, attempt, and one line per event so far. Raises: NotFound."""

        def ask() -> Awaitable[dict[str, Any]]:
            return self.handle.query("state", result_type=dict)

        return await _known(ask, f"rollout '{self.handle.id.removeprefix('rollout/')}'")

    async def cancel(self) -> None:
        """Raises: NotFound if the rollout had ended before (the message says how) or never
        started."""
        await _cancel(self.handle, f"rollout '{self.handle.id}'")


def _a(kind: type[Request], given: Request) -> Request:
    """Raises: ConfigurationError if `given` is something else, such as a dict."""
    if not isinstance(given, kind):
        raise ConfigurationError(
            f"give a {kind.__name__}, not a {type(given).__name__}: "
            f"{kind.__name__}.model_validate(...) converts a dict"
        )
    return given


def _person() -> str:
    """Example: `ada@head`; only the host if the account has no name."""
    host = socket.gethostname()
    try:
        return f"{getpass.getuser()}@{host}"
    except (KeyError, OSError):
        return host


def _tell_if(joined: bool, handle: WorkflowHandle[Any, Any]) -> None:
    if joined:
        logger.warning(
            "%s was started before; joining it. Use another run_id for new samples", handle.id
        )


def _check_rollout_fields(request: RunRequest) -> None:
    """Raises: ConfigurationError, which names the field of `rollout`."""
    RolloutRequest(**{**request.rollout, "run_id": request.run_id, "instance": "any/instance"})


def _check_agent(rollout: dict[str, Any]) -> None:
    """Refuse agent options that the boot stage would refuse. Skip an agent with a dotted path,
    which may exist only on workers."""
    agent = rollout.get("agent", RolloutRequest.model_fields["agent"].default)
    if ":" not in agent:
        check_options(agent, rollout.get("agent_options", {}), rollout.get("mcp_servers", {}))


def is_transient(error: RPCError) -> bool:
    """Whether the same call may succeed later: the server is down, starting, stopping or busy."""
    return error.status in PASSING or any(sign in error.message for sign in BROKEN)


def _start_patience_s(error: RPCError) -> float:
    if is_transient(error):
        return START_PATIENCE_S
    if error.status is RPCStatusCode.NOT_FOUND and "Namespace" in error.message:
        return NAMESPACE_PATIENCE_S
    return -1.0


def _why_unanswered(error: RPCError, patience: timedelta | None) -> str:
    """The state of an open run. After a short wait, a worker may still be replaying a long run."""
    if FAILING in error.message:
        return CODE_FAILS
    ran_out = error.status in (RPCStatusCode.DEADLINE_EXCEEDED, RPCStatusCode.CANCELLED)
    return NO_ANSWER_YET if patience is not None and ran_out else NO_WORKER


def _unanswered(error: RPCError) -> bool:
    """Whether a query failed because no worker polls or the first workflow task is not done yet."""
    if error.status is RPCStatusCode.FAILED_PRECONDITION:
        return UNDECIDED not in error.message and FAILING not in error.message
    return is_transient(error)


async def _durably(
    call: Callable[[], Awaitable[Result]], passing: Callable[[RPCError], bool] = is_transient
) -> Result:
    """Retry through restarts of the server. The SDK's own retries give up after ten seconds."""
    errors = (RPCError, WorkflowUpdateRPCTimeoutOrCancelledError)
    return await retry.retry_call(
        call,
        errors,
        pauses=(0.5, 15.0),
        passes=lambda error: not isinstance(error, RPCError) or passing(error),
    )


async def _result(handle: WorkflowHandle[Any, Any], what: str) -> Any:
    """Wait for a workflow's result. Raises: Cancelled, NoResult, NotFound, with the reason."""
    followed = None
    while True:
        try:
            return await _known(lambda: _durably(handle.result), what)
        except WorkflowFailureError as failure:
            if isinstance(failure.cause, CancelledError):
                raise Cancelled(f"{what} was cancelled") from failure
            newest = (await _known(lambda: _durably(handle.describe), what)).run_id
            if isinstance(failure.cause, TerminatedError) and newest != followed:
                followed = newest  # a reset terminates one execution and starts another
                continue
            raise NoResult(f"{what} ended without a result: {_reason(failure)}") from failure


async def _known(call: Callable[[], Awaitable[Result]], what: str) -> Result:
    """Raises: NotFound."""
    try:
        return await call()
    except RPCError as error:
        if error.status is RPCStatusCode.NOT_FOUND:
            raise NotFound(f"{what} does not exist") from error
        raise


def _episode_in(failure: BaseException | None) -> EpisodeRef | None:
    """The episode in the error of a rollout that ended without a verdict; None if there is none."""
    cause = failure.cause if isinstance(failure, WorkflowFailureError) else None
    if (
        isinstance(cause, ApplicationError)
        and cause.type == temporal_names.WITHOUT_VERDICT
        and cause.details
    ):
        return EpisodeRef.model_validate(cause.details[0])
    return None


def _reason(error: BaseException) -> str:
    """The message of the innermost error."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(getattr(error, "message", "") or error)


async def _cancel(handle: WorkflowHandle[Any, Any], what: str) -> None:
    found = await _described(handle, what)
    if (
        found.status is not WorkflowExecutionStatus.RUNNING
    ):  # the server itself would accept the cancellation
        ended = await info(found)
        how = ended.outcome or ended.execution.lower().replace("canceled", "cancelled")
        if ended.episode is not None and ended.episode.reward is not None:
            how += f", reward {ended.episode.reward:g}"
        raise NotFound(f"{what} had ended before ({how}): nothing was cancelled")
    await _durably(handle.cancel)


async def _update(
    handle: WorkflowHandle[Any, Any], what: str, name: str, *arguments: Any
) -> dict[str, Any]:
    """Raises: ConfigurationError if the update is refused; NotFound if the workflow has ended."""
    try:
        told: dict[str, Any] = await handle.execute_update(
            name, args=list(arguments), result_type=dict
        )
        return told
    except WorkflowUpdateFailedError as error:
        raise ConfigurationError(_reason(error)) from error
    except RPCError as error:
        if error.status is not RPCStatusCode.NOT_FOUND:
            raise
        ended = await _described(handle, what)
        raise NotFound(f"{what} has ended ({execution_name(ended.status)})") from error


async def _was_ended_by_deadline(handle: WorkflowHandle[Any, Any]) -> bool:
    """Whether a closed run ended before all its rollouts because of its deadline."""
    try:
        summary = await _durably(handle.result)
    except WorkflowFailureError:
        return False
    return isinstance(summary, dict) and summary.get("stopped_by") == "deadline"


def _is_ending(error: Exception) -> bool:
    """Whether an update failed because the workflow has ended, or is about to."""
    cause = error.__cause__
    if isinstance(cause, RPCError):
        return cause.status is RPCStatusCode.NOT_FOUND
    cause = cause.cause if isinstance(cause, WorkflowUpdateFailedError) else None
    return isinstance(cause, ApplicationError) and cause.type in (
        temporal_names.ENDING,
        ENDED_AMID_UPDATE,
    )


async def _described(handle: WorkflowHandle[Any, Any], what: str) -> WorkflowExecution:
    try:
        return await handle.describe()
    except RPCError as error:
        if error.status is RPCStatusCode.NOT_FOUND:
            raise NotFound(f"{what} does not exist: `perdure status` lists the runs") from error
        raise

"""RolloutWorkflow: one sample of an agent's work on one instance, from boot to episode.

Ordering only. A rollout that ends without a verdict fails as a workflow, and its error carries the
episode (docs/decisions/0028-no-verdict-is-red.md): a red line in the Web UI needs attention.
"""

import asyncio
import contextlib
import math
from collections.abc import Callable, Coroutine
from datetime import timedelta
from typing import Any, TypeVar

from temporalio import workflow
from temporalio.exceptions import ActivityError, is_cancelled_exception

with workflow.unsafe.imports_passed_through():
    from perdure.client import temporal_names
    from perdure.errors import Boundary
    from perdure.rollouts.activity_messages import (
        CALL_UNANSWERED,
        IDENTITY_DIFFERS,
        LONGEST_WAIT_S,
        TRUNCATED,
        WORKER_EVICTED,
        AgentRun,
        Attempt,
        Booted,
        Captured,
        Ending,
        GradedPatch,
        Truncation,
    )
    from perdure.types import AgentEnd, EpisodeRef, Failure, RolloutRequest, RolloutStatus
    from workflows import activity_options
    from workflows.activity_redispatch import ordered
    from workflows.child_rollouts import without_episode
    from workflows.web_ui import RolloutPage
    from workflows.workflow_failures import (
        check_own_id,
        failure_of,
        is_cancelled,
        is_evicted_from_cache,
        is_heartbeat_timeout,
        is_host_lost,
        is_schedule_to_start_timeout,
        parse,
        stop_if_cancelled,
        to_the_end,
        type_of,
        without_verdict,
    )

Result = TypeVar("Result")

MAX_EVICTIONS = 50
ASK_AGAIN_S = 600.0
"""Seconds after which the rollout asks for its permit again, because the account's workflow may
have been terminated."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 600.0
"""Seconds before the next attempt if a model call got no answer. The pause doubles each time."""
CLEANING = ("destroy_sandbox", "emit_episode")
WORK_PRESERVING = ("run_agent", "capture_diff")
"""Activities that continue if the workflow is cancelled after the run's time is over."""
BEFORE_AGENT = ("starting", "waiting", "parked", "boot")
SHORTEST_PARK_S = 1.0
"""Seconds, in case the clocks of this server and of the gateway's host differ."""
EMIT_AGAIN = timedelta(minutes=10)
"""Pause before the next try to write an episode, if writing one without evidence failed too."""


@workflow.defn(name=temporal_names.ROLLOUT)
class RolloutWorkflow:
    """boot_sandbox -> run_agent -> capture_diff -> grade_in_fresh_sandbox -> emit_episode."""

    def __init__(self) -> None:
        self.page = RolloutPage()
        self.evictions = 0
        self.attempt = 0
        self.grants: set[str] = set()
        self.is_spent = False
        self.truncation: Truncation | None = None
        """Set once the run's time is over."""
        self.grade = ""
        self.stopped_in = ""
        self.has_parked = False
        """Whether the current attempt waited for a quota before its boot."""
        self.is_opened = False
        """Whether the accounts were opened early since the rollout parked."""
        self.lost: Failure | None = None
        """Why the last attempt ended."""
        self.grading_end_task: asyncio.Task[None] | None = None
        self.agent_task: asyncio.Task[AgentRun] | None = None
        self.stages_task: asyncio.Task[Any] | None = None
        """Its stages, until they have ended."""

    @workflow.run
    async def run(self, request: Any = None) -> EpisodeRef:
        rollout = parse(RolloutRequest, request)
        check_own_id(rollout.workflow_id)
        self.page.open(rollout)
        cancelled = False
        self.stages_task = asyncio.current_task()
        try:
            ending = await self._play(rollout)
        except asyncio.CancelledError:
            cancelled = self.truncation is None
            ending = (RolloutStatus.CANCELLED, None) if cancelled else self._truncated_ending()
        self.stages_task = None
        if isinstance(ending, EpisodeRef):
            self.page.close(ending)
            return ending
        status, failure = ending
        if failure is not None and failure.type == IDENTITY_DIFFERS:
            episode = without_episode(
                rollout, status, failure
            )  # the stored episode belongs to another request
        else:
            episode = await to_the_end(self._emit(rollout, status, failure))
        self.page.close(episode)
        if cancelled:
            raise asyncio.CancelledError("the rollout was cancelled; its episode is in the store")
        if episode.status is RolloutStatus.FAILED:
            raise without_verdict(episode)
        return episode

    @workflow.signal(name=temporal_names.GRANTED)
    def granted(self, step: str) -> None:
        """The sandbox of this step may be created now."""
        self.grants.add(step)

    @workflow.signal(name=temporal_names.BOOTING)
    def booting(self, attempt: int) -> None:
        """The rollout has a seat. Sent only if the boot takes longer than a moment."""
        self.page.booting(attempt)

    @workflow.signal(name=temporal_names.SPENT)
    def spent(self) -> None:
        """The run's budget is used up: stop the agent and grade its work."""
        self.is_spent = True
        self.page.spent()
        if self.agent_task is not None:
            self.agent_task.cancel()

    @workflow.signal(name=temporal_names.TRUNCATE)
    def truncate(self, truncation: Truncation) -> None:
        """The run's time is over: stop the agent and capture its work. Grade until `ends_at`."""
        if self.truncation is not None:
            return
        self.truncation = truncation
        self.page.truncated(truncation.cause)
        if self.agent_task is not None:
            self.agent_task.cancel()
        elif self.page.current in BEFORE_AGENT and self.stages_task is not None:
            self.stages_task.cancel()
        self.grading_end_task = asyncio.create_task(self._end_grading(truncation))

    @workflow.signal(name=temporal_names.OPENED)
    def opened(self) -> None:
        """A user opened the accounts early: a parked rollout asks again now."""
        self.is_opened = True

    @workflow.query
    def state(self) -> dict[str, Any]:
        """The rollout's progress, for users and for `perdure status`."""
        return self.page.state()

    @property
    def is_stopping(self) -> bool:
        """Whether the run stops its agents."""
        return self.is_spent or self.truncation is not None

    def _stop_if_cancelled(self) -> None:
        """Raise CancelledError if this workflow has been cancelled. Once the run's time is over, a
        cancellation has no effect, because the run may end before its rollouts have stored their
        work."""
        if self.truncation is None:
            stop_if_cancelled()

    async def _end_grading(self, truncation: Truncation) -> None:
        left = truncation.ends_at - workflow.time()
        await workflow.sleep(max(0.0, left), summary="until gradings end")
        if self.page.current in ("grade", "parked") and self.stages_task is not None:
            self.stages_task.cancel()

    def _truncated_ending(
        self, stage: str = "", run: AgentRun | None = None
    ) -> tuple[RolloutStatus, Failure]:
        """The ending of a rollout that was stopped in this stage, by default the current one."""
        assert self.truncation is not None, "the run's time is over"
        self.stopped_in, cause = stage or self.page.current, self.truncation.cause
        if run is not None:
            turns = f"{run.turns} turn{'' if run.turns == 1 else 's'}"
            waited = f", while a model call waited: {run.unanswered}" if run.unanswered else ""
            message = f"{cause} stopped its agent after {turns}{waited}"
        elif self.stopped_in == "grade":
            message = f"{cause} was reached before its grading; its patch is kept"
        elif self.stopped_in == "parked":
            message = f"{cause} was reached before its account's quota: {self.page.reason}"
        elif self.lost is not None:
            last = self.lost.message
            message = f"{cause} was reached before its next attempt; the last one: {last}"
        else:
            message = f"{cause} was reached before its agent started"
        return RolloutStatus.TRUNCATED, Failure(
            boundary=Boundary.RUN, type=TRUNCATED, message=message
        )

    async def _play(
        self, rollout: RolloutRequest
    ) -> EpisodeRef | tuple[RolloutStatus, Failure | None]:
        """Raises: CancelledError, whichever stage the cancellation interrupts."""
        counted, pause_s, gives_up_at = 0, FIRST_PAUSE_S, math.inf
        while True:
            if self.truncation is not None:
                return self._truncated_ending("waiting")
            self.attempt += 1
            try:
                ending = await self._play_attempt(rollout)
                if (
                    isinstance(ending, EpisodeRef)
                    or ending[1] is None
                    or ending[0] is RolloutStatus.TRUNCATED
                ):
                    return ending
                failure = ending[1]
            except ActivityError as error:
                self._stop_if_cancelled()
                if self.truncation is not None and is_cancelled_exception(error):
                    return self._truncated_ending()
                failure = failure_of(error)
                self.page.lost(self.attempt, failure)
            self.lost = failure
            if failure.type not in rollout.retry_on or self.is_spent:
                return RolloutStatus.FAILED, failure
            if failure.type == CALL_UNANSWERED:
                self.page.lost(self.attempt, failure)
                if self.has_parked:  # the wait for a quota has no limit
                    self.has_parked, pause_s, gives_up_at = False, FIRST_PAUSE_S, math.inf
                gives_up_at = min(gives_up_at, workflow.time() + LONGEST_WAIT_S)
                if workflow.time() + pause_s > gives_up_at:
                    return RolloutStatus.FAILED, failure
                self.page.stage("waiting", self.attempt)
                await self._pause(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                continue
            counted += 1
            if counted >= rollout.max_attempts:
                return RolloutStatus.FAILED, failure

    async def _pause(self, seconds: float) -> None:
        """Wait before the next attempt, at most until the run's time is over."""
        with contextlib.suppress(TimeoutError):
            await workflow.wait_condition(
                lambda: self.truncation is not None,
                timeout=timedelta(seconds=seconds),
                timeout_summary="before the agent starts again",
            )

    async def _play_attempt(
        self, rollout: RolloutRequest
    ) -> EpisodeRef | tuple[RolloutStatus, Failure | None]:
        attempt = Attempt(request=rollout, attempt=self.attempt)
        host: str | None = None
        clean = is_booted = False
        try:
            self.page.stage("waiting", self.attempt)
            booted = await self._boot(attempt)
            if booted.done is not None or booted.expired:
                clean = True
                return booted.done or (RolloutStatus.EXPIRED, None)
            if booted.resets_at:
                clean = True
                return RolloutStatus.CANCELLED, None
            host, is_booted = booted.host, True
            self.attempt = booted.attempt or self.attempt
            attempt = Attempt(request=rollout, attempt=self.attempt)
            self.page.booted(booted)
            self._stop_if_cancelled()
            if self.truncation is not None:
                return self._truncated_ending()
            if self.is_spent:
                return RolloutStatus.CANCELLED, None
            run, captured = await self._run_uninterrupted(
                self._run_agent_and_capture(attempt, host, booted.tests_s)
            )
            if captured is None:
                return RolloutStatus.CANCELLED, None
            if self._is_stopped_without_reward(run, rollout):
                clean = await self._grade_for_information(attempt, run, captured)
                return self._truncated_ending("agent", run)
            if run.broke:
                clean = True
                return RolloutStatus.FAILED, _agent_failure(run)
            self._stop_if_cancelled()
            if not rollout.grades_now:
                clean = True
                return RolloutStatus.UNGRADED, None
            if self._is_past_end():
                clean = not captured.waits_for
                return self._truncated_ending("grade")
            await self._grade(attempt, captured.grade_timeout_s)
            clean = True
            return RolloutStatus.GRADED, None
        except ActivityError as error:
            clean = type_of(error) == IDENTITY_DIFFERS  # any sandbox belongs to another request
            if is_host_lost(error):
                host = None  # a worker of any host can close the attempt's session
            raise
        finally:
            if not clean and not is_evicted_from_cache():
                await to_the_end(self._destroy(attempt, host, booted=is_booted))

    def _is_stopped_without_reward(self, run: AgentRun, rollout: RolloutRequest) -> bool:
        """Whether the end of the run's time stopped the agent and the request gives no reward for
        that."""
        if self.truncation is None or self.is_spent or not run.stopped:
            return False
        return not rollout.reward_truncated or bool(run.broke)

    def _is_past_end(self) -> bool:
        """Whether the time for gradings is over."""
        return self.truncation is not None and workflow.time() >= self.truncation.ends_at

    async def _run_uninterrupted(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run `work`. A cancellation ends it, unless the run's time is over."""
        task = asyncio.create_task(work)
        while True:
            try:
                return await asyncio.shield(task)
            except asyncio.CancelledError:
                if task.done():
                    return task.result()
                if self.truncation is None:
                    task.cancel()
                    return await task

    async def _run_agent_and_capture(
        self, attempt: Attempt, host: str | None, tests_s: float
    ) -> tuple[AgentRun, Captured | None]:
        """Run the agent and capture its diff. The diff is None if the budget stopped an agent that
        had made no model call."""
        run = await self._run_agent(attempt, host)
        self._stop_if_cancelled()
        no_call = run.end is AgentEnd.LIMIT and not run.turns
        if no_call and self.is_spent and self.truncation is None:
            return run, None
        return run, await self._capture(attempt, host, tests_s)

    async def _grade_for_information(
        self, attempt: Attempt, run: AgentRun, captured: Captured
    ) -> bool:
        """Grade the patch of a stopped agent, if there is time. The grade gives no reward. Returns
        whether no sandbox or permit needs to be freed."""
        if run.broke or captured.empty or captured.waits_for or self._is_past_end():
            return not captured.waits_for
        if not attempt.request.grades_now:
            return True
        try:
            await self._grade(attempt, captured.grade_timeout_s, informs=True)
        except (ActivityError, asyncio.CancelledError) as error:
            workflow.logger.info("the patch of a stopped agent has no grade: %r", error)
            return False
        return True

    async def _boot(self, attempt: Attempt) -> Booted:
        """Boot the sandbox. The activity waits in the boot queue until a host has a free seat. There is
        none if the run's budget is used up before the quota of the model account resets."""
        summary = f"{attempt.request.sandbox} · attempt {attempt.attempt}"
        while True:
            options = activity_options.described(
                activity_options.boot(attempt.request, workflow.time()),
                summary,
                f"boot-{attempt.attempt}",
            )
            try:
                booted = await self._do("boot_sandbox", attempt, Booted, options)
            except ActivityError as error:
                if not is_schedule_to_start_timeout(error):
                    raise
                return Booted(expired=True)
            if booted.resets_at:
                self.has_parked = True
                expires_at = attempt.request.expires_at
                await self._park(booted, lambda: self.is_spent, expires_at)
                self.page.stage("waiting", self.attempt)
                if not self.is_spent:  # the permit was released
                    attempt = attempt.model_copy(update={"permit": ""})
                    continue
            if not booted.waits_for:
                return booted
            self._stop_if_cancelled()
            granted = await self._granted(booted.waits_for, attempt.request.expires_at)
            permit = booted.waits_for if granted else ""
            attempt = attempt.model_copy(update={"permit": permit})

    async def _park(
        self,
        parked: Booted | GradedPatch,
        is_over: Callable[[], bool] = lambda: False,
        expires_at: float | None = None,
    ) -> None:
        """Wait without a sandbox until the account's quota resets, a user opens the account, the rollout
        expires, or `is_over`."""
        self.page.parked(self.attempt, parked.reason)
        ends_at = parked.resets_at if expires_at is None else min(parked.resets_at, expires_at + 1)
        with contextlib.suppress(TimeoutError):
            await workflow.wait_condition(
                lambda: self.is_opened or is_over(),
                timeout=timedelta(seconds=max(SHORTEST_PARK_S, ends_at - workflow.time())),
                timeout_summary="until the account's quota resets",
            )
        self.is_opened = False

    async def _granted(self, step: str, expires_at: float | None = None) -> bool:
        """Wait for a permit of a metered account. False if the wait timed out: ask again."""
        self.page.waits(step)
        patience = ASK_AGAIN_S
        if expires_at is not None:
            patience = max(0.0, min(patience, expires_at - workflow.time() + 1))
        known = self.truncation
        if known is not None:
            patience = max(0.0, min(patience, known.ends_at - workflow.time()))
        try:
            await workflow.wait_condition(
                lambda: step in self.grants or self.truncation is not known,
                timeout=timedelta(seconds=patience),
                timeout_summary="before it asks the account again",
            )
        except TimeoutError:
            return False
        is_granted = step in self.grants
        self.grants.discard(step)
        return is_granted

    async def _run_agent(self, attempt: Attempt, host: str | None) -> AgentRun:
        rollout = attempt.request
        self.page.stage("agent", attempt.attempt)
        summary = f"{rollout.agent} · {rollout.agent_budget_s:.0f} s budget"
        options = activity_options.described(
            activity_options.run_agent(rollout, host), summary, f"agent-{attempt.attempt}"
        )
        self.agent_task = asyncio.create_task(self._do("run_agent", attempt, AgentRun, options))
        stopping = asyncio.create_task(self._stop_calls(attempt))
        try:
            run = await self.agent_task
        except (ActivityError, asyncio.CancelledError) as error:
            self._stop_if_cancelled()
            if not (self.is_stopping and _was_stopped(error)):
                raise
            ended = attempt.model_copy(update={"stop": True})
            run = await self._do("run_agent", ended, AgentRun, options)
        finally:
            self.agent_task = None
            stopping.cancel()
        self.page.agent(run)
        return run

    async def _stop_calls(self, attempt: Attempt) -> None:
        """End the agent's model calls once it is to stop. Its worker learns of a cancellation only by
        its next heartbeat, up to a minute later."""
        await workflow.wait_condition(lambda: self.is_stopping or is_cancelled())
        options = activity_options.described(
            activity_options.stop_calls(attempt.request),
            "end the agent's model calls",
            f"stop-{attempt.attempt}",
        )
        try:
            await self._do("stop_calls", attempt, type(None), options)
        except ActivityError as error:
            workflow.logger.info("the agent stops with its next heartbeat: %s", error.cause)

    async def _capture(self, attempt: Attempt, host: str | None, tests_s: float) -> Captured:
        options = activity_options.described(
            activity_options.capture(attempt.request, host, tests_s),
            "git diff against the base",
            f"capture-{attempt.attempt}",
        )
        captured = await self._do("capture_diff", attempt, Captured, options)
        self.page.captured(captured)
        while captured.waits_for and not self._is_past_end():
            self._stop_if_cancelled()
            if await self._granted(captured.waits_for):
                break
            captured = await self._do("capture_diff", attempt, Captured, options)
        return captured

    async def _grade(
        self, attempt: Attempt, timeout_s: float, *, informs: bool = False
    ) -> GradedPatch:
        """`informs`: the grade gives no reward."""
        self.page.stage("grade", attempt.attempt)
        # A reset changes the run id, so that the workflow grades again and ignores the old verdict.
        attempt = attempt.model_copy(update={"workflow_run_id": workflow.info().run_id})
        options = activity_options.described(
            activity_options.grade(attempt.request, timeout_s),
            "hidden tests in a fresh sandbox",
            "grade",
        )
        graded = await self._do("grade_in_fresh_sandbox", attempt, GradedPatch, options)
        while graded.resets_at:
            await self._park(graded)
            self.page.stage("grade", attempt.attempt)
            graded = await self._do("grade_in_fresh_sandbox", attempt, GradedPatch, options)
        self.page.graded(graded.model_copy(update={"reward": None}) if informs else graded)
        self.grade = graded.stored_as
        return graded

    async def _emit(
        self, rollout: RolloutRequest, status: RolloutStatus, failure: Failure | None
    ) -> EpisodeRef:
        ending = Ending(
            request=rollout,
            workflow_run_id=workflow.info().run_id,
            status=status,
            attempts=self.attempt,
            evictions=self.evictions,
            failure=failure,
            started_at=workflow.info().start_time.timestamp(),
            grade=self.grade,
            stopped_in=self.stopped_in,
        )
        options = activity_options.described(
            activity_options.emit(rollout), self.page.verdict(status, failure), "emit"
        )
        try:
            return await self._do("emit_episode", ending, EpisodeRef, options)
        except ActivityError as error:
            bare = ending.without_evidence(failure_of(error))
        while True:
            try:
                return await self._do("emit_episode", bare, EpisodeRef, options)
            except ActivityError as error:
                workflow.logger.error("no episode can be written yet: %s", error.cause)
                await workflow.sleep(EMIT_AGAIN, summary="before the episode is written again")

    async def _destroy(self, attempt: Attempt, host: str | None, *, booted: bool) -> None:
        options = activity_options.described(
            activity_options.destroy(attempt.request, host, booted=booted),
            "clean up the sandboxes",
            f"destroy-{attempt.attempt}",
        )
        try:
            await self._do("destroy_sandbox", attempt, type(None), options)
        except ActivityError as error:
            workflow.logger.warning("sandbox left to its TTL and the reaper: %s", error.cause)

    async def _do(
        self, activity: str, argument: Any, result: type[Result], options: dict[str, Any]
    ) -> Result:
        cleaning = activity in CLEANING

        def evicted(error: ActivityError) -> None:
            if self.evictions >= MAX_EVICTIONS and not cleaning:
                raise error
            if activity == "run_agent" and self.is_stopping and not argument.stop:
                raise error  # `_run_agent` dispatches it again to stop the agent
            self.evictions += 1
            self.page.evicted(self.evictions)

        kept = cleaning or (self.truncation is not None and activity in WORK_PRESERVING)
        return await ordered(activity, argument, result, options, cleaning=kept, evicted=evicted)


def _was_stopped(error: BaseException) -> bool:
    """Whether this workflow or a worker shutdown stopped the agent stage, or its worker died."""
    if not isinstance(error, ActivityError):
        return is_cancelled_exception(error)
    return (
        is_cancelled_exception(error)
        or is_heartbeat_timeout(error)
        or type_of(error) == WORKER_EVICTED
    )


def _agent_failure(run: AgentRun) -> Failure:
    if run.refused:
        return Failure(boundary=Boundary.ENGINE, type="EngineRefused", message=run.broke)
    if run.mcp_failed:
        return Failure(boundary=Boundary.TOOL, type=CALL_UNANSWERED, message=run.broke)
    if run.unanswered:
        return Failure(boundary=Boundary.ENGINE, type=CALL_UNANSWERED, message=run.broke)
    message = f"{run.broke}: {run.detail}" if run.detail else run.broke
    return Failure(boundary=Boundary.AGENT, type="AgentError", message=message)

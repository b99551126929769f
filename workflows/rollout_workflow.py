"""RolloutWorkflow: one sample of an agent's work on one instance, from boot to episode.

Ordering only. A rollout that ends without a verdict fails as a workflow, and its error carries the
episode (docs/decisions/0028-no-verdict-is-red.md): a red line in the Web UI needs attention.
"""

import asyncio
import math
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
        WORKER_EVICTED,
        AgentRun,
        Attempt,
        Booted,
        Captured,
        Ending,
        GradedPatch,
    )
    from perdure.types import AgentEnd, EpisodeRef, Failure, RolloutRequest, RolloutStatus
    from workflows import activity_options
    from workflows.activity_redispatch import ordered
    from workflows.child_rollouts import without_episode
    from workflows.web_ui import RolloutPage
    from workflows.workflow_failures import (
        check_own_id,
        failure_of,
        is_evicted_from_cache,
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
        self.grade = ""
        self.buying: asyncio.Task[AgentRun] | None = None

    @workflow.run
    async def run(self, request: Any = None) -> EpisodeRef:
        rollout = parse(RolloutRequest, request)
        check_own_id(rollout.workflow_id)
        self.page.open(rollout)
        cancelled = False
        try:
            ending = await self._play(rollout)
        except asyncio.CancelledError:
            cancelled = True
            ending = RolloutStatus.CANCELLED, None
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
        if self.buying is not None:
            self.buying.cancel()

    @workflow.query
    def state(self) -> dict[str, Any]:
        """The rollout's progress, for users and for `perdure status`."""
        return self.page.state()

    async def _play(
        self, rollout: RolloutRequest
    ) -> EpisodeRef | tuple[RolloutStatus, Failure | None]:
        """Raises: CancelledError, whichever stage the cancellation interrupts."""
        counted, pause_s, gives_up_at = 0, FIRST_PAUSE_S, math.inf
        while True:
            self.attempt += 1
            try:
                ending = await self._play_attempt(rollout)
                if isinstance(ending, EpisodeRef) or ending[1] is None:
                    return ending
                failure = ending[1]
            except ActivityError as error:
                stop_if_cancelled()
                failure = failure_of(error)
                self.page.lost(self.attempt, failure)
            if failure.type not in rollout.retry_on or self.is_spent:
                return RolloutStatus.FAILED, failure
            if failure.type == CALL_UNANSWERED:
                self.page.lost(self.attempt, failure)
                gives_up_at = min(gives_up_at, workflow.time() + LONGEST_WAIT_S)
                if workflow.time() + pause_s > gives_up_at:
                    return RolloutStatus.FAILED, failure
                self.page.stage("waiting", self.attempt)
                await workflow.sleep(pause_s, summary="before the agent starts again")
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                continue
            counted += 1
            if counted >= rollout.max_attempts:
                return RolloutStatus.FAILED, failure

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
            host, is_booted = booted.host, True
            self.attempt = booted.attempt or self.attempt
            attempt = Attempt(request=rollout, attempt=self.attempt)
            self.page.booted(booted)
            stop_if_cancelled()
            if self.is_spent:
                return RolloutStatus.CANCELLED, None
            run = await self._run_agent(attempt, host)
            stop_if_cancelled()
            if self.is_spent and run.end is AgentEnd.LIMIT and not run.turns:
                return RolloutStatus.CANCELLED, None  # it made no model call
            captured = await self._capture(attempt, host)
            if run.broke:
                clean = True
                return RolloutStatus.FAILED, _agent_failure(run)
            stop_if_cancelled()
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

    async def _boot(self, attempt: Attempt) -> Booted:
        """Boot the sandbox. The activity waits in the boot queue until a host has a free seat."""
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
            if not booted.waits_for:
                return booted
            stop_if_cancelled()
            granted = await self._granted(booted.waits_for, attempt.request.expires_at)
            permit = booted.waits_for if granted else ""
            attempt = attempt.model_copy(update={"permit": permit})

    async def _granted(self, step: str, expires_at: float | None = None) -> bool:
        """Wait for a permit of a metered account. False if the wait timed out: ask again."""
        self.page.waits(step)
        patience = ASK_AGAIN_S
        if expires_at is not None:
            patience = max(0.0, min(patience, expires_at - workflow.time() + 1))
        try:
            await workflow.wait_condition(
                lambda: step in self.grants,
                timeout=timedelta(seconds=patience),
                timeout_summary="before it asks the account again",
            )
        except TimeoutError:
            return False
        self.grants.discard(step)
        return True

    async def _run_agent(self, attempt: Attempt, host: str | None) -> AgentRun:
        rollout = attempt.request
        self.page.stage("agent", attempt.attempt)
        summary = f"{rollout.agent} · {rollout.agent_budget_s:.0f} s budget"
        options = activity_options.described(
            activity_options.run_agent(rollout, host), summary, f"agent-{attempt.attempt}"
        )
        self.buying = asyncio.create_task(self._do("run_agent", attempt, AgentRun, options))
        try:
            run = await self.buying
        except (ActivityError, asyncio.CancelledError) as error:
            stop_if_cancelled()
            if not (self.is_spent and _was_stopped(error)):
                raise
            ended = attempt.model_copy(update={"spent": True})
            run = await self._do("run_agent", ended, AgentRun, options)
        finally:
            self.buying = None
        self.page.agent(run)
        return run

    async def _capture(self, attempt: Attempt, host: str | None) -> Captured:
        options = activity_options.described(
            activity_options.capture(attempt.request, host),
            "git diff against the base",
            f"capture-{attempt.attempt}",
        )
        captured = await self._do("capture_diff", attempt, Captured, options)
        self.page.captured(captured)
        while captured.waits_for:
            stop_if_cancelled()
            if await self._granted(captured.waits_for):
                break
            captured = await self._do("capture_diff", attempt, Captured, options)
        return captured

    async def _grade(self, attempt: Attempt, timeout_s: float) -> GradedPatch:
        self.page.stage("grade", attempt.attempt)
        # A reset changes the run id, so that the workflow grades again and ignores the old verdict.
        attempt = attempt.model_copy(update={"workflow_run_id": workflow.info().run_id})
        options = activity_options.described(
            activity_options.grade(attempt.request, timeout_s),
            "hidden tests in a fresh sandbox",
            "grade",
        )
        graded = await self._do("grade_in_fresh_sandbox", attempt, GradedPatch, options)
        self.page.graded(graded)
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
            if activity == "run_agent" and self.is_spent and not argument.spent:
                raise error  # `_run_agent` dispatches it again to stop the agent
            self.evictions += 1
            self.page.evicted(self.evictions)

        return await ordered(
            activity, argument, result, options, cleaning=cleaning, evicted=evicted
        )


def _was_stopped(error: BaseException) -> bool:
    """Whether this workflow or a worker shutdown stopped the agent stage."""
    evicted = isinstance(error, ActivityError) and type_of(error) == WORKER_EVICTED
    return evicted or is_cancelled_exception(error)


def _agent_failure(run: AgentRun) -> Failure:
    if run.refused:
        return Failure(boundary=Boundary.ENGINE, type="EngineRefused", message=run.broke)
    if run.unanswered:
        return Failure(boundary=Boundary.ENGINE, type=CALL_UNANSWERED, message=run.broke)
    message = f"{run.broke}: {run.detail}" if run.detail else run.broke
    return Failure(boundary=Boundary.AGENT, type="AgentError", message=message)

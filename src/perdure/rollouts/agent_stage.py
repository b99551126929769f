"""The agent stage: start the agent once, detached, and watch it. Any worker may take over."""

import asyncio
import contextlib
import functools
import signal
import time

from perdure import tracing
from perdure.agents import skills
from perdure.agents.base import EXEC_ID
from perdure.data_source_handlers import runs_own_agent
from perdure.errors import (
    NotFound,
    PerdureError,
    PolicyTooStale,
    RetryHere,
    SandboxLost,
    TokenizerChanged,
)
from perdure.gateway.base import STOPPED_OUTSIDE, SessionSummary
from perdure.rollouts import agent_output, handler_hooks
from perdure.rollouts.activity_messages import LONGEST_WAIT_S, AgentRun
from perdure.rollouts.attempt_job import Job
from perdure.rollouts.boot_stage import attach
from perdure.rollouts.cleanup_stage import destroy
from perdure.rollouts.gateway_session.gateway_check import GatewayRoute, reached
from perdure.rollouts.gateway_session.gateway_session import AgentSession, session_of
from perdure.rollouts.prediction_application import apply_prediction, has_given_patch
from perdure.rollouts.sandbox import task_mcp_servers
from perdure.rollouts.sandbox.allowed_network import allowed_network
from perdure.rollouts.sandbox.pristine_control import sandboxes_work
from perdure.rollouts.simulated_user.conversation import Conversation
from perdure.sandboxes.base import Exec, ExecState, ExecStatus, Sandbox, shown_shortage
from perdure.telemetry import metrics
from perdure.types import AgentEnd

CHECKPOINT = "agent.json"

WATCH_S = 10.0
"""Seconds between two polls, which update heartbeat details, sandbox TTL and turn count."""
KILLED_S = 10.0
"""Seconds to wait for a killed agent to exit."""
REASON_LIMIT = 300
"""Characters. A reason can be long because each engine of a pool adds its own."""


async def run_agent(job: Job) -> AgentRun:
    """Raises: SandboxLost; PolicyTooStale; TokenizerChanged; GatewayUnavailable; ConfigurationError."""
    return await job.once(CHECKPOINT, AgentRun, _run)


async def _run(job: Job) -> AgentRun:
    sandbox = await attach(job)
    job.services.seats.take(sandbox.identity)
    async with allowed_network(job, "agent", sandbox):
        return await _run_in(job, sandbox)


async def _run_in(job: Job, sandbox: Sandbox) -> AgentRun:
    if await has_given_patch(job):
        return await apply_prediction(job, sandbox)
    session = session_of(job)
    if job.stop:
        try:
            return await _stopped(job, session, sandbox)
        except NotFound:  # the agent never started
            return AgentRun(end=AgentEnd.LIMIT, detail=STOPPED_OUTSIDE, stopped=True)
    try:
        is_started = await _is_started(sandbox)
        opened = await session.open(is_started=is_started) if session is not None else None
        if runs_own_agent(handler_hooks.handler_of(job)):
            return await _run_by_handler(job, session, sandbox)
        async with reached(job, session, sandbox) as route:
            with tracing.span("agent command", {"perdure.agent": job.request.agent}) as span:
                if not is_started:
                    await _start(job, session, sandbox, route.url)
                if opened is not None:
                    _report(job, opened)
                async with _conversation(job, sandbox) as conversation:
                    status = await _watch(job, session, sandbox, route, conversation)
                span.set({"process.exit.code": status.code})
        if not status.done:
            return await _stopped(job, session, sandbox)
        run = await _conclude(job, session, sandbox, status)
        if conversation is not None and (reason := await conversation.unanswered(status)):
            run = run.model_copy(update={"unanswered": reason[:REASON_LIMIT]})
        run = await _unless_host_failed(job, run)
        return run.model_copy(update={"watched_again": is_started})
    except asyncio.CancelledError:
        if job.activity_attempt.is_cancelled_on_purpose():
            await asyncio.shield(_abort(job, session, sandbox))
        elif (
            job.activity_attempt.is_superseded()
            and not await job.activity_attempt.workflow_may_be_open()
        ):
            # A terminated workflow runs no cleanup, and its agent would keep making model calls.
            await asyncio.shield(destroy(job))
        raise
    except SandboxLost:
        with contextlib.suppress(PerdureError):  # some providers still have the agent's output
            await agent_output.keep(
                job, await agent_output.collect(sandbox, ExecStatus(ExecState.LOST), artifacts=())
            )
        raise


async def _run_by_handler(job: Job, session: AgentSession | None, sandbox: Sandbox) -> AgentRun:
    """Run the data source handler's own agent in this process, within the agent's budget."""
    started, end = time.monotonic(), AgentEnd.FINISHED
    kept = asyncio.create_task(_keep_alive(job, session, sandbox))
    try:
        async with asyncio.timeout(job.agent_budget_s):
            await handler_hooks.run(job, sandbox)
    except TimeoutError:  # the budget ran out; the handler's own errors arrive as SandboxLost
        end = AgentEnd.LIMIT
    except SandboxLost:
        if session is None or not (await session.look()).ends_calls:
            raise
        end = AgentEnd.LIMIT  # the handler's code failed at the refused call
    finally:
        kept.cancel()
        await asyncio.gather(kept, return_exceptions=True)
    summary = await session.close() if session is not None else None
    _check_has_engines(summary)
    capped = summary.capped if summary is not None else ""
    return AgentRun(
        end=AgentEnd.LIMIT if capped else end,
        detail=capped,
        turns=summary.turns if summary else 0,
        turns_sha256=summary.turns_sha256 if summary else "",
        tokens=summary.tokens if summary else 0,
        unanswered=summary.unanswered[:REASON_LIMIT] if summary else "",
        refused=summary.refused if summary and not summary.turns else "",
        mcp_failed=summary.mcp_failed[:REASON_LIMIT] if summary else "",
        stopped=capped == STOPPED_OUTSIDE,
        seconds=round(time.monotonic() - started, 3),
    )


async def _keep_alive(job: Job, session: AgentSession | None, sandbox: Sandbox) -> None:
    ttl_s = job.services.settings.sandbox.ttl_s
    renewed = time.monotonic()
    while True:
        await asyncio.sleep(WATCH_S)
        job.services.seats.take(sandbox.identity)
        with contextlib.suppress(
            RetryHere
        ):  # the control plane or the gateway may be unavailable for a moment
            if time.monotonic() - renewed > ttl_s / 4:
                await sandbox.touch(ttl_s)
                renewed = time.monotonic()
            if session is not None:
                _report(job, await session.look())


async def _is_started(sandbox: Sandbox) -> bool:
    """Whether an earlier try of this stage started the agent. If so, this try only watches."""
    try:
        await sandbox.poll(EXEC_ID)
    except NotFound:
        return False
    return True


async def stop_calls(job: Job) -> None:
    """End the model calls of an agent that the run stops. Its watcher notices, and ends the agent, long
    before its next heartbeat would tell it.

    Raises: RetryHere while the agent's session is not open yet; GatewayUnavailable.
    """
    if (session := session_of(job)) is not None:
        await session.stop()


async def _start(job: Job, session: AgentSession | None, sandbox: Sandbox, url: str | None) -> None:
    await task_mcp_servers.wait_until_ready(job, sandbox)
    key = session.key if session else ""
    launch = skills.launch(
        job.agent, job.task(workdir=sandbox.workdir, gateway_url=url, session_key=key)
    )
    for path, content in launch.files.items():  # they may contain the key
        await sandbox.put(path, content, mode=0o600)
    await sandbox.start(
        EXEC_ID,
        Exec(
            launch.argv,
            env=launch.env,
            cwd=launch.cwd or sandbox.workdir,
            timeout_s=job.agent_budget_s,
        ),
    )


def _conversation(
    job: Job, sandbox: Sandbox
) -> contextlib.AbstractAsyncContextManager[Conversation | None]:
    """With the user, if the rollout has one. Raises: AttemptDamaged."""
    user = job.user
    return Conversation(job, sandbox, user) if user else contextlib.nullcontext()


async def _watch(
    job: Job,
    session: AgentSession | None,
    sandbox: Sandbox,
    route: GatewayRoute,
    conversation: Conversation | None = None,
) -> ExecStatus:
    """Wait until the agent has exited. It still runs if its rollout was stopped."""
    ttl_s = job.services.settings.sandbox.ttl_s
    renewed = time.monotonic()
    waited = 0.0
    wait = functools.partial(sandbox.wait, EXEC_ID) if conversation is None else conversation.wait
    while True:
        status = await wait(WATCH_S)
        if status.done:
            break
        job.services.seats.take(sandbox.identity)
        route.check()
        if time.monotonic() - renewed > ttl_s / 4:
            renewed = time.monotonic()
            await sandbox.touch(ttl_s)
        if session is not None:
            summary = await session.look()
            _report(job, summary)
            if summary.stopped:
                return status
            if (excused := _waited(summary, conversation)) > waited:
                waited = excused
                coming = 2 * WATCH_S if _waits(summary, conversation) else 0.0
                excused = min(waited + coming, LONGEST_WAIT_S)
                await sandbox.extend(EXEC_ID, job.agent_budget_s + excused)
            is_refused = summary.ends_calls or summary.is_hopeless
            no_answer = is_refused or _waits_for_quota(summary, conversation)
            if no_answer or summary.mcp_failed:
                await sandbox.signal(EXEC_ID, signal.SIGKILL)
                status = await sandbox.wait(EXEC_ID, KILLED_S)
                break
    if status.state is ExecState.LOST or status.cause == "sandbox":
        raise SandboxLost(f"sandbox {sandbox.identity} died while the agent was running")
    if status.host_lacked:  # the shortage may have made the agent crash or give up
        raise SandboxLost(
            f"while the agent ran in sandbox {sandbox.identity}, {shown_shortage(status)}"
        )
    return status


def _waited(session: SessionSummary, conversation: Conversation | None) -> float:
    """Seconds in which the agent waited for an engine or the user. Its budget does not count them."""
    return session.waiting_seconds + (conversation.waited_s if conversation else 0.0)


def _waits(session: SessionSummary, conversation: Conversation | None) -> bool:
    """Whether the agent waits for an engine or the user now."""
    return session.waits is not None or (conversation is not None and conversation.is_waiting)


def _waits_for_quota(session: SessionSummary, conversation: Conversation | None) -> bool:
    """Whether a quota must reset before the agent's model or its user's can answer."""
    of_user = conversation is not None and conversation.waits_for_quota
    return of_user or session.waits_for_quota(time.time())


def _check_has_engines(summary: SessionSummary | None) -> None:
    """Raises: PolicyTooStale, TokenizerChanged if no engine could sample for the session any more."""
    if summary is not None and summary.too_stale:
        raise PolicyTooStale(summary.too_stale)
    if summary is not None and summary.tokenizer_changed:
        raise TokenizerChanged(summary.tokenizer_changed)


async def _conclude(
    job: Job, session: AgentSession | None, sandbox: Sandbox, status: ExecStatus
) -> AgentRun:
    summary = await session.close() if session is not None else None
    if not job.instance.grading.in_place:
        await sandbox.signal(EXEC_ID, signal.SIGKILL)  # its background processes could still write
    found = await agent_output.collect(
        sandbox, status, job.agent.artifacts, turns=summary.turns if summary else 0
    )
    await agent_output.keep(job, found)
    _check_has_engines(summary)
    if summary is not None:
        working = (status.seconds or 0.0) - summary.waiting_seconds
        metrics.agent_time(working, summary.engine_seconds)
    mcp_failed = summary.mcp_failed if summary is not None else ""
    mcp_failed = mcp_failed or await task_mcp_servers.dead_server(job, sandbox)
    called = summary is not None and bool(summary.refused or summary.unanswered)
    end = await agent_output.end_of(job.agent, found, called=called)
    capped = summary.capped if summary is not None else ""
    if capped:
        end = AgentEnd.LIMIT
    return AgentRun(
        end=end,
        turns=found.turns,
        turns_sha256=summary.turns_sha256 if summary else "",
        tokens=summary.tokens if summary else 0,
        unanswered=summary.unanswered[:REASON_LIMIT] if summary else "",
        refused=summary.refused if summary and not summary.turns else "",
        mcp_failed=mcp_failed[:REASON_LIMIT],
        stopped=capped == STOPPED_OUTSIDE,
        seconds=round(status.seconds or 0.0, 3),
        detail=capped or agent_output.detail(end, found),
    )


async def _unless_host_failed(job: Job, run: AgentRun) -> AgentRun:
    """Blame an agent that ended before any model call only if sandboxes work on this host now.

    The check is skipped for a metered account, whose sandboxes run on other hosts.
    Raises: SandboxLost if the control sandbox fails.
    """
    never_called = not (run.turns or run.refused or run.unanswered or run.mcp_failed)
    has_control = never_called and run.broke and not job.agent_sandbox.admission.metered
    if has_control and not await sandboxes_work(job):
        raise SandboxLost(f"{run.broke}, and the control fails too: {run.detail}")
    return run


async def _abort(job: Job, session: AgentSession | None, sandbox: Sandbox) -> None:
    """Stop a cancelled agent. If the run stopped it, the workflow still captures its work."""
    try:
        await job.write(CHECKPOINT, await _stopped(job, session, sandbox))
    except PerdureError:
        return  # evidence of a cancelled agent is optional, and its sandbox is destroyed either way


async def _stopped(job: Job, session: AgentSession | None, sandbox: Sandbox) -> AgentRun:
    """Kill the agent and keep its output and files. Raises: NotFound if it never started."""
    was_over = (await sandbox.poll(EXEC_ID)).done
    await sandbox.signal(EXEC_ID, signal.SIGKILL)
    status = await sandbox.wait(EXEC_ID, KILLED_S)
    run = await _conclude(job, session, sandbox, status)
    if was_over:
        return run
    stopped = {"end": AgentEnd.LIMIT, "detail": STOPPED_OUTSIDE, "stopped": True}
    return run.model_copy(update=stopped)


def _report(job: Job, session: SessionSummary) -> None:
    """Show turns and what the agent waits for next to the pending activity in the Web UI."""
    waits = session.waits
    shown = {"since": round(waits.since), "reason": waits.reason[:REASON_LIMIT]} if waits else None
    job.activity_attempt.report(turns=session.turns, waits=shown)

"""run_agent: start the agent once, detached, and watch it; any worker may take over the watch."""

import asyncio
import contextlib
import signal
import time

from activities import checkpoints
from activities.boot_sandbox import agent_task, sandbox_of
from activities.earlier_sessions import most_recorded
from activities.messages import AgentRun, Attempt
from activities.reach_gateway import Way, reached
from activities.services import Services
from activities.shell import cancelled_by_user, report, shell
from perdure.agents.base import EXEC_ID, Evidence
from perdure.errors import NotFound, PerdureError, PolicyTooStale, SandboxLost
from perdure.gateway.base import SessionSpec, SessionSummary
from perdure.sandboxes.base import ExecState, ExecStatus, Sandbox
from perdure.storage import keys
from perdure.telemetry import metrics
from perdure.types import AgentEnd, RolloutRequest

WATCH_S = 5.0
"""How often the watch looks up: heartbeat details, the sandbox's lease, the turn count."""
KILLED_S = 10.0
"""What a killed agent takes to be gone."""
TAIL = 4 << 20
"""Bytes of the agent's own output that are kept."""
REASON_LIMIT = 300
"""Characters; a pool may have many engines, each with its trouble."""


class RunAgent:
    def __init__(self, services: Services) -> None:
        self.services = services

    @shell("run_agent", leave_at_once=True)
    async def run(self, attempt: Attempt) -> AgentRun:
        key = f"{keys.attempt(attempt.request, attempt.attempt)}/agent.json"
        done = await checkpoints.read(self.services.store, key, AgentRun)
        if done is not None:
            return done
        sandbox = await self._attach(attempt)
        try:
            session = await self._open_session(attempt)
            async with reached(self.services, attempt, sandbox) as way:
                await self._start_once(attempt, sandbox, way.url)
                if session is not None:
                    _report(session)
                status = await self._watch(attempt, sandbox, way)
            run = await self._conclude(attempt, sandbox, status)
        except asyncio.CancelledError:
            if cancelled_by_user():
                await asyncio.shield(self._abort(attempt, sandbox, key))
            raise
        except SandboxLost:
            await self._keep_output(attempt, sandbox)
            raise
        return await checkpoints.write(self.services.store, key, run)

    async def _attach(self, attempt: Attempt) -> Sandbox:
        request = attempt.request
        identity = await sandbox_of(self.services, attempt)
        try:
            place = await self.services.place(request, "agent")
            return await self.services.provider(place.provider).attach(identity)
        except NotFound as error:
            raise SandboxLost(f"sandbox {identity} is gone") from error

    def _session_id(self, attempt: Attempt) -> str:
        return self.services.agent_identity(attempt.request, attempt.attempt)

    async def _open_session(self, attempt: Attempt) -> SessionSummary | None:
        request = attempt.request
        if not self.services.agent(request.agent).needs_model:
            return None
        session_id = self._session_id(attempt)
        with contextlib.suppress(NotFound):  # as opened by an earlier try of this activity
            return await self.services.gateway.get(session_id)
        return await self.services.gateway.open(
            SessionSpec(
                session_id=session_id,
                model=request.model,
                sampling=request.sampling,
                turns_key=f"{keys.attempt(request, attempt.attempt)}/turns.parquet",
                labels={
                    **self.services.labels(request, attempt.attempt, "agent"),
                    # Siblings share their prompt: the gateway sends them to one engine.
                    "group": request.group_id or f"{request.run_id}/{request.instance_id}",
                    **_versions(request),
                },
                replay_of=await self._earlier_session(attempt),
            )
        )

    async def _earlier_session(self, attempt: Attempt) -> str | None:
        """What a lost attempt before this one recorded need not be sampled again."""
        identities = [
            self.services.agent_identity(attempt.request, number)
            for number in range(1, attempt.attempt)
        ]
        return await most_recorded(self.services.gateway, identities)

    async def _close_session(self, attempt: Attempt) -> SessionSummary | None:
        if not self.services.agent(attempt.request.agent).needs_model:
            return None
        return await self.services.gateway.close(self._session_id(attempt))

    async def _start_once(self, attempt: Attempt, sandbox: Sandbox, url: str | None) -> None:
        try:
            await sandbox.poll(EXEC_ID)
            return  # an earlier attempt of this activity started it: only watch
        except NotFound:
            pass
        request = attempt.request
        agent = self.services.agent(request.agent)
        instance = await self.services.instance(request)
        key = self.services.gateway.key(self._session_id(attempt)) if agent.needs_model else ""
        launch = agent.launch(agent_task(request, instance, gateway_url=url, session_key=key))
        for path, content in launch.files.items():
            await sandbox.put(path, content)
        await sandbox.start(
            EXEC_ID,
            launch.argv,
            env=launch.env,
            cwd=launch.cwd or sandbox.workdir,
            timeout_s=request.agent_budget_s,
        )

    async def _watch(self, attempt: Attempt, sandbox: Sandbox, way: Way) -> ExecStatus:
        needs_model = self.services.agent(attempt.request.agent).needs_model
        renewed = time.monotonic()
        while True:
            status = await sandbox.wait(EXEC_ID, WATCH_S)
            if status.done:
                break
            way.check()
            if time.monotonic() - renewed > self.services.settings.sandbox.ttl_s / 4:
                renewed = time.monotonic()
                await sandbox.touch(self.services.settings.sandbox.ttl_s)
            if needs_model:
                session = await self.services.gateway.get(self._session_id(attempt))
                _report(session)
                if session.too_stale:  # whatever the agent makes of it, there is no verdict here
                    await sandbox.signal(EXEC_ID, signal.SIGKILL)
                    status = await sandbox.wait(EXEC_ID, KILLED_S)
                    break
        if status.state is ExecState.LOST or status.cause == "sandbox":
            raise SandboxLost(f"sandbox {sandbox.identity} died while the agent was running")
        return status

    async def _conclude(self, attempt: Attempt, sandbox: Sandbox, status: ExecStatus) -> AgentRun:
        agent = self.services.agent(attempt.request.agent)
        summary = await self._close_session(attempt)
        evidence = Evidence(
            status=status,
            stdout_tail=await self._tail(sandbox, "stdout"),
            stderr_tail=await self._tail(sandbox, "stderr"),
            files=await self._artifacts(sandbox, agent.artifacts),
            turns=summary.turns if summary else 0,
        )
        await self._keep(attempt, evidence)
        if summary is not None and summary.too_stale:
            raise PolicyTooStale(summary.too_stale)
        if summary is not None:
            metrics.agent_time(status.seconds or 0.0, summary.engine_seconds)
        end = agent.classify(evidence)
        return AgentRun(
            end=end,
            turns=evidence.turns,
            tokens=summary.tokens if summary else 0,
            seconds=round(status.seconds or 0.0, 3),
            detail=_detail(end, evidence),
        )

    async def _tail(self, sandbox: Sandbox, stream: str) -> bytes:
        data = await sandbox.output(EXEC_ID, "stderr" if stream == "stderr" else "stdout")
        return data[-TAIL:]

    async def _artifacts(self, sandbox: Sandbox, paths: tuple[str, ...]) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        for path in paths:
            try:
                found[path] = await sandbox.get(path, limit=64 << 20)
            except NotFound:
                continue
        return found

    async def _keep(self, attempt: Attempt, evidence: Evidence) -> None:
        folder = f"{keys.attempt(attempt.request, attempt.attempt)}/agent"
        kept = {"stdout.log": evidence.stdout_tail, "stderr.log": evidence.stderr_tail}
        kept |= {path.rsplit("/", 1)[-1]: data for path, data in evidence.files.items()}
        for name, data in kept.items():
            if data:
                await self.services.store.put_if_absent(f"{folder}/{name}", data)

    async def _keep_output(self, attempt: Attempt, sandbox: Sandbox) -> None:
        """Where the provider still has what the agent of a lost sandbox printed."""
        with contextlib.suppress(PerdureError):
            out, err = await self._tail(sandbox, "stdout"), await self._tail(sandbox, "stderr")
            status = ExecStatus(ExecState.LOST)
            await self._keep(attempt, Evidence(status, out, err, files={}, turns=0))

    async def _abort(self, attempt: Attempt, sandbox: Sandbox, key: str) -> None:
        """A person cancelled: kill the agent, keep what it left behind."""
        try:
            await sandbox.signal(EXEC_ID, signal.SIGKILL)
            status = await sandbox.wait(EXEC_ID, KILLED_S)
            run = await self._conclude(attempt, sandbox, status)
            run = run.model_copy(update={"detail": "cancelled"})
            await checkpoints.write(self.services.store, key, run)
        except PerdureError:
            return  # the evidence is a courtesy here; the sandbox is destroyed either way


def _report(session: SessionSummary) -> None:
    """For whoever looks at a rollout that runs."""
    waits = session.waits
    told = {"since": round(waits.since), "reason": waits.reason[:REASON_LIMIT]} if waits else None
    report(turns=session.turns, waits=told)


def _versions(request: RolloutRequest) -> dict[str, str]:
    """What the gateway's engines are held to; nothing for a rollout that takes any version."""
    if request.policy_version is None or request.max_staleness is None:
        return {}
    version, staleness = str(request.policy_version), str(request.max_staleness)
    return {"policy_version": version, "max_staleness": staleness}


def _detail(end: AgentEnd, evidence: Evidence) -> str:
    """One line for the Web UI when something is off."""
    if end in (AgentEnd.FINISHED, AgentEnd.GAVE_UP):
        return ""
    status = evidence.status
    how = f"{status.state.value}" + (
        f" by {status.cause}" if status.cause else f" {status.code}" if status.code else ""
    )
    last = (evidence.stderr_tail or evidence.stdout_tail).strip().splitlines()[-1:]
    said = last[0][-200:].decode("utf-8", "replace") if last else ""
    return f"{how}; {said}" if said else how

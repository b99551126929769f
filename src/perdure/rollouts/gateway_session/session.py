"""The gateway session of one attempt's agent: opened once, replays what a lost attempt recorded."""

import contextlib

from perdure import tracing
from perdure.errors import NotFound
from perdure.gateway.base import SessionSpec, SessionSummary
from perdure.rollouts.gateway_session.earlier_attempt import most_recorded
from perdure.rollouts.job import Job
from perdure.types import RolloutRequest


class AgentSession:
    """Of an agent that calls a model; its id is the identity of the agent's sandbox."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._gateway = job.services.gateway
        self._id = job.agent_identity

    @property
    def key(self) -> str:
        """The bearer token that the agent sends."""
        return self._gateway.key(self._id)

    async def open(self) -> SessionSummary:
        """The session, as an earlier try of this stage may have opened it."""
        with contextlib.suppress(NotFound):
            return await self.look()
        job, request = self._job, self._job.request
        return await self._gateway.open(
            SessionSpec(
                session_id=self._id,
                model=request.model,
                sampling=request.sampling,
                turns_key=job.key("turns.parquet"),
                labels={
                    **job.labels("agent"),
                    # Siblings share their prompt: the gateway sends them to one engine.
                    "group": request.group_id or f"{request.run_id}/{request.instance_id}",
                    **_versions(request),
                    **_trace(),
                },
                replay_of=await self._earlier(),
            )
        )

    async def look(self) -> SessionSummary:
        """Raises: NotFound; GatewayUnavailable."""
        return await self._gateway.get(self._id)

    async def close(self) -> SessionSummary:
        return await self._gateway.close(self._id)

    async def _earlier(self) -> str | None:
        """The session of an earlier attempt whose turns need not be sampled again."""
        sessions = [self._job.session_of(number) for number in range(1, self._job.attempt)]
        return await most_recorded(self._gateway, sessions)


def session_of(job: Job) -> AgentSession | None:
    """None: the agent calls no model."""
    return AgentSession(job) if job.agent.needs_model else None


def _trace() -> dict[str, str]:
    """The span of the rollout, which the session's turns join. Not the stage's, whose try may be lost."""
    return {tracing.PARENT: above} if (above := tracing.above()) else {}


def _versions(request: RolloutRequest) -> dict[str, str]:
    """The policy versions that may sample this rollout; empty: any version may."""
    if request.policy_version is None or request.max_staleness is None:
        return {}
    version, staleness = str(request.policy_version), str(request.max_staleness)
    return {"policy_version": version, "max_staleness": staleness}

"""The gateway session of one attempt's agent. It replays what a lost attempt recorded."""

import asyncio
from collections.abc import Awaitable

from perdure import tracing
from perdure.errors import (
    AttemptDamaged,
    Boundary,
    ConfigurationError,
    GatewayUnavailable,
    NotFound,
    RetryHere,
)
from perdure.gateway.base import SessionSpec, SessionSummary
from perdure.rollouts import stage_checkpoints
from perdure.rollouts.attempt_job import Job
from perdure.rollouts.boot_stage import CHECKPOINT, BootRecord
from perdure.rollouts.gateway_session.replayed_attempt import find_longest_recording
from perdure.storage import store_keys
from perdure.types import Frozen, RolloutRequest

AWAY = "gateway-away.json"
NOTES_TAKE_S = 5.0
"""Seconds that gateways need after a store outage to note the calls that waited for the store."""


class GatewayOutage(Frozen):
    """The stage could not reach the gateway while its agent ran."""

    turns: int | None = None
    """Turns of the session when the gateway was back; None if it is not back yet."""


class AgentSession:
    """The session of an agent that calls a model. Its id is the identity of the agent's sandbox."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._gateway = job.services.gateway
        self._id = job.agent_identity

    @property
    def key(self) -> str:
        """The bearer token that the agent sends."""
        return self._gateway.key(self._id)

    async def open(self, *, is_started: bool = False) -> SessionSummary:
        """Open the session, or return the one that an earlier try or workflow run has opened.

        `is_started`: the agent was started, so its session exists. Raises: AttemptDamaged.
        """
        if is_started:
            return await self._answered(await self._existing(self._found()))
        if self._job.activity_attempt.number > 1:
            try:
                return await self._answered(self._whole(await self._found()))
            except NotFound:
                pass
        try:
            summary = await self._known(self._gateway.open(await self._spec()))
        except ConfigurationError as refused:  # opened before a reset, with another spec
            try:
                summary = await self._found()
            except NotFound:
                raise refused from None
        return await self._answered(self._whole(summary))

    async def _found(self) -> SessionSummary:
        return await self._known(self._gateway.get(self._id))

    async def _spec(self) -> SessionSpec:
        job, request = self._job, self._job.request
        return SessionSpec(
            session_id=self._id,
            model=request.model,
            models=request.models,
            sampling=request.sampling,
            caps=request.caps,
            mcp_servers={n: one for n, one in job.mcp_servers.items() if one.is_behind_gateway},
            sample=_sample(request),
            turns_key=job.key("turns.parquet"),
            labels={
                **job.labels("agent"),
                # Rollouts of a group share their prompt, so the gateway sends them to one engine.
                "group": request.group_id or f"{request.run_id}/{request.instance_id}",
                **_versions(request),
                **_trace(),
            },
            replay_of=await self._earlier(),
        )

    async def look(self) -> SessionSummary:
        """Poll the session, in one request with the other agents that this process watches.

        Raises: AttemptDamaged; GatewayUnavailable.
        """
        return await self._existing(self._known(self._gateway.look(self._id)))

    async def _existing(self, answer: Awaitable[SessionSummary]) -> SessionSummary:
        """The session of a started agent. Raises: AttemptDamaged if it is gone."""
        try:
            return self._whole(await answer)
        except NotFound:
            raise _damaged(f"the journal of session {self._id} is gone") from None

    def _whole(self, summary: SessionSummary) -> SessionSummary:
        if summary.damaged:
            raise _damaged(f"session {self._id} is damaged: {summary.damaged}")
        return summary

    async def _known(self, answer: Awaitable[SessionSummary]) -> SessionSummary:
        """Note an outage of the gateway. A store outage needs no note: calls wait in the
        gateway."""
        try:
            return await answer
        except GatewayUnavailable:
            await self._note(GatewayOutage())
            raise

    async def _note(self, away: GatewayOutage) -> None:
        services = self._job.services
        services.unwritten_away.add(self._away_key)
        await services.store.put(self._away_key, away.model_dump_json().encode())
        services.unwritten_away.discard(self._away_key)

    async def _noted(self) -> GatewayOutage | None:
        if self._away_key in self._job.services.unwritten_away:
            return GatewayOutage()
        return await self._job.read(AWAY, GatewayOutage)

    async def stop(self) -> None:
        """Let the agent's next call be refused. Raises: RetryHere if no session is open yet."""
        try:
            await self._gateway.stop(self._id)
        except NotFound as error:
            raise RetryHere(f"the agent may still start: {error}") from None

    async def close(self) -> SessionSummary:
        """Close the session of a started agent. Its `unanswered` is also set if the gateway has
        been unavailable since the last answer. Raises: AttemptDamaged."""
        if self._job.activity_attempt.number > 1:
            # The store may be back only now, and a closed session takes no more notes of calls.
            await asyncio.sleep(NOTES_TAKE_S)
        summary = await self._existing(self._known(self._gateway.close(self._id)))
        away = await self._noted()
        if away is None or (away.turns is not None and summary.turns > away.turns):
            return summary
        reason = summary.unanswered or "the gateway was unavailable"
        return summary.model_copy(update={"unanswered": reason})

    async def _answered(self, summary: SessionSummary) -> SessionSummary:
        """Note the turn count of a gateway that is back. One more turn means the agent got an
        answer."""
        away = await self._noted()
        if away is not None and away.turns is None:
            await self._note(GatewayOutage(turns=summary.turns))
        return summary

    @property
    def _away_key(self) -> str:
        return self._job.key(AWAY)

    async def _earlier(self) -> str | None:
        """The session of the earlier attempt to replay, whose turns are not sampled again."""
        job = self._job
        first = await _first_of_round(job)
        sessions = [job.session_of(number) for number in range(first, job.attempt)]
        return await find_longest_recording(self._gateway, sessions)


def _damaged(what: str) -> AttemptDamaged:
    return AttemptDamaged(
        f"{what}; the next attempt replays the undamaged turns", boundary=Boundary.GATEWAY
    )


async def _first_of_round(job: Job) -> int:
    """The first attempt of this round. Turns of an earlier round are not replayed."""
    number = 1
    while job.request.round and number < job.attempt:
        key = f"{store_keys.attempt(job.request, number)}/{CHECKPOINT}"
        record = await stage_checkpoints.read(job.services.store, key, BootRecord)
        if record is not None and record.round == job.request.round:
            break
        number += 1
    return number


def _sample(request: RolloutRequest) -> str:
    """The name from which a fixed seed is derived. It includes the round, so that a rerun
    differs."""
    sample = f"{request.instance}/{request.sample_index}"
    return f"{sample}/round-{request.round}" if request.round else sample


def session_of(job: Job) -> AgentSession | None:
    """None if the agent calls no model."""
    return AgentSession(job) if job.agent.needs_model else None


def _trace() -> dict[str, str]:
    """The rollout's span, parent of the turns' spans. The stage's span may be lost with its try."""
    return {tracing.PARENT: above} if (above := tracing.above()) else {}


def _versions(request: RolloutRequest) -> dict[str, str]:
    """Labels with the policy versions that may sample this rollout; empty if any version may."""
    if request.policy_version is None or request.max_staleness is None:
        return {}
    names = ("policy_version", "max_staleness", "too_stale")
    return {name: str(getattr(request, name)) for name in names}

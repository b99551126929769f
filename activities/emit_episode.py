"""emit_episode: gather what the stages left in the store into one episode."""

import time

from activities import checkpoints
from activities.boot_sandbox import BootRecord
from activities.grade import grade_key
from activities.messages import AgentRun, Attempt, Ending
from activities.services import Services
from activities.shell import shell
from perdure.episodes import segments, turns
from perdure.episodes.episode import AttemptSummary, EpisodeParts, build_episode
from perdure.episodes.files import read_episode, write_episode
from perdure.errors import NotFound
from perdure.storage import keys
from perdure.telemetry import metrics
from perdure.types import EpisodeRef, Grade, Instance, PatchRef, RolloutStatus, Turn


class EmitEpisode:
    def __init__(self, services: Services) -> None:
        self.services = services

    @shell("emit_episode")
    async def emit(self, ending: Ending) -> EpisodeRef:
        store = self.services.store
        earlier = await read_episode(store, ending.request)
        if earlier and earlier.provenance.workflow_run_id == ending.workflow_run_id:
            return earlier.ref(store.url)
        parts = await self._gather(ending)
        cut = segments.cut(list(parts.turns))
        episode = await write_episode(store, build_episode(parts, cut), cut)
        outcome = episode.outcome.value if episode.outcome else ""
        metrics.rollout(episode.agent, episode.status.value, outcome, episode.sampled_tokens)
        return episode.ref(store.url)

    async def _gather(self, ending: Ending) -> EpisodeParts:
        request, store = ending.request, self.services.store
        attempts = [await self._attempt(ending, k) for k in range(1, ending.attempts + 1)]
        folder = keys.attempt(request, ending.attempts)
        graded = ending.status is RolloutStatus.GRADED
        last = Attempt(
            request=request, attempt=ending.attempts, workflow_run_id=ending.workflow_run_id
        )
        grade = await checkpoints.read(store, grade_key(last), Grade) if graded else None
        turns_key = f"{folder}/turns.parquet"
        taken = await self._turns(turns_key)
        stages = {**(attempts[-1].seconds if attempts else {})}
        if grade is not None:
            stages["grade"] = round(grade.seconds, 3)
        return EpisodeParts(
            request=request,
            status=ending.status,
            started_at=ending.started_at,
            finished_at=time.time(),
            attempts=attempts,
            instance=await self._instance(ending),
            turns=taken,
            turns_key=turns_key if taken else None,
            agent_end=attempts[-1].agent_end if attempts else None,
            patch=await checkpoints.read(store, f"{folder}/patch.json", PatchRef),
            grade=grade,
            failure=ending.failure,
            stage_seconds=stages,
            evictions=ending.evictions,
            workflow_run_id=ending.workflow_run_id,
        )

    async def _attempt(self, ending: Ending, number: int) -> AttemptSummary:
        folder = keys.attempt(ending.request, number)
        store = self.services.store
        boot = await checkpoints.read(store, f"{folder}/sandbox.json", BootRecord)
        run = await checkpoints.read(store, f"{folder}/agent.json", AgentRun)
        timed = [("boot", boot.seconds if boot else 0.0), ("agent", run.seconds if run else 0.0)]
        return AttemptSummary(
            attempt=number,
            provider=boot.provider if boot else "",
            host=boot.host if boot else "",
            agent_end=run.end if run else None,
            turns=run.turns if run else 0,
            tokens=run.tokens if run else 0,
            agent_detail=run.detail if run else "",
            seconds={name: round(seconds, 3) for name, seconds in timed if seconds},
            evidence=tuple([key async for key in store.list(f"{folder}/")]),
        )

    async def _turns(self, key: str) -> list[Turn]:
        try:
            return turns.decode((await self.services.store.get(key)).data)
        except NotFound:
            return []

    async def _instance(self, ending: Ending) -> Instance | None:
        try:
            return await self.services.instance(ending.request)
        except NotFound:
            return None

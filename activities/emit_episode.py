"""emit_episode: gather what the stages left in the store into one episode."""

import time

from activities import checkpoints
from activities.boot_sandbox import BootRecord
from activities.grade import grade_key
from activities.messages import AgentRun, Attempt, Ending
from activities.services import Services
from activities.shell import shell
from perdure.episodes import assemble, segments, turns
from perdure.episodes.assemble import AttemptEvidence, Episode, EpisodeParts
from perdure.errors import NotFound, PreconditionFailed
from perdure.storage import keys
from perdure.types import EpisodeRef, Grade, Instance, PatchRef, RolloutStatus, Turn


class EmitEpisode:
    def __init__(self, services: Services) -> None:
        self.services = services

    @shell("emit_episode")
    async def emit(self, ending: Ending) -> EpisodeRef:
        store, request = self.services.store, ending.request
        earlier = await assemble.read(store, request)
        if earlier is not None and earlier.workflow_run_id == ending.workflow_run_id:
            return earlier.ref(store.url)
        parts = await self._gather(ending)
        episode = assemble.build(parts)
        await store.put(
            keys.episode_tokens(request), assemble.tokens_parquet(episode, parts.segments)
        )
        return (await self._publish(ending, episode)).ref(store.url)

    async def _publish(self, ending: Ending, episode: Episode) -> Episode:
        """The JSON is written last, on condition: it says that the episode is there."""
        store, key = self.services.store, keys.episode(ending.request)
        data = episode.model_dump_json(indent=1, exclude_none=False).encode()
        if await store.put_if_absent(key, data):
            return episode
        found = await store.get(key)
        stored = Episode.model_validate_json(found.data)
        if stored.workflow_run_id == ending.workflow_run_id:
            return stored  # an earlier try of ours was first
        if stored.finished_at > ending.started_at and stored.started_at > ending.started_at:
            raise PreconditionFailed(f"{key} belongs to a later run of this workflow")
        await store.put(key, data, if_match=found.etag)
        return episode

    async def _gather(self, ending: Ending) -> EpisodeParts:
        request, store = ending.request, self.services.store
        attempts = [await self._evidence(ending, k) for k in range(1, ending.attempts + 1)]
        last = Attempt(
            request=request, attempt=ending.attempts, workflow_run_id=ending.workflow_run_id
        )
        folder = keys.attempt(request, ending.attempts)
        graded = ending.status is RolloutStatus.GRADED
        grade = await checkpoints.read(store, grade_key(last), Grade) if graded else None
        taken = await self._turns(f"{folder}/turns.parquet")
        stages = {
            "boot": attempts[-1].boot_seconds if attempts else 0.0,
            "agent": attempts[-1].agent_seconds if attempts else 0.0,
            "grade": grade.seconds if grade else 0.0,
        }
        return EpisodeParts(
            request=request,
            status=ending.status,
            instance=await self._instance(ending),
            attempts=attempts,
            grade=grade,
            patch=await checkpoints.read(store, f"{folder}/patch.json", PatchRef),
            turns=taken,
            segments=segments.cut(taken),
            failure=ending.failure,
            evictions=ending.evictions,
            started_at=ending.started_at,
            finished_at=time.time(),
            workflow_run_id=ending.workflow_run_id,
            stage_seconds={name: round(seconds, 3) for name, seconds in stages.items()},
        )

    async def _evidence(self, ending: Ending, number: int) -> AttemptEvidence:
        folder = keys.attempt(ending.request, number)
        store = self.services.store
        boot = await checkpoints.read(store, f"{folder}/sandbox.json", BootRecord)
        run = await checkpoints.read(store, f"{folder}/agent.json", AgentRun)
        return AttemptEvidence(
            attempt=number,
            folder=folder,
            identity=boot.identity if boot else "",
            boot_seconds=round(boot.seconds, 3) if boot else 0.0,
            agent_end=run.end if run else None,
            agent_seconds=run.seconds if run else 0.0,
            agent_detail=run.detail if run else "",
            turns=run.turns if run else 0,
            tokens=run.tokens if run else 0,
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

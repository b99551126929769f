"""Real episodes of made turns in a store, in the place of the episode stage."""

from collections.abc import Callable
from dataclasses import dataclass

from perdure.episodes.episode import EpisodeParts
from perdure.episodes.trajectory_segments import cut
from perdure.rollouts.activity_messages import Ending
from perdure.storage.base import Store
from perdure.storage.local_store import LocalStore
from perdure.types import (
    EpisodeRef,
    Grade,
    Outcome,
    Rewards,
    RolloutRequest,
    RolloutStatus,
    Turn,
    VersionSpan,
)
from tests.stored_episodes import store_episode

LOGPROBS = (-0.5, -0.25)


def turns(version: int, sample_index: int = 0) -> tuple[Turn, ...]:
    """Two turns, of `version` and the one after it. The second one extends the first one."""
    first = 20 + sample_index
    return (
        _turn(0, (11, 12), first, version),
        _turn(1, (11, 12, first, 31), 40, version + 1, parent=0),
    )


def _turn(
    index: int, prompt: tuple[int, ...], sampled: int, version: int, parent: int | None = None
) -> Turn:
    return Turn(
        index=index,
        prompt_ids=prompt,
        completion_ids=(sampled,),
        logprobs=(LOGPROBS[index],),
        versions=(VersionSpan(version=version, start=0, end=1),),
        parent=parent,
    )


@dataclass
class EpisodeStage:
    """Stores the episode of each ended rollout."""

    store: Store
    reward: Callable[[RolloutRequest], float] = lambda request: float(request.sample_index == 0)

    @classmethod
    def of(cls, path: str) -> "EpisodeStage":
        return cls(LocalStore(path))

    async def emit(self, ending: Ending) -> EpisodeRef:
        request, is_graded = ending.request, ending.status is RolloutStatus.GRADED
        reward = self.reward(request)
        outcome = Outcome.RESOLVED if reward else Outcome.UNRESOLVED
        taken = turns(request.policy_version or 0, request.sample_index)
        parts = EpisodeParts(
            request=request,
            status=ending.status,
            failure=ending.failure,
            grade=Grade(outcome=outcome, rewards=Rewards(binary=reward)) if is_graded else None,
            started_at=0.0,
            finished_at=1.0,
            turns=taken,
        )
        return (await store_episode(self.store, parts, cut(taken))).ref(self.store.url)

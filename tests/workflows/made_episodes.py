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
)
from tests.stored_episodes import store_episode
from tests.workflows.made_turns import turns


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

"""Rejection sampling: selects the graded rollouts of each instance that become demonstrations."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from perdure.episodes.episode import Episode


@dataclass(frozen=True)
class Selection:
    """`best`: at most this many rollouts of each instance, those with the highest reward, and among
    equals those with the fewest sampled tokens. None: all. `min_reward`: skip rollouts with
    less."""

    best: int | None = None
    min_reward: float | None = None

    def rejected(self, episodes: Sequence[Episode]) -> dict[str, str]:
        """`rollout_id` -> why that graded rollout is rejected. `episodes`: by instance."""
        found: dict[str, str] = {}
        for _, tried in groupby(episodes, key=lambda one: one.instance_id):
            found |= self._rejected(one for one in tried if one.reward is not None)
        return found

    def _rejected(self, tried: Iterable[Episode]) -> dict[str, str]:
        ranked = sorted(tried, key=lambda one: (-(one.reward or 0.0), one.sampled_tokens))
        found = {}
        for place, one in enumerate(ranked):
            if self.min_reward is not None and (one.reward or 0.0) < self.min_reward:
                found[one.rollout_id] = f"its reward is {one.reward:g}, below {self.min_reward:g}"
            elif self.best is not None and place >= self.best:
                found[one.rollout_id] = f"not in the best {self.best} of its instance"
        return found


EVERYTHING = Selection()

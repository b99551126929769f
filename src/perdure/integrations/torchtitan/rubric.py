"""Rewards from Perdure's grade, for TorchTitan's rubric."""

from dataclasses import dataclass

from torchtitan.experiments.rl.rollout.types import Rollout
from torchtitan.experiments.rl.rubrics import RewardFn


class Graded(RewardFn):  # type: ignore[misc]  # torchtitan has no types
    """The reward of the rollout's episode, in the form that its request names."""

    @dataclass(kw_only=True, slots=True)
    class Config(RewardFn.Config):  # type: ignore[misc]
        pass

    async def __call__(self, rollout: Rollout, env_input: object) -> float:
        return float(rollout.turns[-1].env_rewards["reward"])

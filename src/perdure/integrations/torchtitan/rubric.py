"""Rewards from Perdure's grade, for TorchTitan's rubric."""

from dataclasses import dataclass

from torchtitan.experiments.rl.rollout.types import Rollout
from torchtitan.experiments.rl.rubrics import RewardFn


class Graded(RewardFn):  # type: ignore[misc]  # torchtitan has no types
    """1 if the rollout resolved its instance, otherwise 0.

    `dense`: the share of hidden tests that pass (`Rewards.partial`); 1 only if all pass.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(RewardFn.Config):  # type: ignore[misc]
        dense: bool = False

    def __init__(self, config: "Graded.Config") -> None:
        super().__init__(config)
        self._reward = "partial" if config.dense else "binary"

    async def __call__(self, rollout: Rollout, env_input: object) -> float:
        return float(rollout.turns[-1].env_rewards[self._reward])

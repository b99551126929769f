"""TorchTitan: each unbroken chain of a rollout as one packed `TrainingSample`."""

from typing import Any

from perdure.episodes.episode import EpisodeSegments
from perdure.episodes.trainers import torchtitan_samples
from perdure.integrations import installed

TYPES = "torchtitan.experiments.rl.types"


def training_samples(found: EpisodeSegments, *, group_id: int, advantage: float) -> list[Any]:
    """One `TrainingSample` per branch (a dict if TorchTitan is not installed).

    `advantage` is the rollout's own, whole in every branch. None when it failed: its group is the
    smaller for it, and `group_advantages` takes the mean over the rest.
    """
    rows = torchtitan_samples(found, group_id=group_id, advantage=advantage)
    sample = installed.find(TYPES, "TrainingSample")
    if sample is None:
        return rows
    turn_id = installed.find(TYPES, "RolloutTurnID")
    assert turn_id is not None  # of the same module
    return [sample(**{**row, "rollout_id": turn_id(**row["rollout_id"])}) for row in rows]

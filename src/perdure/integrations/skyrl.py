"""SkyRL: a batch of rollouts as the `GeneratorOutput` of a custom generator."""

from collections.abc import Sequence
from typing import Any

from perdure.episodes.episode import EpisodeSegments
from perdure.episodes.trainers import skyrl_output
from perdure.integrations import installed


def generator_output(found: Sequence[EpisodeSegments]) -> dict[str, Any]:
    """A `GeneratorOutput` (a TypedDict) for `generator.step_wise_trajectories=true`.

    `trajectory_ids` are SkyRL's own objects if it is installed. Rollouts that failed or have nothing
    to train on have no row; `rollout_metrics["perdure/left_out"]` counts them.
    """
    output = skyrl_output(found)
    trajectory_id = installed.find("skyrl.train.generators.base", "TrajectoryID")
    if trajectory_id is not None:
        output["trajectory_ids"] = [trajectory_id(**one) for one in output["trajectory_ids"]]
    return output

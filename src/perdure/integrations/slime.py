"""slime: segments as `slime.utils.types.Sample`, as its `generate()` hooks return them."""

from typing import Any

from perdure.episodes.episode import EpisodeSegments
from perdure.episodes.trainers import slime_samples
from perdure.integrations import installed


def samples(found: EpisodeSegments, *, index: int = 0, group_index: int = 0) -> list[Any]:
    """One `Sample` per segment (a dict if slime is not installed), or the placeholder.

    `index` and `group_index` are those of the input sample; all siblings share it as `rollout_id`.
    A rollout without a verdict has reward None and `remove_sample`: sample it again, or take it out
    of its group before rewards are normalised.
    """
    rows = slime_samples(found, index=index, group_index=group_index)
    sample = installed.find("slime.utils.types", "Sample")
    return rows if sample is None else [sample.from_dict(row) for row in rows]

"""Episodes that a test puts into a store, as the episode stage does."""

from collections.abc import Sequence

from perdure.episodes.episode import Episode, EpisodeParts, build_episode
from perdure.episodes.episode_parquet import encode_segments
from perdure.episodes.episode_store import write_episode
from perdure.storage.base import Store
from perdure.types import Segment


async def store_episode(
    store: Store, parts: EpisodeParts, segments: Sequence[Segment] = ()
) -> Episode:
    """`segments` must be cut from the turns of `parts`."""
    episode = build_episode(parts, segments)
    return await write_episode(store, episode, encode_segments(episode, segments))

"""Reads the tokens of a finished rollout by its reference, for the adapters of
`perdure.integrations`.

This module finds the episode in the store. `perdure.episodes` defines its arrays.
"""

import asyncio
from collections.abc import Iterable
from functools import partial

from perdure.client.gateway_episodes import GatewayEpisodes
from perdure.episodes import turns_parquet
from perdure.episodes.episode import Episode, EpisodeSegments, parse_episode
from perdure.episodes.episode_store import read_segments
from perdure.episodes.trajectory_segments import RewardShare, SegmentMode
from perdure.errors import ConfigurationError
from perdure.home_folder import load_secret
from perdure.settings.settings_loader import load_settings
from perdure.settings.settings_tree import Settings
from perdure.storage import stored_json
from perdure.storage.base import Store
from perdure.storage.store_url import store_to_read
from perdure.types import EpisodeRef, Turn


async def read_episodes(
    refs: Iterable[EpisodeRef],
    store: Store | GatewayEpisodes | None = None,
    *,
    mode: SegmentMode = "tree",
    reward_share: RewardShare = "full",
    keep_unused: bool = False,
    routed_experts: bool = False,
    kept_tokens: bool = False,
) -> list[EpisodeSegments]:
    """The episodes and their segments, in the order of `refs`. Failed rollouts have reward None.

    References without a `uri` are left out: stragglers whose episodes do not exist yet.
    `keep_unused`: include answers that the agent did not use. `routed_experts`: also read what
    `experts_of(segment)` gives, for router replay. `kept_tokens`: also what `kept_of(segment)`
    gives, for a trainer that normalises over the top-p set of each token. `store`: by default the one
    that the settings name. `http://...` names a gateway, which reads the episodes from its store.

    Raises: NotFound (deleted), ConfigurationError (in another store), ValueError (unreadable).
    """
    source = store or _named(load_settings())
    refs = list(refs)
    for given in refs:
        if not isinstance(given, EpisodeRef):
            raise ConfigurationError(
                f"read_episodes takes EpisodeRefs, such as those of a handle, not {given!r:.80}"
            )

    async def one(ref: EpisodeRef) -> EpisodeSegments:
        at = source.key_of if isinstance(source, GatewayEpisodes) else partial(_key, store=source)
        key = at(ref)
        episode = parse_episode(key, (await source.get(key)).data)
        return await read_segments(
            source,
            episode,
            mode=mode,
            reward_share=reward_share,
            keep_unused=keep_unused,
            routed_experts=routed_experts,
            kept_tokens=kept_tokens,
        )

    return list(await asyncio.gather(*(one(ref) for ref in refs if ref.uri)))


async def read_turns(episode: Episode, store: Store | None = None) -> list[Turn]:
    """All model calls of the episode as recorded, with their messages. Raises: NotFound."""
    if episode.turns_key is None:
        return []
    source = store or _named(load_settings())
    data = (await source.get(episode.turns_key)).data
    stored_json.check_file(episode.turns_key, data, episode.turns_sha256)
    return turns_parquet.decode(data)


def _named(settings: Settings) -> Store | GatewayEpisodes:
    if settings.store.startswith(("http://", "https://")):
        return GatewayEpisodes(settings.store, load_secret(settings))
    return store_to_read(settings)


def _key(ref: EpisodeRef, store: Store) -> str:
    key = ref.uri.removeprefix(f"{store.url}/")
    if key == ref.uri:
        raise ConfigurationError(
            f"the episode is at {ref.uri}, but this process reads {store.url}: set PERDURE_STORE"
        )
    return key

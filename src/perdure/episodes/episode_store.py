"""Writes, finds and reads episodes in the store: `episode.json` for people, `episode.parquet` for
trainers.

It tokenizes nothing: segments come from `episode.parquet`, or from the recorded turns if they are
cut by other rules. Commands that read only `episode.json` do not import pyarrow.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import TypeVar

from perdure.episodes.episode import Episode, EpisodeSegments, parse_episode, trained
from perdure.episodes.segment_experts import segment_experts
from perdure.episodes.segment_kept_tokens import segment_kept_tokens
from perdure.episodes.trajectory_segments import RewardShare, SegmentMode, cut
from perdure.errors import NotFound, PreconditionFailed, StoreUnavailable
from perdure.storage import store_keys, stored_json
from perdure.storage.base import Reads, Store, Stored
from perdure.types import RolloutRequest, Turn

READS_AT_ONCE = 32
READS_TOGETHER = 1024
"""Reads to start at a time, because waiting ones also take memory."""
T = TypeVar("T")


async def write_episode(store: Store, episode: Episode, tokens: bytes) -> Episode:
    """Store both forms, the JSON last, and return the episode that is then in the store.

    `tokens`: the content of `episode.parquet`. An unreadable episode is replaced. If the same
    workflow run writes again, its first episode stays. If another workflow run of the same rollout
    writes (a retry, a reset), its episode replaces the earlier one, which is kept under another
    name.
    """
    stored = await _stored(store, episode.key)
    earlier = _readable(episode.key, stored)
    if earlier is not None and _is_of_same_run(earlier, episode):
        return earlier
    if stored is not None and earlier is not None:
        await _keep_earlier(store, earlier, stored.data, is_fuller=not episode.segments)
    await store.put(episode.tokens_key, tokens)
    data = stored_json.encode(episode)
    try:
        if stored is not None:
            await store.put(episode.key, data, if_match=stored.etag)
            return episode
        if await store.put_if_absent(episode.key, data):
            return episode
    except PreconditionFailed:
        pass
    # When the caller retries, it finds its own episode or replaces the other one.
    raise StoreUnavailable(f"{episode.key} was written by another worker at the same time")


async def _keep_earlier(store: Store, earlier: Episode, data: bytes, *, is_fuller: bool) -> None:
    """Store the earlier episode under its own key, and with `is_fuller` also its tokens."""
    key = earlier.as_earlier().key
    if is_fuller and earlier.segments:
        tokens_key = f"{key.removesuffix('.json')}.parquet"
        tokens = await _stored(store, earlier.tokens_key)
        if tokens is not None:
            await store.put_if_absent(tokens_key, tokens.data)
            data = stored_json.encode(earlier.model_copy(update={"tokens_key": tokens_key}))
    await store.put_if_absent(key, data)


async def read_episode(store: Store, request: RolloutRequest) -> Episode | None:
    """The rollout's episode; None if it has not finished."""
    key = store_keys.episode(request)
    stored = await _stored(store, key)
    return parse_episode(key, stored.data) if stored is not None else None


@dataclass(frozen=True)
class Unreadable:
    """An `episode.json` that cannot be parsed: its store key, and the reason."""

    instance_id: str
    sample_index: int
    key: str
    problem: str

    def __str__(self) -> str:
        return f"{self.key} is unreadable: {self.problem}"


async def read_run(store: Store, run_id: str) -> list[Episode]:
    """All episodes of a run, by instance and sample. Raises: ValueError naming an unreadable one."""
    episodes, unreadable = await scan_run(store, run_id)
    if unreadable:
        raise ValueError(str(unreadable[0]))
    return episodes


async def scan_run(store: Store, run_id: str) -> tuple[list[Episode], list[Unreadable]]:
    """The episodes of a run, by instance and sample, and the unreadable ones."""
    return await scan_run_as(store, run_id, lambda episode: episode)


async def scan_run_as(
    store: Store, run_id: str, keep: Callable[[Episode], T]
) -> tuple[list[T], list[Unreadable]]:
    """The results of `keep` for each episode of a run, by instance and sample, and the unreadable
    episodes.

    A whole episode takes 17 KB or more, so keeping 16,500 of them would take 300 MB.
    """
    slots = asyncio.Semaphore(READS_AT_ONCE)
    kept: list[tuple[str, int, T]] = []
    unreadable: list[Unreadable] = []

    async def one(key: str) -> None:
        async with slots:
            data = (await store.get(key)).data
        try:
            episode = parse_episode(key, data)
        except ValueError as error:
            unreadable.append(_unreadable(key, str(error)))
        else:
            kept.append((episode.instance_id, episode.sample_index, keep(episode)))

    found = [key async for key in episode_keys(store, run_id)]
    for at in range(0, len(found), READS_TOGETHER):
        await asyncio.gather(*map(one, found[at : at + READS_TOGETHER]))
    kept.sort(key=lambda entry: entry[:2])
    return [entry[2] for entry in kept], sorted(unreadable, key=lambda u: u.key)


async def episode_keys(store: Store, run_id: str) -> AsyncIterator[str]:
    """The keys of a run's episodes."""
    async for key in store.list(store_keys.rollouts(run_id)):
        if _is_episode(key):
            yield key


def _unreadable(key: str, problem: str) -> Unreadable:
    _, _, _, instance_id, sample_index, _ = key.split("/")
    return Unreadable(
        instance_id, int(sample_index), key, problem.removeprefix(f"{key} is unreadable: ")
    )


def _is_episode(key: str) -> bool:
    """Match `runs/<run>/rollouts/<instance>/<sample>/episode.json`, but no agent's file."""
    parts = key.split("/")
    return len(parts) == 6 and parts[4].isdigit() and parts[5] == "episode.json"


async def _stored(store: Store, key: str) -> Stored | None:
    try:
        return await store.get(key)
    except NotFound:
        return None


def _readable(key: str, stored: Stored | None) -> Episode | None:
    try:
        return parse_episode(key, stored.data) if stored is not None else None
    except ValueError:
        return None


def _is_of_same_run(one: Episode, other: Episode) -> bool:
    return one.provenance.workflow_run_id == other.provenance.workflow_run_id


async def read_segments(
    store: Reads,
    episode: Episode,
    *,
    mode: SegmentMode = "tree",
    reward_share: RewardShare = "full",
    keep_unused: bool = False,
    routed_experts: bool = False,
    kept_tokens: bool = False,
) -> EpisodeSegments:
    """The episode and its segments, masked if it is too stale to train. `keep_unused`: include answers
    that the agent did not use. `routed_experts`, `kept_tokens`: also read the experts of their tokens,
    and what top-p left for each, where engines returned them.

    Raises: NotFound when its arrays are not in the store; ValueError when they are unreadable.
    """
    from perdure.episodes import turns_parquet
    from perdure.episodes.episode_parquet import decode_segments

    as_stored = mode == "tree" and not keep_unused
    if as_stored:
        routed_experts = routed_experts and any(one.routed_experts for one in episode.segments)
    recorded: list[Turn] = []
    if episode.turns_key is not None and (routed_experts or kept_tokens or not as_stored):
        data = (await store.get(episode.turns_key)).data
        stored_json.check_file(episode.turns_key, data, episode.turns_sha256)
        recorded = turns_parquet.decode(data)
    if as_stored:
        key, digest = episode.tokens_key, episode.tokens_sha256
        data = stored_json.check_file(key, (await store.get(key)).data, digest)
        found = decode_segments(data, key)
    else:
        found = cut(recorded, mode=mode, keep_unused=keep_unused)
    experts = segment_experts(recorded, found) if routed_experts and recorded else ()
    kept = segment_kept_tokens(recorded, found) if kept_tokens and recorded else ()
    segments = tuple(trained(found, episode.too_stale))
    return EpisodeSegments(episode, segments, tuple(experts), tuple(kept)).shared(reward_share)

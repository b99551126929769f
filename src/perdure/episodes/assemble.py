"""Episodes: what a rollout leaves for people (JSON) and for trainers (parquet), and a run's manifest.

Owns both forms and their place in the store. Facts come in as `EpisodeParts`; nothing is judged
here, and a rollout without a verdict has reward null, never 0.
"""

import asyncio
import io
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from perdure.episodes.episode import Episode, count, parse_episode
from perdure.errors import NotFound, PreconditionFailed, StoreUnavailable
from perdure.storage import keys
from perdure.storage.base import Store
from perdure.types import (
    Outcome,
    RolloutRequest,
    Segment,
)

READS_AT_ONCE = 32
TOKENS_SCHEMA = pa.schema(
    [
        ("run_id", pa.string()),
        ("group_id", pa.string()),
        ("instance_id", pa.string()),
        ("sample_index", pa.int32()),
        ("rollout_id", pa.string()),
        ("segment_kind", pa.string()),
        ("segment_index", pa.int32()),
        ("num_segments", pa.int32()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("response_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.int8())),
        ("logprobs", pa.list_(pa.float64())),
        ("versions", pa.list_(pa.int64())),
        ("reward", pa.float64()),
        ("rollout_reward", pa.float64()),
        ("status", pa.string()),
        ("outcome", pa.string()),
        ("finish_reason", pa.string()),
        ("trainable", pa.bool_()),
        ("chain", pa.string()),
        ("turns", pa.list_(pa.int32())),
    ],
    metadata={b"perdure.episode": b"1"},
)
"""One row a segment; a rollout without segments has one row with empty arrays and no kind.
`reward` is the segment's share of `rollout_reward`; both are null unless the rollout was graded."""


def tokens_parquet(episode: Episode, segments: Sequence[Segment]) -> bytes:
    """The token arrays as a parquet file of `TOKENS_SCHEMA`, at least one row."""
    rows = [_row(episode, segment) for segment in segments] or [_row(episode, None)]
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, TOKENS_SCHEMA), sink, compression="zstd")
    return sink.getvalue()


def _row(episode: Episode, segment: Segment | None) -> dict[str, Any]:
    row: dict[str, Any] = {
        "run_id": episode.run_id,
        "group_id": episode.group_id,
        "instance_id": episode.instance_id,
        "sample_index": episode.sample_index,
        "rollout_id": episode.rollout_id,
        "num_segments": len(episode.segments),
        "rollout_reward": episode.reward,
        "reward": episode.reward,
        "status": episode.status.value,
        "outcome": episode.outcome and episode.outcome.value,
        "trainable": episode.trainable,
    }
    arrays = ("prompt_ids", "response_ids", "loss_mask", "logprobs", "versions", "turns")
    if segment is None:
        return row | {"segment_index": 0} | dict.fromkeys(arrays, ())
    share = None if episode.reward is None else episode.reward * segment.reward_share
    return row | {
        "segment_kind": segment.kind.value,
        "segment_index": segment.index,
        "chain": segment.chain,
        "reward": share,
        "finish_reason": segment.finish_reason.value,
        **{name: getattr(segment, name) for name in arrays},
    }


# --- in the store ----------------------------------------------------------------------------


async def write(store: Store, episode: Episode, segments: Sequence[Segment]) -> Episode:
    """Store both forms, the JSON last; returns the episode that is in the store afterwards.

    The same workflow run writing again finds its first episode; another workflow run of the same
    rollout (a reset) replaces it.
    """
    found = await _find(store, episode.key)
    if found is not None and _same_workflow_run(found[0], episode):
        return found[0]
    await store.put(episode.tokens_key, tokens_parquet(episode, segments))
    data = episode.model_dump_json(indent=1).encode()
    try:
        if found is not None:
            await store.put(episode.key, data, if_match=found[1])
            return episode
        if await store.put_if_absent(episode.key, data):
            return episode
    except PreconditionFailed:
        pass
    # Somebody else was between: look again, and either find our own episode or take its place.
    raise StoreUnavailable(f"{episode.key} was written by another worker at the same time")


def _same_workflow_run(one: Episode, other: Episode) -> bool:
    return one.provenance.workflow_run_id == other.provenance.workflow_run_id


async def read(store: Store, request: RolloutRequest) -> Episode | None:
    """The rollout's episode, or None when it has not finished."""
    found = await _find(store, keys.episode(request))
    return found[0] if found else None


@dataclass(frozen=True)
class Unreadable:
    """An `episode.json` that is none: where it lies, and what is wrong with it."""

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
    """The episodes of a run, by instance and sample, and those that cannot be read."""
    found = [key async for key in store.list(keys.rollouts(run_id)) if _is_episode(key)]
    gate = asyncio.Semaphore(READS_AT_ONCE)

    async def one(key: str) -> Episode | Unreadable:
        async with gate:
            data = (await store.get(key)).data
        try:
            return parse_episode(key, data)
        except ValueError as error:
            return _unreadable(key, str(error))

    read = await asyncio.gather(*(one(key) for key in found))
    episodes = [one for one in read if isinstance(one, Episode)]
    unreadable = [one for one in read if isinstance(one, Unreadable)]
    return (
        sorted(episodes, key=lambda e: (e.instance_id, e.sample_index)),
        sorted(unreadable, key=lambda u: u.key),
    )


def _unreadable(key: str, problem: str) -> Unreadable:
    _, _, _, instance_id, sample_index, _ = key.split("/")
    return Unreadable(
        instance_id, int(sample_index), key, problem.removeprefix(f"{key} is unreadable: ")
    )


def _is_episode(key: str) -> bool:
    """`runs/<run>/rollouts/<instance>/<sample>/episode.json`, and nothing an agent named so."""
    parts = key.split("/")
    return len(parts) == 6 and parts[4].isdigit() and parts[5] == "episode.json"


async def _find(store: Store, key: str) -> tuple[Episode, str] | None:
    try:
        stored = await store.get(key)
    except NotFound:
        return None
    return parse_episode(key, stored.data), stored.etag


# --- a run -----------------------------------------------------------------------------------


def manifest(run_id: str, episodes: Sequence[Episode]) -> dict[str, Any]:
    """Totals of a run and the list of its episodes. Means are over graded rollouts only."""
    graded = [episode for episode in episodes if episode.reward is not None]
    stages: Counter[str] = Counter()
    for episode in episodes:
        stages.update(episode.stage_seconds)
    passed = pass_at(graded)
    return {
        "schema_version": 1,
        "run_id": run_id,
        "rollouts": len(episodes),
        "instances": len({episode.instance_id for episode in episodes}),
        "graded": len(graded),
        "resolved": sum(episode.outcome is Outcome.RESOLVED for episode in graded),
        "mean_reward": _mean([episode.reward or 0.0 for episode in graded]),
        "pass_at_1": passed.get("1"),
        "pass_at_k": passed,
        "by_status": count(episode.status.value for episode in episodes),
        "by_outcome": count(e.outcome.value for e in graded if e.outcome is not None),
        "by_agent_end": count(e.agent_end.value for e in episodes if e.agent_end is not None),
        "failures_by_boundary": count(e.failure.boundary.value for e in episodes if e.failure),
        "attempts": sum(len(episode.attempts) for episode in episodes),
        "trainable": sum(episode.trainable for episode in episodes),
        "turns": sum(episode.turns for episode in episodes),
        "prompt_tokens": sum(episode.prompt_tokens for episode in episodes),
        "sampled_tokens": sum(episode.sampled_tokens for episode in episodes),
        "trained_tokens": sum(episode.trained_tokens for episode in episodes),
        "rollout_seconds": round(math.fsum(episode.seconds for episode in episodes), 3),
        "stage_seconds": {name: round(seconds, 3) for name, seconds in sorted(stages.items())},
        "engine_seconds": round(math.fsum(episode.engine_seconds for episode in episodes), 3),
        "environment_seconds": round(math.fsum(map(_environment_seconds, episodes)), 3),
        "episodes": [_entry(episode) for episode in episodes],
    }


def _entry(episode: Episode) -> dict[str, Any]:
    fields = {"sample_index", "status", "outcome", "reward", "seconds", "sampled_tokens", "failure"}
    return {
        "instance_id": episode.instance_id,
        "agent": episode.agent,
        **episode.model_dump(mode="json", include=fields),
        "attempts": len(episode.attempts),
        "key": episode.key,
    }


def _environment_seconds(episode: Episode) -> float:
    """Seconds the sandbox worked; beside engine seconds it tells how many agents feed an engine."""
    return max(0.0, episode.stage_seconds.get("agent", 0.0) - episode.engine_seconds)


def pass_at(episodes: Sequence[Episode]) -> dict[str, float]:
    """Unbiased pass@k (Chen et al. 2021) for every k, over the instances with at least k graded samples.

    Example:
        {"1": 0.5, "2": 0.8333, "3": 1.0, "4": 1.0} for one instance, 2 of its 4 samples resolved.
    """
    tries: defaultdict[str, list[bool]] = defaultdict(list)
    for episode in episodes:
        tries[episode.instance].append(episode.outcome is Outcome.RESOLVED)
    most = max((len(results) for results in tries.values()), default=0)
    found: dict[str, float] = {}
    for k in range(1, most + 1):
        chances = [
            1 - math.comb(results.count(False), k) / math.comb(len(results), k)
            for results in tries.values()
            if len(results) >= k
        ]
        found[str(k)] = round(math.fsum(chances) / len(chances), 4)
    return found


def _mean(values: Sequence[float]) -> float | None:
    return round(math.fsum(values) / len(values), 4) if values else None

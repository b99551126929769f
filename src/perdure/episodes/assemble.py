"""Episodes: what a rollout leaves for people (JSON) and for trainers (parquet), and a run's manifest.

Owns both forms and their place in the store. Facts come in as `EpisodeParts`; nothing is judged
here, and a rollout without a verdict has reward null, never 0.
"""

import asyncio
import functools
import hashlib
import importlib.metadata
import io
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field, JsonValue, ValidationError

from perdure.episodes.accounting import TrajectoryCounts, count_trajectory
from perdure.errors import NotFound, PreconditionFailed, StoreUnavailable
from perdure.storage import keys
from perdure.storage.base import Store
from perdure.types import (
    AgentEnd,
    EpisodeRef,
    Failure,
    Frozen,
    Grade,
    Instance,
    Outcome,
    PatchRef,
    Purpose,
    Rewards,
    RolloutRequest,
    RolloutStatus,
    Sampling,
    Segment,
    SegmentKind,
    Turn,
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


class AttemptSummary(Frozen):
    """One sandbox in which the rollout was tried, and where its evidence lies."""

    attempt: int
    provider: str = ""
    host: str = ""
    agent_end: AgentEnd | None = None
    agent_detail: str = ""
    turns: int = 0
    tokens: int = 0
    """Sampled tokens."""
    seconds: dict[str, float] = Field(default_factory=dict)
    """By stage: boot, agent, ..."""
    evidence: tuple[str, ...] = ()
    """Store keys: sandbox.json, agent/..., patch.diff, turns.parquet, grade-*.json, tests-*.log."""


class SegmentSummary(Frozen):
    """The size of one row of `episode.parquet`."""

    kind: SegmentKind
    prompt_tokens: int
    response_tokens: int
    trained_tokens: int
    turns: tuple[int, ...]
    policy_version_min: int | None = None
    """Of the trained tokens; -1 where nobody knows that of some."""
    policy_version_max: int | None = None


class Provenance(Frozen):
    """What would have to be repeated to get this episode again."""

    perdure_version: str
    agent: str
    agent_options: dict[str, JsonValue] = Field(default_factory=dict)
    sandbox: str
    model: str
    sampling: Sampling
    engines: tuple[str, ...] = ()
    instance_sha256: str = ""
    base_commit: str | None = None
    data_source: str = ""
    workflow_run_id: str = ""
    request: dict[str, JsonValue] = Field(default_factory=dict)
    """As it was given, without the defaults."""


class Episode(Frozen):
    """One finished rollout, readable: `episode.json`. Its token arrays are in `episode.parquet`.

    Example:
        Episode(run_id="try-1", instance="first-steps/click-8.1.3", sample_index=0,
                status="graded", outcome="resolved", reward=1.0, turns=12, sampled_tokens=2311, ...)
    """

    schema_version: Literal[1] = 1
    run_id: str
    group_id: str
    instance: str
    """Its reference, `<dataset>/<instance_id>`."""
    sample_index: int
    rollout_id: str
    """The workflow id; shared by all segments, so that a trainer counts the rollout once."""
    status: RolloutStatus
    outcome: Outcome | None = None
    reward: float | None = None
    rewards: Rewards | None = None
    agent_end: AgentEnd | None = None
    failure: Failure | None = None
    trainable: bool = False
    """Graded, and every turn has its exact token ids."""
    turns: int = 0
    segments: tuple[SegmentSummary, ...] = ()
    prompt_tokens: int = 0
    """Tokens the engines read, summed over turns."""
    sampled_tokens: int = 0
    trained_tokens: int = 0
    """Tokens with mask 1; `trajectory` says what became of the rest."""
    policy_version_min: int | None = None
    policy_version_max: int | None = None
    bridge_misses: dict[str, int] = Field(default_factory=dict)
    """Turns after the first that do not extend the one before, by reason."""
    trajectory: TrajectoryCounts = TrajectoryCounts()
    """What became of every sampled token, and what the segments cost to train."""
    started_at: float
    finished_at: float
    seconds: float
    """Wall clock from start to end, waiting included."""
    stage_seconds: dict[str, float] = Field(default_factory=dict)
    engine_seconds: float = 0.0
    evictions: int = 0
    attempts: tuple[AttemptSummary, ...] = ()
    grade: Grade | None = None
    patch: PatchRef | None = None
    turns_key: str | None = None
    tokens_key: str
    provenance: Provenance

    @property
    def instance_id(self) -> str:
        return self.instance.split("/", 1)[1]

    @property
    def agent(self) -> str:
        return self.provenance.agent

    @property
    def key(self) -> str:
        """Where it lies in the store."""
        return f"{keys.rollout(self.run_id, self.instance_id, self.sample_index)}/episode.json"

    def ref(self, store_url: str) -> EpisodeRef:
        """The few facts that travel through workflows."""
        return EpisodeRef(
            uri=f"{store_url}/{self.key}",
            instance_id=self.instance_id,
            sample_index=self.sample_index,
            agent=self.agent,
            status=self.status,
            outcome=self.outcome,
            reward=self.reward,
            attempts=len(self.attempts),
            seconds=round(self.seconds, 3),
            agent_end=self.agent_end,
            turns=self.turns,
            tokens=self.sampled_tokens,
            trainable=self.trainable,
            failure=self.failure,
            policy_version_min=self.policy_version_min,
            policy_version_max=self.policy_version_max,
        )


@dataclass(frozen=True)
class EpisodeParts:
    """Everything an episode is made of.

    `turns` and `patch` are those of the attempt that counts (the last); `grade` goes with
    status GRADED and with no other.
    """

    request: RolloutRequest
    status: RolloutStatus
    started_at: float
    finished_at: float
    attempts: Sequence[AttemptSummary] = ()
    instance: Instance | None = None
    """None when it could not be read."""
    turns: Sequence[Turn] = ()
    turns_key: str | None = None
    agent_end: AgentEnd | None = None
    patch: PatchRef | None = None
    grade: Grade | None = None
    failure: Failure | None = None
    stage_seconds: dict[str, float] = field(default_factory=dict)
    evictions: int = 0
    workflow_run_id: str = ""


def build(parts: EpisodeParts, segments: Sequence[Segment]) -> Episode:
    """The readable episode. `segments` as cut from `parts.turns`.

    Raises: ValueError when grade and status contradict each other.
    """
    request, grade = parts.request, parts.grade
    if (grade is not None) != (parts.status is RolloutStatus.GRADED):
        raise ValueError(f"status {parts.status} does not go with grade {grade and grade.outcome}")
    versions = [span.version for turn in parts.turns for span in turn.versions]
    steps = [turn for turn in parts.turns if turn.purpose is not Purpose.SIDE]
    exact = bool(segments) and all(turn.trainable for turn in steps)
    return Episode(
        run_id=request.run_id,
        group_id=request.group_id or f"{request.run_id}/{request.instance_id}",
        instance=request.instance,
        sample_index=request.sample_index,
        rollout_id=request.workflow_id,
        status=parts.status,
        outcome=grade.outcome if grade else None,
        reward=grade.reward if grade else None,
        rewards=grade.rewards if grade else None,
        agent_end=parts.agent_end,
        failure=parts.failure,
        trainable=exact and grade is not None,
        turns=len(parts.turns),
        segments=tuple(_summary(segment) for segment in segments),
        prompt_tokens=sum(len(turn.prompt_ids) for turn in parts.turns),
        sampled_tokens=sum(len(turn.completion_ids) for turn in parts.turns),
        trained_tokens=sum(sum(segment.loss_mask) for segment in segments),
        policy_version_min=min(versions, default=None),
        policy_version_max=max(versions, default=None),
        bridge_misses=count(t.bridge_miss for t in parts.turns[1:] if t.bridge_miss),
        trajectory=count_trajectory(parts.turns, segments),
        started_at=parts.started_at,
        finished_at=parts.finished_at,
        seconds=round(parts.finished_at - parts.started_at, 3),
        stage_seconds=parts.stage_seconds,
        engine_seconds=round(math.fsum(turn.engine_seconds for turn in parts.turns), 3),
        evictions=parts.evictions,
        attempts=tuple(parts.attempts),
        grade=grade,
        patch=parts.patch,
        turns_key=parts.turns_key,
        tokens_key=keys.episode_tokens(request),
        provenance=_provenance(parts),
    )


def _provenance(parts: EpisodeParts) -> Provenance:
    request, instance = parts.request, parts.instance
    digest = hashlib.sha256(instance.model_dump_json().encode()).hexdigest() if instance else ""
    return Provenance(
        perdure_version=_version(),
        agent=request.agent,
        agent_options=request.agent_options,
        sandbox=request.sandbox,
        model=request.model,
        sampling=request.sampling,
        engines=tuple(sorted({turn.engine for turn in parts.turns if turn.engine})),
        instance_sha256=digest,
        base_commit=instance.base_commit if instance else None,
        data_source=instance.data_source if instance else "",
        workflow_run_id=parts.workflow_run_id,
        request=request.model_dump(mode="json", exclude_unset=True),
    )


def _summary(segment: Segment) -> SegmentSummary:
    return SegmentSummary(
        kind=segment.kind,
        prompt_tokens=len(segment.prompt_ids),
        response_tokens=len(segment.response_ids),
        trained_tokens=sum(segment.loss_mask),
        turns=segment.turns,
        policy_version_min=segment.policy_version_min,
        policy_version_max=segment.policy_version_max,
    )


@functools.cache
def _version() -> str:
    try:
        return importlib.metadata.version("perdure")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


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
            return parse(key, data)
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
    return parse(key, stored.data), stored.etag


def parse(key: str, data: bytes) -> Episode:
    """Raises: ValueError, one line, when `data` is no episode of this version."""
    try:
        return Episode.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        problem = f"`{where}`: {first['msg']}" if where else first["msg"]
        raise ValueError(f"{key} is unreadable: {problem}") from error


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


def count(values: Iterable[str]) -> dict[str, int]:
    """How often each value occurs, in order of the values."""
    return dict(sorted(Counter(values).items()))


def _mean(values: Sequence[float]) -> float | None:
    return round(math.fsum(values) / len(values), 4) if values else None

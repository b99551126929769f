"""Episodes: segments + grade + provenance, as a readable JSON and a parquet of token arrays.

Every rollout has one, whatever happened: a failed rollout is an episode with its status, the
boundary that failed and reward null; never absent, never 0.
"""

import hashlib
import io
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from math import comb
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field

from perdure.episodes.segments import NO_VERSION
from perdure.errors import NotFound
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
    RolloutRequest,
    RolloutStatus,
    Segment,
    Turn,
)


class AttemptEvidence(Frozen):
    """What one attempt left in the store."""

    attempt: int
    folder: str
    identity: str = ""
    boot_seconds: float = 0.0
    agent_end: AgentEnd | None = None
    agent_seconds: float = 0.0
    agent_detail: str = ""
    turns: int = 0
    tokens: int = 0


class Tokens(Frozen):
    """Counts over the whole rollout."""

    sampled: int = 0
    trained: int = 0
    context: int = 0
    turns: int = 0
    bridge_misses: dict[str, int] = Field(default_factory=dict)
    engine_seconds: float = 0.0


class SegmentSummary(Frozen):
    kind: str
    prompt_tokens: int
    response_tokens: int
    trained_tokens: int
    turns: tuple[int, ...]


class Episode(Frozen):
    """The readable half of an episode (`episode.json`)."""

    run_id: str
    group_id: str | None
    rollout_id: str
    instance: str
    instance_id: str
    instance_sha256: str = ""
    data_source: str = ""
    sample_index: int
    agent: str
    model: str
    status: RolloutStatus
    outcome: Outcome | None = None
    reward: float | None = None
    trainable: bool = False
    agent_end: AgentEnd | None = None
    failure: Failure | None = None
    grade: Grade | None = None
    patch: PatchRef | None = None
    attempts: tuple[AttemptEvidence, ...] = ()
    evictions: int = 0
    tokens: Tokens = Tokens()
    segments: tuple[SegmentSummary, ...] = ()
    policy_version_min: int | None = None
    policy_version_max: int | None = None
    started_at: float = 0.0
    finished_at: float = 0.0
    seconds: float = 0.0
    stage_seconds: dict[str, float] = Field(default_factory=dict)
    """boot, agent, engine (part of agent), grade."""
    request: dict[str, Any] = Field(default_factory=dict)
    perdure_version: str = ""
    workflow_run_id: str = ""

    def ref(self, store_url: str) -> EpisodeRef:
        """The small form that travels through workflows."""
        key = keys.rollout(self.run_id, self.instance_id, self.sample_index)
        return EpisodeRef(
            uri=f"{store_url}/{key}/episode.json",
            instance_id=self.instance_id,
            sample_index=self.sample_index,
            agent=self.agent,
            status=self.status,
            outcome=self.outcome,
            reward=self.reward,
            attempts=len(self.attempts),
            seconds=self.seconds,
            agent_end=self.agent_end,
            turns=self.tokens.turns,
            tokens=self.tokens.sampled,
            trainable=self.trainable,
            failure=self.failure,
            policy_version_min=self.policy_version_min,
            policy_version_max=self.policy_version_max,
        )


@dataclass(frozen=True)
class EpisodeParts:
    """Everything an episode is made of; whatever a failed rollout did not reach is None."""

    request: RolloutRequest
    status: RolloutStatus
    instance: Instance | None
    attempts: Sequence[AttemptEvidence]
    grade: Grade | None = None
    patch: PatchRef | None = None
    turns: Sequence[Turn] = ()
    segments: Sequence[Segment] = ()
    failure: Failure | None = None
    evictions: int = 0
    started_at: float = 0.0
    finished_at: float = 0.0
    workflow_run_id: str = ""
    stage_seconds: dict[str, float] = field(default_factory=dict)


def build(parts: EpisodeParts) -> Episode:
    """Put the parts together. The reward exists only when the rollout was graded."""
    request, grade = parts.request, parts.grade
    graded = parts.status is RolloutStatus.GRADED and grade is not None
    trained = sum(sum(segment.loss_mask) for segment in parts.segments)
    versions = [v for s in parts.segments for v in s.versions if v != NO_VERSION]
    last = parts.attempts[-1] if parts.attempts else None
    return Episode(
        run_id=request.run_id,
        group_id=request.group_id,
        rollout_id=request.workflow_id,
        instance=request.instance,
        instance_id=request.instance_id,
        instance_sha256=_digest(parts.instance),
        data_source=parts.instance.data_source if parts.instance else "",
        sample_index=request.sample_index,
        agent=request.agent,
        model=request.model,
        status=parts.status,
        outcome=grade.outcome if graded and grade else None,
        reward=grade.reward if graded and grade else None,
        trainable=graded and trained > 0,
        agent_end=last.agent_end if last else None,
        failure=parts.failure,
        grade=grade,
        patch=parts.patch,
        attempts=tuple(parts.attempts),
        evictions=parts.evictions,
        tokens=_tokens(parts, trained),
        segments=tuple(_summary(segment) for segment in parts.segments),
        policy_version_min=min(versions, default=None),
        policy_version_max=max(versions, default=None),
        started_at=parts.started_at,
        finished_at=parts.finished_at,
        seconds=round(parts.finished_at - parts.started_at, 3),
        stage_seconds=parts.stage_seconds,
        request=request.model_dump(mode="json", exclude_unset=True),
        perdure_version=_version(),
        workflow_run_id=parts.workflow_run_id,
    )


TOKENS_SCHEMA = pa.schema(
    [
        ("run_id", pa.string()),
        ("group_id", pa.string()),
        ("rollout_id", pa.string()),
        ("instance_id", pa.string()),
        ("sample_index", pa.int32()),
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
    ]
)
"""`reward` is the segment's share, `rollout_reward` the whole; null for a rollout without one."""


def tokens_parquet(episode: Episode, segments: Sequence[Segment]) -> bytes:
    """One row a segment; one row without tokens when there is none, so no rollout is absent."""
    rows = [_token_row(episode, segment, len(segments)) for segment in segments]
    table = pa.Table.from_pylist(rows or [_token_row(episode, None, 0)], schema=TOKENS_SCHEMA)
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue()


async def read(store: Store, request: RolloutRequest) -> Episode | None:
    """The episode of a finished rollout, or None."""
    try:
        stored = await store.get(keys.episode(request))
    except NotFound:
        return None
    return Episode.model_validate_json(stored.data)


async def read_run(store: Store, run_id: str) -> list[Episode]:
    """Every episode of a run, by instance and sample."""
    found = []
    async for key in store.list(f"runs/{run_id}/rollouts/"):
        if key.endswith("/episode.json"):
            found.append(Episode.model_validate_json((await store.get(key)).data))
    return sorted(found, key=lambda e: (e.instance_id, e.sample_index))


def manifest(run_id: str, episodes: Sequence[Episode]) -> dict[str, Any]:
    """Totals of a run and one line an episode. pass@k is the unbiased estimator (Chen et al. 2021).

    Rollouts without a reward are counted apart, and in no average.
    """
    graded = [e for e in episodes if e.reward is not None]
    by_instance: dict[str, list[bool]] = {}
    for episode in graded:
        solved = episode.outcome is Outcome.RESOLVED
        by_instance.setdefault(episode.instance_id, []).append(solved)
    most = max((len(v) for v in by_instance.values()), default=0)
    return {
        "run_id": run_id,
        "rollouts": len(episodes),
        "graded": len(graded),
        "resolved": sum(e.outcome is Outcome.RESOLVED for e in graded),
        "mean_reward": (
            round(sum(e.reward or 0.0 for e in graded) / len(graded), 6) if graded else None
        ),
        "pass_at_k": {str(k): _pass_at(by_instance, k) for k in range(1, most + 1)},
        "by_status": count(e.status.value for e in episodes),
        "by_outcome": count(e.outcome.value for e in graded if e.outcome is not None),
        "failures_by_boundary": count(e.failure.boundary.value for e in episodes if e.failure),
        "attempts": sum(len(e.attempts) for e in episodes),
        "tokens_sampled": sum(e.tokens.sampled for e in episodes),
        "tokens_trained": sum(e.tokens.trained for e in episodes),
        "environment_seconds": round(sum(_environment_seconds(e) for e in episodes), 3),
        "engine_seconds": round(sum(e.tokens.engine_seconds for e in episodes), 3),
        "episodes": [_line(e) for e in episodes],
    }


def count(values: Iterable[str]) -> dict[str, int]:
    """How often each value occurs, in order of name."""
    return dict(sorted(Counter(values).items()))


def _environment_seconds(episode: Episode) -> float:
    """Seconds the sandbox worked: the ratio to engine seconds sets the agents per engine (S1-38)."""
    return max(0.0, episode.stage_seconds.get("agent", 0.0) - episode.tokens.engine_seconds)


def _pass_at(by_instance: dict[str, list[bool]], k: int) -> float | None:
    rates = []
    for solved in by_instance.values():
        n, c = len(solved), sum(solved)
        if n >= k:
            rates.append(1.0 - comb(n - c, k) / comb(n, k))
    return round(sum(rates) / len(rates), 6) if rates else None


def _line(episode: Episode) -> dict[str, Any]:
    return {
        "instance_id": episode.instance_id,
        "sample_index": episode.sample_index,
        "agent": episode.agent,
        "status": episode.status.value,
        "outcome": episode.outcome.value if episode.outcome else None,
        "reward": episode.reward,
        "attempts": len(episode.attempts),
        "seconds": episode.seconds,
        "tokens": episode.tokens.sampled,
        "failure": episode.failure.model_dump(mode="json") if episode.failure else None,
    }


def _tokens(parts: EpisodeParts, trained: int) -> Tokens:
    misses = Counter(t.bridge_miss for t in parts.turns if t.bridge_miss is not None)
    return Tokens(
        sampled=sum(len(t.completion_ids) for t in parts.turns),
        trained=trained,
        context=sum(len(s.loss_mask) - sum(s.loss_mask) for s in parts.segments),
        turns=len(parts.turns),
        bridge_misses=dict(sorted(misses.items())),
        engine_seconds=round(sum(t.engine_seconds for t in parts.turns), 3),
    )


def _summary(segment: Segment) -> SegmentSummary:
    return SegmentSummary(
        kind=segment.kind.value,
        prompt_tokens=len(segment.prompt_ids),
        response_tokens=len(segment.response_ids),
        trained_tokens=sum(segment.loss_mask),
        turns=segment.turns,
    )


def _token_row(episode: Episode, segment: Segment | None, total: int) -> dict[str, Any]:
    share = None
    if episode.reward is not None:
        share = episode.reward * (segment.reward_share if segment else 1.0)
    return {
        "run_id": episode.run_id,
        "group_id": episode.group_id,
        "rollout_id": episode.rollout_id,
        "instance_id": episode.instance_id,
        "sample_index": episode.sample_index,
        "segment_kind": segment.kind.value if segment else None,
        "segment_index": segment.index if segment else 0,
        "num_segments": total,
        "prompt_ids": segment.prompt_ids if segment else (),
        "response_ids": segment.response_ids if segment else (),
        "loss_mask": segment.loss_mask if segment else (),
        "logprobs": segment.logprobs if segment else (),
        "versions": segment.versions if segment else (),
        "reward": share,
        "rollout_reward": episode.reward,
        "status": episode.status.value,
        "outcome": episode.outcome.value if episode.outcome else None,
        "finish_reason": segment.finish_reason.value if segment else None,
        "trainable": episode.trainable,
    }


def _digest(instance: Instance | None) -> str:
    if instance is None:
        return ""
    return hashlib.sha256(instance.model_dump_json().encode()).hexdigest()


@lru_cache(maxsize=1)
def _version() -> str:
    try:
        return version("perdure")
    except PackageNotFoundError:
        return "unknown"

"""An episode: the facts of one finished rollout, and how they are combined.

`build_episode` copies and sums; it judges nothing. A rollout without a grade has reward null, never 0.
This imports no pyarrow, so `perdure show` starts fast. `episode_store` writes and reads episodes.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pydantic import Field, JsonValue

from perdure.agents.locked_version import locked_version
from perdure.episodes.segment_experts import have_experts
from perdure.episodes.segment_kept_tokens import KeptSets
from perdure.episodes.token_accounting import TrajectoryCounts, count, count_trajectory
from perdure.episodes.trajectory_segments import NO_VERSION, RewardShare, share
from perdure.installation import version
from perdure.storage import store_keys, stored_json
from perdure.types import (
    DEFAULT_MODEL,
    Adopted,
    AgentEnd,
    EpisodeRef,
    ExpertRows,
    Failure,
    Frozen,
    Grade,
    Instance,
    Outcome,
    PatchRef,
    Rewards,
    RolloutRequest,
    RolloutStatus,
    Sampling,
    Segment,
    SegmentKind,
    TokenCounts,
    Turn,
)


class ModelUsage(Frozen):
    """Calls and tokens of one model. If the engine names no model, `model` is the requested one."""

    model: str
    asked_model: str = ""
    turns: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    sampled_tokens: int = 0

    @property
    def tokens(self) -> TokenCounts:
        counts = ("prompt_tokens", "cached_tokens", "sampled_tokens")
        return TokenCounts(**{name: getattr(self, name) for name in counts})


def usage_of(turn: Turn) -> ModelUsage:
    return ModelUsage(
        model=turn.model or turn.asked_model,
        asked_model=turn.asked_model,
        turns=1,
        prompt_tokens=turn.prompt_tokens,
        cached_tokens=turn.usage.cached_tokens if turn.usage else 0,
        sampled_tokens=turn.sampled_tokens,
    )


def usage_by_model(calls: Iterable[ModelUsage]) -> tuple[ModelUsage, ...]:
    """Usage per model that answered, the most used model first."""
    found: dict[tuple[str, str], list[ModelUsage]] = {}
    for call in calls:
        found.setdefault((call.model, call.asked_model), []).append(call)
    counted = ("turns", "prompt_tokens", "cached_tokens", "sampled_tokens")
    made = [
        ModelUsage(
            model=model,
            asked_model=asked,
            **{name: sum(getattr(call, name) for call in mine) for name in counted},
        )
        for (model, asked), mine in found.items()
    ]
    return tuple(sorted(made, key=lambda one: -one.turns))


class AttemptSummary(Frozen):
    """One attempt of the rollout, in one sandbox, and the store keys of its evidence."""

    attempt: int
    provider: str = ""
    host: str = ""
    agent_end: AgentEnd | None = None
    agent_detail: str = ""
    turns: int = 0
    tokens: int = 0
    """Sampled tokens."""
    model: str = ""
    """If the patch was given: the model that is said to have written it."""
    bought: tuple[ModelUsage, ...] = ()
    """If the attempt was discarded: its sampled calls that no later attempt replayed."""
    turns_sha256: str = ""
    """Digest of its `turns.parquet`, as the gateway wrote it."""
    watched_again: bool = False
    """Whether another worker, or another try, took over the watch of its running agent."""
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
    """Oldest version of the trained tokens; -1 if it is unknown for some of them."""
    policy_version_max: int | None = None
    temperature: float | None = None
    """Temperature of its trained tokens; None if it is unknown or not the same for all."""
    routed_experts: bool = False
    """Whether the turns file has the experts of all its tokens."""


class EarlierVerdict(Frozen):
    """How the rollout ended before a retry or a regrade."""

    status: RolloutStatus
    outcome: Outcome | None = None
    attempt: int
    """The attempt that counted then."""
    finished_at: float
    key: str
    """The store key of that whole episode."""


UNNAMED = "unnamed"
"""Shown for a model to which its engine gives no name."""


def models_of(turns: int, answered: Iterable[str], given: str) -> tuple[str, ...]:
    """The models to display. `given`: the model that is said to have written a given patch."""
    names = [*answered] if turns else [given] if given else []
    named = dict.fromkeys(name for name in names if name not in ("", DEFAULT_MODEL))
    return tuple(named) or ((UNNAMED,) if turns else ())


class Provenance(Frozen):
    """The inputs that would reproduce this episode."""

    perdure_version: str
    agent: str
    agent_version: str = ""
    """Version of the agent program that Perdure installs; empty if it installs none."""
    agent_options: dict[str, JsonValue] = Field(default_factory=dict)
    sandbox: str
    model: str
    """The model that the request names; `Episode.usage` has the models that answered."""
    sampling: Sampling
    engines: tuple[str, ...] = ()
    instance_sha256: str = ""
    base_commit: str | None = None
    data_source: str = ""
    workflow_run_id: str = ""
    request: dict[str, JsonValue] = Field(default_factory=dict)
    """The request as the user wrote it, without defaults."""


class Episode(Frozen):
    """One finished rollout in readable form: `episode.json`. Its token arrays are in `episode.parquet`.

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
    """The workflow id. All segments share it, so a trainer can count the rollout once."""
    status: RolloutStatus
    outcome: Outcome | None = None
    reward: float | None = None
    rewards: Rewards | None = None
    named_rewards: dict[str, float] = Field(default_factory=dict)
    agent_end: AgentEnd | None = None
    failure: Failure | None = None
    stopped_in: str = ""
    """For a truncated rollout: the stage in which it was stopped."""
    trainable: bool = False
    """The rollout is graded and not too stale, and every turn except side and stray ones has exact
    token ids."""
    too_stale: str = ""
    """Why none of its tokens is trained: which versions sampled it (`too_stale: finish`). Its reward
    counts in its group's baseline. Empty if it is young enough."""
    turns: int = 0
    segments: tuple[SegmentSummary, ...] = ()
    prompt_tokens: int = 0
    """Prompt tokens that engines read, summed over turns. A hosted API gives its own count."""
    cached_tokens: int = 0
    """Prompt tokens that a hosted API read from its cache."""
    sampled_tokens: int = 0
    usage: tuple[ModelUsage, ...] = ()
    """Usage per model that answered."""
    user_usage: tuple[ModelUsage, ...] = ()
    """Usage of the model that played the user, in all attempts. Only `other_tokens` also counts it."""
    judge_usage: tuple[ModelUsage, ...] = ()
    """Usage of the judge, in all gradings. Only `other_tokens` also counts it."""
    turn_tokens: tuple[tuple[int, int], ...] = ()
    """Prompt and sampled tokens of each turn."""
    trained_tokens: int = 0
    """Tokens with mask 1; `trajectory` counts the others by reason."""
    policy_version_min: int | None = None
    policy_version_max: int | None = None
    bridge_misses: dict[str, int] = Field(default_factory=dict)
    """Turns after the first whose prompt does not extend an earlier turn, by reason."""
    trajectory: TrajectoryCounts = TrajectoryCounts()
    """How every sampled token was used, and how many tokens the segments have."""
    started_at: float
    finished_at: float
    seconds: float
    """Wall-clock seconds from start to end, including waiting."""
    regraded_at: float | None = None
    """Unix time of a regrade of the same patch; the other times are those of the first grading."""
    earlier: tuple[EarlierVerdict, ...] = ()
    """Earlier verdicts, the oldest first."""
    stage_seconds: dict[str, float] = Field(default_factory=dict)
    engine_seconds: float = 0.0
    waiting_seconds: float = 0.0
    """Seconds in which its calls waited for an engine."""
    preemptions: int | None = None
    """How often its model calls were preempted; None if no engine told."""
    evictions: int = 0
    attempts: tuple[AttemptSummary, ...] = ()
    grade: Grade | None = None
    """For a truncated rollout, the grade is only for information: it gives no outcome and no
    reward."""
    patch: PatchRef | None = None
    adopted: Adopted | None = None
    """What it keeps of another program's work. That program's verdict is never its outcome."""
    turns_key: str | None = None
    damaged: tuple[str, ...] = ()
    """Stored files that were unreadable when this episode was made; it lacks their content."""
    turns_sha256: str = ""
    """Digest of the turns file; like `tokens_sha256`, readers compare it with the file."""
    tokens_key: str
    tokens_sha256: str = ""
    provenance: Provenance

    @property
    def instance_id(self) -> str:
        return self.instance.split("/", 1)[1]

    @property
    def agent(self) -> str:
        return self.provenance.agent

    @property
    def models(self) -> tuple[str, ...]:
        """The models that answered, or that are said to have written a given patch."""
        given = self.attempts[-1].model if self.attempts else ""
        given = self.adopted.model if self.adopted else given
        return models_of(self.turns, [one.model for one in self.usage], given)

    @property
    def other_tokens(self) -> dict[str, TokenCounts]:
        """Tokens of its judge and its user, by the model that was asked."""
        calls = [
            one.model_copy(update={"model": one.asked_model or one.model, "asked_model": ""})
            for one in (*self.judge_usage, *self.user_usage)
        ]
        return {one.model: one.tokens for one in usage_by_model(calls)}

    @property
    def round(self) -> int:
        """The `round` of its request."""
        round = self.provenance.request.get("round", 0)
        return round if isinstance(round, int) else 0

    def as_earlier(self) -> EarlierVerdict:
        """Its verdict, as the episode that replaces it keeps it."""
        return EarlierVerdict(
            status=self.status,
            outcome=self.outcome,
            attempt=len(self.attempts),
            finished_at=self.regraded_at or self.finished_at,
            key=store_keys.earlier_episode(self.key, self.provenance.workflow_run_id),
        )

    @property
    def ending(self) -> str:
        """Its outcome; its status if it has none."""
        return self.outcome.value if self.outcome else self.status.value

    @property
    def is_final(self) -> bool:
        """Whether it stays as it is when its run continues."""
        return self.has_final_patch or self.status is RolloutStatus.ADOPTED

    @property
    def has_final_patch(self) -> bool:
        """Whether its agent ended by itself, so that its patch may have a verdict."""
        return self.status in (RolloutStatus.GRADED, RolloutStatus.UNGRADED)

    @property
    def official(self) -> Outcome | None:
        """The verdict of the row's own protocol, if twins changed it; otherwise None."""
        official = self.grade.official if self.grade and self.outcome else None
        return None if official is self.outcome else official

    @property
    def verification(self) -> str | None:
        """The state of its verification; None if there was nothing to verify."""
        checked = self.grade.verification if self.grade else None
        return checked.state if checked else None

    @property
    def signals(self) -> tuple[str, ...]:
        return self.grade.signals if self.grade else ()

    @property
    def has_verdict(self) -> bool:
        """Whether it was graded, even if its reward is withheld."""
        return self.status is RolloutStatus.GRADED

    @property
    def withheld(self) -> str:
        """Why its request withholds the reward; empty if it does not."""
        return self.grade.withheld if self.grade else ""

    @property
    def why_no_reward(self) -> str:
        """Empty if it has one."""
        if self.reward is not None:
            return ""
        if self.adopted is not None and self.status is RolloutStatus.ADOPTED:
            return f"not graded here: {self.adopted.origin} gave {self.adopted.reward:g}"
        if self.withheld:
            return f"its reward is withheld: {self.withheld}"
        return f"not graded ({self.status.value}): its reward is unknown, not 0"

    def audit(self) -> dict[str, str]:
        """What exports say about how far to trust the reward. Each is text, also if it is empty, so
        that all rows of a dataset have the same types."""
        return {
            "verification": self.verification or "",
            "signals": "; ".join(self.signals),
            "withheld": self.withheld,
            "named_rewards": json.dumps(self.named_rewards) if self.named_rewards else "",
        }

    @property
    def environment_seconds(self) -> float:
        """Seconds of the agent stage outside model calls. Their ratio to `engine_seconds` shows how
        many agents keep an engine busy."""
        modelled = self.engine_seconds + self.waiting_seconds
        return max(0.0, self.stage_seconds.get("agent", 0.0) - modelled)

    @property
    def key(self) -> str:
        """Its key in the store."""
        return (
            f"{store_keys.rollout(self.run_id, self.instance_id, self.sample_index)}/episode.json"
        )

    def ref(self, store_url: str) -> EpisodeRef:
        """The reference and the few facts that pass through workflows."""
        return EpisodeRef(
            uri=f"{store_url}/{self.key}",
            instance_id=self.instance_id,
            sample_index=self.sample_index,
            agent=self.agent,
            status=self.status,
            outcome=self.outcome,
            official=self.official,
            reward=self.reward,
            withheld=self.withheld,
            attempts=len(self.attempts),
            seconds=round(self.seconds, 3),
            grade_s=self.stage_seconds.get("grade", 0.0),
            agent_end=self.agent_end,
            turns=self.turns,
            model=", ".join(self.models),
            tokens=self.sampled_tokens,
            trained_tokens=self.trained_tokens if self.trainable else 0,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            other_tokens=self.other_tokens,
            trainable=self.trainable,
            failure=self.failure,
            policy_version_min=self.policy_version_min,
            policy_version_max=self.policy_version_max,
        )


@dataclass(frozen=True)
class EpisodeParts:
    """Everything from which an episode is made.

    `turns` and `patch` are those of the last attempt, the one that counts. `grade` is set if the
    status is GRADED. A TRUNCATED rollout may have one for information.
    """

    request: RolloutRequest
    status: RolloutStatus
    started_at: float
    finished_at: float
    attempts: Sequence[AttemptSummary] = ()
    instance: Instance | None = None
    """None if it could not be read."""
    turns: Sequence[Turn] = ()
    turns_key: str | None = None
    agent_end: AgentEnd | None = None
    patch: PatchRef | None = None
    grade: Grade | None = None
    adopted: Adopted | None = None
    user_usage: tuple[ModelUsage, ...] = ()
    judge_usage: tuple[ModelUsage, ...] = ()
    failure: Failure | None = None
    stopped_in: str = ""
    stage_seconds: dict[str, float] = field(default_factory=dict)
    evictions: int = 0
    workflow_run_id: str = ""
    damaged: Sequence[str] = ()
    """Stored files that were unreadable."""
    earlier: Episode | None = None
    """The episode that this one replaces."""


def build_episode_from_earlier(parts: EpisodeParts, earlier: Episode) -> Episode:
    """The episode of an attempt whose turns are lost, with the counts that `earlier` has."""
    episode = build_episode(parts, ())
    known = {name: getattr(earlier, name) for name in _counts((), ())}
    bought = {one.attempt: one.bought for one in earlier.attempts}
    attempts = tuple(
        one.model_copy(update={"bought": bought.get(one.attempt, ())}) for one in episode.attempts
    )
    engines = {"engines": earlier.provenance.engines}
    provenance = episode.provenance.model_copy(update=engines)
    trainable = earlier.trainable and episode.status is RolloutStatus.GRADED
    fields = {
        "attempts": attempts,
        "provenance": provenance,
        "trainable": trainable,
        "too_stale": earlier.too_stale,
    }
    return episode.model_copy(update=known | fields)


def build_episode(parts: EpisodeParts, segments: Sequence[Segment]) -> Episode:
    """The readable episode. `segments` must be cut from `parts.turns`.

    Raises: ValueError when grade and status contradict each other.
    """
    request = parts.request
    too_stale = why_too_stale(request, segments)
    segments = trained(segments, too_stale)
    return Episode(
        run_id=request.run_id,
        group_id=request.group_id or f"{request.run_id}/{request.instance_id}",
        instance=request.instance,
        sample_index=request.sample_index,
        rollout_id=request.workflow_id,
        **{name: getattr(parts, name) for name in COPIED},
        too_stale=too_stale,
        **_verdict(parts, [] if too_stale else segments),
        **_counts(parts.turns, segments),
        **_times(parts),
        earlier=(*parts.earlier.earlier, parts.earlier.as_earlier()) if parts.earlier else (),
        attempts=tuple(parts.attempts),
        damaged=tuple(parts.damaged),
        tokens_key=store_keys.episode_tokens(request),
        provenance=_provenance(parts),
    )


def trained(segments: Sequence[Segment], too_stale: str) -> Sequence[Segment]:
    """The segments as a trainer gets them: masked if their rollout is too stale."""
    return [segment.masked() for segment in segments] if too_stale else segments


def why_too_stale(request: RolloutRequest, segments: Sequence[Segment]) -> str:
    """Why a rollout with `too_stale: finish` is not trained; empty if it may be."""
    if request.too_stale != "finish" or request.max_staleness is None:
        return ""
    versions = {
        version
        for segment in segments
        for version, mask in zip(segment.versions, segment.loss_mask, strict=True)
        if mask
    }
    if not versions:
        return ""
    oldest, newest = min(versions), max(versions)
    if oldest == NO_VERSION:
        return "an engine did not report the policy version of some of its tokens"
    begun = oldest if request.policy_version is None else request.policy_version
    if newest <= begun + request.max_staleness:
        return ""
    sampled = f"version {newest}" if oldest == newest else f"versions {oldest} to {newest}"
    return (
        f"sampled by policy {sampled}; with max_staleness {request.max_staleness}, the newest may be "
        f"{begun + request.max_staleness}"
    )


COPIED = (
    "status",
    "agent_end",
    "failure",
    "stopped_in",
    "stage_seconds",
    "evictions",
    "grade",
    "patch",
    "adopted",
    "user_usage",
    "judge_usage",
    "turns_key",
)
"""Fields that `EpisodeParts` and `Episode` share."""


def _times(parts: EpisodeParts) -> dict[str, Any]:
    """The times of the rollout. A regrade of the same patch keeps the earlier ones."""
    before = parts.earlier
    if before is not None and _is_same_patch(before.patch, parts.patch):
        times = {name: getattr(before, name) for name in ("started_at", "finished_at", "seconds")}
        return {**times, "regraded_at": parts.finished_at}
    return {
        "started_at": parts.started_at,
        "finished_at": parts.finished_at,
        "seconds": round(parts.finished_at - parts.started_at, 3),
    }


def _is_same_patch(one: PatchRef | None, other: PatchRef | None) -> bool:
    """Whether both are the same capture, of the same attempt."""
    return one is not None and other is not None and one.key == other.key


def same_attempt(one: Episode, parts: EpisodeParts) -> bool:
    """Whether both have the same captured patch, and so the same turns."""
    return _is_same_patch(one.patch, parts.patch)


def _verdict(parts: EpisodeParts, segments: Sequence[Segment]) -> dict[str, Any]:
    grade = parts.grade
    if parts.status is RolloutStatus.TRUNCATED:
        return {}
    if (grade is not None) != (parts.status is RolloutStatus.GRADED):
        raise ValueError(f"status {parts.status} contradicts grade {grade and grade.outcome}")
    if grade is None:
        return {}
    steps = [turn for turn in parts.turns if turn.purpose.is_of_trajectory]
    return {
        "outcome": grade.outcome,
        "reward": grade.reward,
        "rewards": None if grade.withheld else grade.rewards,
        "named_rewards": {} if grade.withheld else grade.named_rewards,
        "trainable": bool(segments) and all(turn.trainable for turn in steps),
    }


def _counts(turns: Sequence[Turn], segments: Sequence[Segment]) -> dict[str, Any]:
    steps = (turn for turn in turns if turn.purpose.is_of_trajectory)
    versions = [span.version for turn in steps for span in turn.versions]
    preemptions = [turn.preemptions for turn in turns if turn.preemptions is not None]
    return {
        "turns": len(turns),
        "segments": tuple(map(_summary, segments, have_experts(turns, segments))),
        "prompt_tokens": sum(turn.prompt_tokens for turn in turns),
        "cached_tokens": sum(turn.usage.cached_tokens for turn in turns if turn.usage),
        "sampled_tokens": sum(turn.sampled_tokens for turn in turns),
        "usage": usage_by_model(map(usage_of, turns)),
        "turn_tokens": tuple((turn.prompt_tokens, turn.sampled_tokens) for turn in turns),
        "trained_tokens": sum(sum(segment.loss_mask) for segment in segments),
        "policy_version_min": min(versions, default=None),
        "policy_version_max": max(versions, default=None),
        "bridge_misses": count(turn.bridge_miss for turn in turns[1:] if turn.bridge_miss),
        "trajectory": count_trajectory(turns, segments),
        "engine_seconds": round(math.fsum(turn.engine_seconds for turn in turns), 3),
        "waiting_seconds": round(math.fsum(turn.waiting_seconds for turn in turns), 3),
        "preemptions": sum(preemptions) if preemptions else None,
    }


def _provenance(parts: EpisodeParts) -> Provenance:
    request, instance = parts.request, parts.instance
    digest = hashlib.sha256(instance.model_dump_json().encode()).hexdigest() if instance else ""
    return Provenance(
        perdure_version=version(),
        agent=_agent(parts),
        agent_version="" if parts.adopted else locked_version(request.agent),
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


def _agent(parts: EpisodeParts) -> str:
    """The agent that wrote the patch."""
    if parts.adopted is None:
        return parts.request.agent
    return parts.adopted.agent or parts.adopted.origin


def _summary(segment: Segment, routed_experts: bool) -> SegmentSummary:
    return SegmentSummary(
        kind=segment.kind,
        prompt_tokens=len(segment.prompt_ids),
        response_tokens=len(segment.response_ids),
        trained_tokens=sum(segment.loss_mask),
        turns=segment.turns,
        policy_version_min=segment.policy_version_min,
        policy_version_max=segment.policy_version_max,
        temperature=segment.temperature,
        routed_experts=routed_experts,
    )


def parse_episode(key: str, data: bytes) -> Episode:
    """Raises: ValueError, in one line, when `data` is not an episode of this version."""
    return stored_json.decode(key, data, Episode)


@dataclass(frozen=True)
class EpisodeSegments:
    """One rollout for a trainer: its episode and its segments, in order."""

    episode: Episode
    segments: tuple[Segment, ...]
    experts: tuple[ExpertRows | None, ...] = field(default=(), compare=False)
    """The result of `segment_experts`, by segment index; empty if the experts were not read."""
    kept: tuple[KeptSets | None, ...] = field(default=(), compare=False)
    """The result of `segment_kept_tokens`, by segment index; empty if it was not read."""

    def experts_of(self, segment: Segment) -> ExpertRows | None:
        """Shape [P + R - 1, layers, top_k]."""
        return self.experts[segment.index] if self.experts else None

    def kept_of(self, segment: Segment) -> KeptSets | None:
        """What top-p and top-k left for each token of the response."""
        return self.kept[segment.index] if self.kept else None

    def with_kept(self) -> "EpisodeSegments":
        """A copy with only the segments whose kept sets are known."""
        known = tuple(one for one in self.segments if self.kept_of(one) is not None)
        return replace(self, segments=known)

    def with_experts(self) -> "EpisodeSegments":
        """A copy with only the segments whose experts are known, for a trainer that replays
        them."""
        known = tuple(one for one in self.segments if self.experts_of(one) is not None)
        return replace(self, segments=known)

    def reward_of(self, segment: Segment) -> float | None:
        """The segment's share of the reward; None, never 0, if the rollout was not graded."""
        reward = self.episode.reward
        return None if reward is None else reward * segment.reward_share

    def shared(self, reward_share: RewardShare) -> "EpisodeSegments":
        """A copy that divides the reward among the segments by `reward_share`."""
        count = len(self.segments)
        segments = tuple(
            segment.model_copy(update={"reward_share": share(reward_share, segment.index, count)})
            for segment in self.segments
        )
        return replace(self, segments=segments)

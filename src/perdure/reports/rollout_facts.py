"""Reads from `episode.json` the facts of one rollout that a report needs.

It keeps only the fields below, so that a run of many thousand rollouts fits in memory.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from pydantic import Field

from perdure.episodes.episode import ModelUsage, models_of
from perdure.episodes.episode_store import episode_keys
from perdure.storage import stored_json
from perdure.storage.base import Store
from perdure.types import DEFAULT_MODEL, Adopted, Failure, Frozen, RolloutStatus

AT_ONCE = 32
"""Episodes to read at a time."""
LOST_GRADING = "-lost-"
"""Part of the name of the file that records a lost grading sandbox."""


RESOLVED = "resolved"
INTERRUPTED = (RolloutStatus.CANCELLED, RolloutStatus.EXPIRED, RolloutStatus.TRUNCATED)


class _Attempt(Frozen):
    provider: str = ""
    model: str = ""
    bought: tuple[ModelUsage, ...] = ()
    agent_end: str | None = None
    evidence: tuple[str, ...] = ()


class _Verification(Frozen):
    state: str
    reason: str = ""


class _ModelScore(Frozen):
    model: str
    calls: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    sampled_tokens: int = 0


class _Grade(Frozen):
    official: str | None = None
    verification: _Verification | None = None
    calibration: str | None = None
    patch_sha256: str = ""
    signals: tuple[str, ...] = ()
    withheld: str = ""
    model_score: _ModelScore | None = None


class _Provenance(Frozen):
    perdure_version: str = ""
    agent: str
    agent_version: str = ""
    model: str


class _Earlier(Frozen):
    status: RolloutStatus
    outcome: str | None = None
    attempt: int = 0


class _Episode(Frozen):
    """The part of an episode that a report reads."""

    instance: str
    sample_index: int
    status: RolloutStatus
    outcome: str | None = None
    reward: float | None = None
    named_rewards: dict[str, float] = Field(default_factory=dict)
    agent_end: str | None = None
    failure: Failure | None = None
    turns: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    sampled_tokens: int = 0
    usage: tuple[ModelUsage, ...] = ()
    user_usage: tuple[ModelUsage, ...] = ()
    judge_usage: tuple[ModelUsage, ...] = ()
    turn_tokens: tuple[tuple[int, int], ...] = ()
    policy_version_min: int | None = None
    policy_version_max: int | None = None
    started_at: float
    finished_at: float
    seconds: float
    stage_seconds: dict[str, float] = Field(default_factory=dict)
    engine_seconds: float = 0.0
    waiting_seconds: float = 0.0
    attempts: tuple[_Attempt, ...] = ()
    earlier: tuple[_Earlier, ...] = ()
    grade: _Grade | None = None
    adopted: Adopted | None = None
    provenance: _Provenance


@dataclass(frozen=True, slots=True)
class RolloutFacts:
    """One finished rollout. Times are Unix seconds, durations seconds, tokens counts."""

    instance_id: str
    instance: str
    """Its reference, `<dataset>/<instance_id>`."""
    sample_index: int
    agent: str
    agent_version: str
    """Empty if Perdure does not install the agent's program."""
    perdure_version: str
    models: tuple[str, ...]
    """Models that answered; empty if none was called."""
    asked_models: tuple[str, ...]
    """Requested model names under which no model answered."""
    usage: tuple[ModelUsage, ...]
    """Tokens of the attempt that counts, by the model that answered."""
    discarded: tuple[ModelUsage, ...]
    """Tokens of discarded attempts."""
    earlier_outcomes: tuple[str, ...]
    """Outcomes of the same sample before retries, the oldest first."""
    status: RolloutStatus
    outcome: str | None
    reward: float | None
    agent_end: str | None
    failure: Failure | None
    turns: int
    prompt_tokens: int
    cached_tokens: int
    sampled_tokens: int
    turn_tokens: tuple[tuple[int, int], ...]
    version_min: int | None
    version_max: int | None
    started_at: float
    finished_at: float
    seconds: float
    stage_seconds: dict[str, float]
    engine_seconds: float
    waiting_seconds: float
    attempts: int
    sandboxes: int
    """Sandboxes booted for the agent and for gradings."""
    sandboxes_lost: int
    flaky: bool
    """Gradings of the same patch had different outcomes."""
    calibration: str | None
    patch_sha256: str
    official: str | None
    """The outcome by the row's own protocol."""
    unverified: str | None
    """Why no strong twin checked this success; None if one did, or if it is not resolved."""
    exposed: bool
    """A twin passed, so the results were forged."""
    signals: tuple[str, ...]
    withheld: str
    """Why its reward is withheld; empty if it is not."""
    adopted: Adopted | None = None
    """What it keeps of another program's work."""
    named_rewards: dict[str, float] = field(default_factory=dict)
    judged: tuple[ModelUsage, ...] = ()
    """Tokens of its judge; empty if it had none."""
    user_usage: tuple[ModelUsage, ...] = ()
    """Tokens of the model that played its user; empty if none did."""

    @property
    def all_usage(self) -> tuple[ModelUsage, ...]:
        """Tokens of all model calls, those of discarded attempts, the judge and the user included."""
        return (*self.usage, *self.discarded, *self.judged, *self.user_usage)

    @property
    def spent_tokens(self) -> int:
        """Prompt and sampled tokens that a run's budget counts."""
        others = sum(one.tokens.total for one in (*self.judged, *self.user_usage))
        return self.prompt_tokens + self.sampled_tokens + others

    @property
    def name(self) -> str:
        return f"{self.instance_id}/{self.sample_index}"

    @property
    def graded(self) -> bool:
        return self.status is RolloutStatus.GRADED

    @property
    def has_foreign_verdict(self) -> bool:
        return self.status is RolloutStatus.ADOPTED

    @property
    def truncated(self) -> bool:
        return self.status is RolloutStatus.TRUNCATED

    @property
    def resolved(self) -> bool:
        return self.outcome == RESOLVED

    @property
    def ending(self) -> str:
        """Its outcome; its status if it has none."""
        return self.outcome or self.status.value

    @property
    def environment_seconds(self) -> float:
        """Seconds of the agent stage outside model calls."""
        modelled = self.engine_seconds + self.waiting_seconds
        return max(0.0, self.stage_seconds.get("agent", 0.0) - modelled)


@dataclass(frozen=True)
class RunFacts:
    """The rollouts of a run, by instance and sample, and the keys of unreadable episodes."""

    run_id: str
    rollouts: tuple[RolloutFacts, ...]
    unreadable: tuple[str, ...] = ()


async def read_facts(store: Store, run_id: str) -> RunFacts:
    """All finished rollouts of a run; empty if it has none."""
    found: list[RolloutFacts] = []
    unreadable: list[str] = []
    async for key, data in _episodes(store, run_id):
        try:
            found.append(parse_facts(data))
        except ValueError:
            unreadable.append(key)
    found.sort(key=lambda one: (one.instance_id, one.sample_index))
    return RunFacts(run_id, tuple(found), tuple(sorted(unreadable)))


def parse_facts(data: bytes) -> RolloutFacts:
    """Raises: ValueError."""
    stored_json.check("episode.json", data)
    episode = _Episode.model_validate_json(data)
    grade = episode.grade or _Grade()
    booted, lost = _sandboxes(episode)
    models = models_of(episode.turns, [one.model for one in episode.usage], _given(episode))
    return RolloutFacts(
        instance_id=episode.instance.split("/", 1)[1],
        instance=episode.instance,
        sample_index=episode.sample_index,
        agent=episode.provenance.agent,
        agent_version=episode.provenance.agent_version,
        perdure_version=episode.provenance.perdure_version,
        models=models,
        asked_models=_asked(episode, models),
        usage=episode.usage,
        discarded=tuple(one for attempt in episode.attempts for one in attempt.bought),
        earlier_outcomes=_replayed(episode),
        status=episode.status,
        outcome=episode.outcome,
        reward=episode.reward,
        named_rewards=episode.named_rewards,
        agent_end=episode.agent_end,
        failure=episode.failure,
        turns=episode.turns,
        prompt_tokens=episode.prompt_tokens,
        cached_tokens=episode.cached_tokens,
        sampled_tokens=episode.sampled_tokens,
        turn_tokens=episode.turn_tokens,
        version_min=episode.policy_version_min,
        version_max=episode.policy_version_max,
        started_at=episode.started_at,
        finished_at=episode.finished_at,
        seconds=episode.seconds,
        stage_seconds=episode.stage_seconds,
        engine_seconds=episode.engine_seconds,
        waiting_seconds=episode.waiting_seconds,
        attempts=len(episode.attempts),
        sandboxes=booted,
        sandboxes_lost=lost,
        flaky=_is_flaky(episode),
        calibration=grade.calibration,
        patch_sha256=grade.patch_sha256,
        official=grade.official or episode.outcome,
        unverified=_unverified(episode.outcome, grade.verification),
        exposed=grade.verification is not None and grade.verification.state == "exposed",
        signals=grade.signals,
        withheld=grade.withheld,
        adopted=episode.adopted,
        judged=episode.judge_usage or _judged(grade.model_score),
        user_usage=episode.user_usage,
    )


def _judged(score: _ModelScore | None) -> tuple[ModelUsage, ...]:
    """For an episode of an earlier version, which has no `judge_usage`."""
    if score is None or not score.sampled_tokens:  # a reward model behind HTTP reports no tokens
        return ()
    counts = score.model_dump(include={"prompt_tokens", "cached_tokens", "sampled_tokens"})
    return (ModelUsage(model=score.model, turns=score.calls, **counts),)


def _asked(episode: _Episode, answered: tuple[str, ...]) -> tuple[str, ...]:
    """Model names that the request or a call used, and under which no model answered."""
    if not episode.turns:
        return ()
    names = dict.fromkeys((episode.provenance.model, *(one.asked_model for one in episode.usage)))
    return tuple(one for one in names if one not in ("", DEFAULT_MODEL, *answered))


def _given(episode: _Episode) -> str:
    if episode.adopted is not None:
        return episode.adopted.model
    return episode.attempts[-1].model if episode.attempts else ""


def _replayed(episode: _Episode) -> tuple[str, ...]:
    """Outcomes before retries. A verdict of the same attempt is skipped: it is from a regrade."""
    now = len(episode.attempts)
    return tuple(one.outcome for one in episode.earlier if one.outcome and one.attempt < now)


def _unverified(outcome: str | None, found: _Verification | None) -> str | None:
    if outcome != RESOLVED or found is None or found.state not in ("unverified", "weak"):
        return None
    return found.reason or "no reason is recorded"


def _sandboxes(episode: _Episode) -> tuple[int, int]:
    """The numbers of booted and of lost sandboxes.

    An agent's sandbox was lost if its attempt booted and left no patch, unless it was canceled or
    expired.
    """
    ends = [(len(episode.attempts), episode.status)]
    ends += [(one.attempt, one.status) for one in episode.earlier]
    interrupted = {attempt for attempt, status in ends if status in INTERRUPTED}
    agents = [(n, one) for n, one in enumerate(episode.attempts, 1) if one.provider]
    lost = sum(not _left_patch(one) for n, one in agents if n not in interrupted)
    gradings = sum(LOST_GRADING in key for one in episode.attempts for key in one.evidence)
    graded = episode.status is RolloutStatus.GRADED
    return len(agents) + gradings + graded, lost + gradings


def _left_patch(attempt: _Attempt) -> bool:
    return any(key.endswith("/patch.json") for key in attempt.evidence)


def _is_flaky(episode: _Episode) -> bool:
    now = len(episode.attempts)
    outcomes = {one.outcome for one in episode.earlier if one.attempt == now and one.outcome}
    return bool(outcomes - {episode.outcome}) and episode.outcome is not None


async def _episodes(store: Store, run_id: str) -> AsyncIterator[tuple[str, bytes]]:
    batch: list[str] = []
    async for key in episode_keys(store, run_id):
        batch.append(key)
        if len(batch) == AT_ONCE:
            for found in await _read(store, batch):
                yield found
            batch = []
    for found in await _read(store, batch):
        yield found


async def _read(store: Store, keys: list[str]) -> list[tuple[str, bytes]]:
    stored = await asyncio.gather(*(store.get(key) for key in keys))
    return [(key, one.data) for key, one in zip(keys, stored, strict=True)]

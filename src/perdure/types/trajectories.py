"""What the policy saw and sampled: turns, and the segments that trainers take."""

from enum import StrEnum

from pydantic import model_validator

from perdure.types.base import Frozen


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class VersionSpan(Frozen):
    """Tokens [start, end) of a completion were sampled by policy version `version`."""

    version: int
    start: int
    end: int


class EngineSpan(Frozen):
    """Tokens [start, end) of a completion came from this generation of this engine."""

    engine: str
    generation: int
    start: int
    end: int


class TurnSampling(Frozen):
    """What an engine was told for one turn. A field that was not sent has the value that is off."""

    temperature: float
    top_p: float
    max_tokens: int
    top_k: int = -1
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    logit_bias: str = ""
    """JSON: token id -> bias."""
    structured_outputs: str = ""
    """JSON: the grammar that a tool choice or a response format became. The tokens were sampled under
    it, and their logprobs are of the distribution that it left."""


class SamplingSpan(Frozen):
    """Tokens [start, end) of a segment's response were sampled with `sampling`."""

    start: int
    end: int
    sampling: TurnSampling


class Purpose(StrEnum):
    """Why an agent made a model call."""

    STEP = "step"
    """The agent's next step: trained."""
    COMPACTION = "compaction"
    """The agent summarises its own history and continues from the summary. The turn is trained and
    starts a new branch."""
    SIDE = "side"
    """A request for a title or a topic, or a probe. The outcome does not depend on it, so it is
    recorded and never trained."""


class TurnFacts(Frozen):
    """What is known about one model call besides its tokens and texts.

    The one definition of these fields: `Turn` and the gateway's `TurnRecord` inherit them, and the
    columns of `turns.parquet` are derived from them.
    """

    index: int
    """Position in the session's journal: turns are numbered in the order of their commits."""
    chain: str = "main"
    """`main`, or the agent id of a sub-agent, as its harness names it."""
    parent_chain: str = ""
    """The chain that started this one; empty for main."""
    parent: int | None = None
    """Index of the turn whose prompt + completion this prompt extends, by recorded ids. None: a
    root, rendered in full for the reason in `bridge_miss`."""
    purpose: Purpose = Purpose.STEP
    replayed_from: str = ""
    """`<session id>/<turn index>` of an earlier attempt whose completion answered this request
    without the engine; empty when it was sampled here."""
    versions: tuple[VersionSpan, ...] = ()
    finish_reason: FinishReason = FinishReason.STOP
    engine: str = ""
    """The engine that finished it."""
    engines: tuple[EngineSpan, ...] = ()
    """Which engine sampled which tokens: several if an engine was lost within the turn. Empty: not
    known, or a hosted API."""
    bridged: bool = False
    """The prompt extends the parent's prompt + completion, built from recorded ids."""
    bridge_miss: str | None = None
    """Why a bridge was impossible (`first`, `prefix_changed`, `echo_edited`, ...)."""
    trainable: bool = True
    started_at: float = 0.0
    engine_seconds: float = 0.0
    waiting_seconds: float = 0.0
    """In which it was on no engine: all were taken, or none was there."""
    seconds: float = 0.0
    request_sha256: str = ""
    sampling: TurnSampling | None = None
    """None: a hosted API, or a record of an earlier version."""
    asked_model: str = ""
    """The model that the engine was asked for."""
    model: str = ""
    """The model that answered, as the engine names it. Empty: it named none."""


class Usage(Frozen):
    """What a hosted API counted for one call, in tokens. `cached_tokens` of the prompt were read from its
    cache."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    sampled_tokens: int = 0


class Turn(TurnFacts):
    """One model call, exactly as the engine consumed and produced it.

    Shapes: prompt_ids [P], completion_ids [C], logprobs [C]. A hosted API gives no ids: then all
    three are empty and `trainable` is False.
    """

    new_messages: str = ""
    """The request's messages after those of its parent turn and its answer, as a JSON list in the
    gateway's own form (`perdure.dialects.base.ModelRequest`): for reading, never for training."""
    answer: str = ""
    """The assistant message that the agent was given, as JSON in the same form."""
    unused: bool = False
    """The agent went on without this answer: it asked again, or continued from another one."""
    prompt_ids: tuple[int, ...] = ()
    completion_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    usage: Usage | None = None
    """None: the ids are here, or the hosted API did not count."""
    tools: str = ""
    """The tools that the request offered, as a JSON list in OpenAI's form; empty: those of its parent
    turn, or a record of an earlier version."""

    @property
    def prompt_tokens(self) -> int:
        return self.usage.prompt_tokens if self.usage else len(self.prompt_ids)

    @property
    def sampled_tokens(self) -> int:
        return self.usage.sampled_tokens if self.usage else len(self.completion_ids)

    @model_validator(mode="after")
    def _one_logprob_per_token(self) -> "Turn":
        if len(self.logprobs) != len(self.completion_ids):
            raise ValueError(
                f"turn {self.index}: {len(self.logprobs)} logprobs for "
                f"{len(self.completion_ids)} sampled tokens"
            )
        return self


class SegmentKind(StrEnum):
    SUBAGENT = "subagent"
    WIPE = "wipe"
    FINAL = "final"


class Segment(Frozen):
    """One linear, trainable token sequence cut from the trajectory.

    Shapes: prompt_ids [P]; response_ids, loss_mask, logprobs, versions all [R].
    loss_mask is 1 only on sampled tokens; logprob is 0.0 and version -1 where the mask is 0.
    """

    kind: SegmentKind
    index: int
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: FinishReason
    turns: tuple[int, ...]
    reward_share: float = 1.0
    """This segment's share of the rollout's reward; all of it by default."""
    chain: str = "main"
    """The chain it is a stretch of: `main`, or a sub-agent's id."""
    sampling: tuple[SamplingSpan, ...] = ()
    """How each turn's tokens were sampled; a turn of unknown sampling has no span."""

    @property
    def temperature(self) -> float | None:
        """The temperature of all its trained tokens; None if it is unknown, or they differ."""
        told = {span.sampling.temperature for span in self.sampling}
        known = sum(span.end - span.start for span in self.sampling) >= sum(self.loss_mask)
        return told.pop() if len(told) == 1 and known else None

    @property
    def policy_version_min(self) -> int | None:
        """The oldest version of its trained tokens; -1: some are unknown, None: all are unknown."""
        return min(self._trained_versions(), default=None)

    @property
    def policy_version_max(self) -> int | None:
        """The newest, likewise."""
        return max(self._trained_versions(), default=None)

    def _trained_versions(self) -> set[int]:
        pairs = zip(self.versions, self.loss_mask, strict=True)
        found = {version for version, trained in pairs if trained}
        return found if max(found, default=-1) >= 0 else set()

"""What the policy saw and sampled: turns, and the segments that trainers consume."""

from enum import StrEnum

from pydantic import model_validator

from perdure.types.base import Frozen
from perdure.types.kept_tokens import KeptTokens
from perdure.types.routed_experts import RoutedExperts


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
    """The sampling parameters of one turn. A parameter that was not sent has its neutral value."""

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
    """JSON: the grammar made from a tool choice or a response format. The tokens were sampled under
    it, and their logprobs refer to the constrained distribution."""


class SamplingSpan(Frozen):
    """Tokens [start, end) of a segment's response were sampled with `sampling`."""

    start: int
    end: int
    sampling: TurnSampling


AGENT_HEADER = "x-perdure-agent"
"""The HTTP header with which an agent marks each of its model calls (`AgentTask.headers`)."""


class Purpose(StrEnum):
    """Why a model was called."""

    STEP = "step"
    """The agent's next step. It is trained."""
    COMPACTION = "compaction"
    """The agent summarizes its history and continues from the summary. The turn is trained and
    starts a new branch."""
    SIDE = "side"
    """A request for a title or a topic, or a probe. The outcome does not depend on it, so it is
    recorded and never trained."""
    STRAY = "stray"
    """Not the agent's call: code that it ran found the session's key. It is recorded in a chain of
    its own and never trained."""

    @property
    def is_of_trajectory(self) -> bool:
        """Whether the outcome depends on the call."""
        return self in (Purpose.STEP, Purpose.COMPACTION)


class TurnFacts(Frozen):
    """The facts about one model call, without its ids and texts.

    This is the single definition of these fields: `Turn` and the gateway's `TurnRecord` inherit
    them, and the columns of `turns.parquet` are derived from them.
    """

    index: int
    """Position in the session's journal. Turns are numbered in commit order."""
    chain: str = "main"
    """`main`, the id that the agent's harness gave a sub-agent, or `stray`."""
    parent_chain: str = ""
    """The chain that started this one; empty for main."""
    parent: int | None = None
    """Index of the turn whose prompt + completion this prompt extends, by recorded ids. None for a
    root, which is rendered in full for the reason in `bridge_miss`."""
    purpose: Purpose = Purpose.STEP
    replayed_from: str = ""
    """`<session id>/<turn index>` of an earlier attempt whose completion answered this request
    without the engine; empty if it was sampled in this session."""
    versions: tuple[VersionSpan, ...] = ()
    finish_reason: FinishReason = FinishReason.STOP
    engine: str = ""
    """The engine that finished the turn."""
    engines: tuple[EngineSpan, ...] = ()
    """Which engine sampled which tokens. There are several if an engine was lost within the turn,
    and none if they are unknown or a hosted API answered."""
    bridged: bool = False
    """Whether the prompt extends the parent's prompt + completion, built from recorded ids."""
    bridge_miss: str | None = None
    """Why a bridge was impossible (`first`, `prefix_changed`, `echo_edited`, ...)."""
    trainable: bool = True
    started_at: float = 0.0
    engine_seconds: float = 0.0
    waiting_seconds: float = 0.0
    """Seconds without an engine, because all were full or none was available."""
    seconds: float = 0.0
    request_sha256: str = ""
    sampling: TurnSampling | None = None
    """None for a hosted API, or in a record of an earlier version."""
    asked_model: str = ""
    """The model that the request to the engine named."""
    model: str = ""
    """The model that answered, as the engine names it; empty if it named none."""
    routed_experts: RoutedExperts | None = None
    """None if the engine returned none for some of its tokens."""
    kept_tokens: KeptTokens | None = None
    """What top-p and top-k left for each sampled token; None if the engine did not return it for
    all of them."""
    preemptions: int | None = None
    """How often the engine's scheduler preempted the call. Only a trainer's generate function
    tells."""


class Usage(Frozen):
    """A hosted API's token counts for one call. `prompt_tokens` includes `cached_tokens`, which the
    API read from its cache."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    sampled_tokens: int = 0


class Turn(TurnFacts):
    """One model call, exactly as the engine consumed and produced it.

    Shapes: prompt_ids [P], completion_ids [C], logprobs [C]. A hosted API returns no ids. Then all
    three are empty and `trainable` is False.
    """

    new_messages: str = ""
    """The request's messages that follow the parent turn and its answer, as a JSON list in the
    gateway's own form (`perdure.dialects.base.ModelRequest`). For reading, never for training."""
    answer: str = ""
    """The assistant message that the agent received, as JSON in the same form."""
    unused: bool = False
    """The agent continued without this answer: it asked again, or continued from another one."""
    prompt_ids: tuple[int, ...] = ()
    completion_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    usage: Usage | None = None
    """None if the ids are recorded, or if the hosted API returned no counts."""
    tools: str = ""
    """The tools that the request offered, as a JSON list in OpenAI's form. Empty if they equal the
    parent turn's, or in a record of an earlier version."""

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
    loss_mask is 1 only for sampled tokens. Where it is 0, logprob is 0.0 and version is -1.
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
    """This segment's share of the rollout's reward. The default is all of it."""
    chain: str = "main"
    """The chain that it is part of: `main`, or a sub-agent's id."""
    sampling: tuple[SamplingSpan, ...] = ()
    """How each turn's tokens were sampled. A turn whose sampling is unknown has no span."""

    def masked(self) -> "Segment":
        """A copy without a trained token."""
        nothing = len(self.response_ids)
        return self.model_copy(
            update={
                "loss_mask": (0,) * nothing,
                "logprobs": (0.0,) * nothing,
                "versions": (-1,) * nothing,
            }
        )

    @property
    def temperature(self) -> float | None:
        """The temperature of all trained tokens; None if it is unknown or varies."""
        told = {span.sampling.temperature for span in self.sampling}
        known = sum(span.end - span.start for span in self.sampling) >= sum(self.loss_mask)
        return told.pop() if len(told) == 1 and known else None

    @property
    def policy_version_min(self) -> int | None:
        """The oldest version of the trained tokens; -1 if some are unknown, None if all are."""
        return min(self._trained_versions(), default=None)

    @property
    def policy_version_max(self) -> int | None:
        """The newest version of the trained tokens; None if all are unknown."""
        return max(self._trained_versions(), default=None)

    def _trained_versions(self) -> set[int]:
        pairs = zip(self.versions, self.loss_mask, strict=True)
        found = {version for version, trained in pairs if trained}
        return found if max(found, default=-1) >= 0 else set()

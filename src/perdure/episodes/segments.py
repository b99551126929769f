"""Cutting a trajectory into linear, trainable token sequences, from recorded ids alone.

Owns the rule of what continues a segment and what starts a new one. Nothing is rendered or
tokenised here, so every sampled token is trained exactly once, as it was sampled.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from perdure.types import FinishReason, Segment, SegmentKind, Turn

MAIN = "main"
NO_VERSION = -1

RewardShare = Literal["split", "full", "last"]
"""`split`: 1/K of the rollout's reward to each of its K segments (document 002); `full`: all of it
to each; `last`: all of it to the last one."""


@dataclass
class _Stretch:
    """A growing token sequence of one chain. Shapes: mask, logprobs, versions, response [R]."""

    chain: str
    prompt_ids: tuple[int, ...]
    response_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    held: tuple[int, ...] = ()
    """The last turn's prompt and completion: what the next prompt must start with."""
    finish_reason: FinishReason = FinishReason.STOP
    frozen_at: float = 0.0
    """Position among the turns at which nothing more could be added."""

    def is_continued_by(self, turn: Turn) -> bool:
        return turn.prompt_ids[: len(self.held)] == self.held

    def add(self, turn: Turn) -> None:
        context = turn.prompt_ids[len(self.prompt_ids) + len(self.response_ids) :]
        self.response_ids += [*context, *turn.completion_ids]
        self.loss_mask += [0] * len(context) + [1] * len(turn.completion_ids)
        self.logprobs += [0.0] * len(context) + list(turn.logprobs)
        self.versions += [NO_VERSION] * len(context) + token_versions(turn)
        self.turns.append(turn.index)
        self.held = turn.prompt_ids + turn.completion_ids
        self.finish_reason = turn.finish_reason


def cut(turns: Sequence[Turn], *, reward_share: RewardShare = "split") -> list[Segment]:
    """The segments of a rollout, in the order in which they ended, `final` last.

    A turn continues its chain's segment when its prompt starts with everything that segment holds;
    otherwise the segment is over (`wipe`) and a new one starts. The last one of the main chain is
    `final`, of any other chain `subagent`. Turns without token ids (hosted APIs) give none.
    """
    grown = _stretches(turns)
    last = {stretch.chain: stretch for stretch in grown}
    kinds = {id(stretch): _last_kind(chain) for chain, stretch in last.items()}
    stretches = [stretch for stretch in grown if stretch.response_ids]
    stretches.sort(key=lambda s: (kinds.get(id(s)) is SegmentKind.FINAL, s.frozen_at))
    return [
        Segment(
            kind=kinds.get(id(stretch), SegmentKind.WIPE),
            index=index,
            prompt_ids=stretch.prompt_ids,
            response_ids=tuple(stretch.response_ids),
            loss_mask=tuple(stretch.loss_mask),
            logprobs=tuple(stretch.logprobs),
            versions=tuple(stretch.versions),
            finish_reason=stretch.finish_reason,
            turns=tuple(stretch.turns),
            reward_share=_share(reward_share, index, len(stretches)),
        )
        for index, stretch in enumerate(stretches)
    ]


def token_versions(turn: Turn) -> list[int]:
    """The policy version of each sampled token, -1 where the engine did not say. Shape [C]."""
    versions = [NO_VERSION] * len(turn.completion_ids)
    for span in turn.versions:
        end = min(span.end, len(versions))
        versions[span.start : end] = [span.version] * max(0, end - span.start)
    return versions


def _stretches(turns: Sequence[Turn]) -> list[_Stretch]:
    found: list[_Stretch] = []
    growing: dict[str, _Stretch] = {}
    for position, turn in enumerate(turns):
        if not turn.prompt_ids:
            continue
        stretch = growing.get(turn.chain)
        if stretch is None or not stretch.is_continued_by(turn):
            if stretch is not None:
                stretch.frozen_at = position - 0.5
            stretch = growing[turn.chain] = _Stretch(turn.chain, turn.prompt_ids)
            found.append(stretch)
        stretch.add(turn)
        stretch.frozen_at = position
    return found


def _last_kind(chain: str) -> SegmentKind:
    return SegmentKind.FINAL if chain == MAIN else SegmentKind.SUBAGENT


def _share(policy: RewardShare, index: int, count: int) -> float:
    if policy == "split":
        return 1.0 / count
    return 1.0 if policy == "full" or index == count - 1 else 0.0

"""Cuts a trajectory into linear, trainable token sequences, from recorded ids alone.

Owns the rule for which turns continue a segment and which start a new one. It renders and tokenizes
nothing, so every sampled token is trained exactly once, as it was sampled.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from perdure.episodes.recorded_messages import answer_of, conversations
from perdure.episodes.slime_merge_turns import merge_turns
from perdure.episodes.slime_tree_segments import TokenSequence, TurnMessages, cut_like_slime
from perdure.types import FinishReason, SamplingSpan, Segment, SegmentKind, Turn

MAIN = "main"
NO_VERSION = -1

RewardShare = Literal["split", "full", "last"]
"""`full`: each of the K segments gets the rollout's whole reward, as in slime and verl, and the trainer
counts a rollout once. `split`: each gets 1/K of it, as in slime's first coding example. `last`:
only the last segment gets it."""

SegmentMode = Literal["tree", "merge_turns", "slime"]
"""`tree`: a turn continues the segment that its recorded ids extend, so no sampled token is lost.
The other modes are slime's, and do not train tokens that a later prompt changes: `merge_turns` is
the rule of its coding-agent example, `slime` its message tree of August 2026."""


class Untrained(NamedTuple):
    """A turn whose sampled tokens have mask 1 in no segment, and why.

    `reason`: `side` (a title, a probe), `stray` (not the agent's call), `hosted` (no token ids),
    `unused` (the agent did not use the answer), `too_stale` (its rollout), `drift` (slime's modes
    only: a later prompt does not repeat it token for token).
    """

    turn: int
    tokens: int
    reason: str


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
    sampling: list[SamplingSpan] = field(default_factory=list)
    held: tuple[int, ...] = ()
    """The last turn's prompt and completion, with which the next prompt must start."""
    finish_reason: FinishReason = FinishReason.STOP
    frozen_at: float = 0.0
    """Position among the turns after which nothing can be added."""

    def is_extended_by(self, turn: Turn) -> bool:
        return turn.prompt_ids[: len(self.held)] == self.held

    def add(self, turn: Turn) -> None:
        context = turn.prompt_ids[len(self.prompt_ids) + len(self.response_ids) :]
        self.response_ids += [*context, *turn.completion_ids]
        self.loss_mask += [0] * len(context) + [1] * len(turn.completion_ids)
        self.logprobs += [0.0] * len(context) + list(turn.logprobs)
        self.versions += [NO_VERSION] * len(context) + token_versions(turn)
        self.turns.append(turn.index)
        end = len(self.response_ids)
        self.sampling += _sampling_span(turn, end - len(turn.completion_ids), end)
        self.held = turn.prompt_ids + turn.completion_ids
        self.finish_reason = turn.finish_reason


def cut(
    turns: Sequence[Turn],
    *,
    reward_share: RewardShare = "full",
    mode: SegmentMode = "tree",
    keep_unused: bool = False,
) -> list[Segment]:
    """The segments of a rollout, in the order in which they ended, `final` last.

    A turn continues a segment if that segment's last turn is its parent (or, if it names no parent, its
    chain's newest turn) and its prompt starts with the segment's whole content. Any other turn
    starts a segment whose first prompt is the turn's whole prompt. Earlier sampled tokens are
    context there, so each sampled token is trained once. The last segment of the main chain is
    `final`, the last one of any other chain `subagent`, every earlier one `wipe`. Side and stray
    requests, turns without ids and, unless `keep_unused`, answers that the agent did not use give no
    segment:
    `untrained` lists them.

    Raises: ValueError in mode `slime` for a turn without its messages.
    """
    taken = [t for t in turns if _why_left_out(t, keep_unused=keep_unused) is None]
    grow = {"tree": _grown, "merge_turns": _merged, "slime": _slimed}[mode]
    grown = grow(taken)
    stretches = [stretch for stretch in grown if stretch.response_ids]
    stretches.sort(key=lambda stretch: stretch.frozen_at)
    last = {stretch.chain: stretch for stretch in stretches}
    stretches.sort(key=lambda stretch: stretch is last.get(MAIN))
    return [
        Segment(
            kind=_kind(stretch, stretch is last[stretch.chain]),
            index=index,
            chain=stretch.chain,
            prompt_ids=stretch.prompt_ids,
            response_ids=tuple(stretch.response_ids),
            loss_mask=tuple(stretch.loss_mask),
            logprobs=tuple(stretch.logprobs),
            versions=tuple(stretch.versions),
            finish_reason=stretch.finish_reason,
            turns=tuple(stretch.turns),
            sampling=tuple(stretch.sampling),
            reward_share=share(reward_share, index, len(stretches)),
        )
        for index, stretch in enumerate(stretches)
    ]


def untrained(turns: Sequence[Turn], segments: Sequence[Segment]) -> list[Untrained]:
    """The turns that `segments`, cut from `turns`, do not train, each with its reason."""
    trained = {index for one in segments if any(one.loss_mask) for index in one.turns}
    masked = {index for one in segments for index in one.turns} - trained
    lost = {index: "too_stale" for index in masked}
    return [
        Untrained(
            turn.index, turn.sampled_tokens, _why_left_out(turn) or lost.get(turn.index, "drift")
        )
        for turn in turns
        if turn.index not in trained and (turn.completion_ids or _why_left_out(turn))
    ]


def token_versions(turn: Turn) -> list[int]:
    """The policy version of each sampled token, -1 if the engine did not report it. Shape [C]."""
    versions = [NO_VERSION] * len(turn.completion_ids)
    for span in turn.versions:
        end = min(span.end, len(versions))
        versions[span.start : end] = [span.version] * max(0, end - span.start)
    return versions


def share(policy: RewardShare, index: int, count: int) -> float:
    """The share of the rollout's reward that segment `index` of `count` gets."""
    if policy == "split":
        return 1.0 / count
    return 1.0 if policy == "full" or index == count - 1 else 0.0


def _why_left_out(turn: Turn, *, keep_unused: bool = False) -> str | None:
    if not turn.purpose.is_of_trajectory:
        return turn.purpose.value
    if turn.unused and not keep_unused:
        return "unused"
    return None if turn.trainable and turn.prompt_ids else "hosted"


def _grown(turns: Sequence[Turn]) -> list[_Stretch]:
    found: list[_Stretch] = []
    ending_with: dict[int, _Stretch] = {}
    newest: dict[str, _Stretch] = {}
    for position, turn in enumerate(turns):
        before = newest.get(turn.chain)
        stretch = before if turn.parent is None else ending_with.get(turn.parent)
        if stretch is None or stretch.chain != turn.chain or not stretch.is_extended_by(turn):
            if before is not None:
                before.frozen_at = max(before.frozen_at, position - 0.5)
            stretch = _Stretch(turn.chain, turn.prompt_ids)
            found.append(stretch)
        else:
            ending_with.pop(stretch.turns[-1], None)
        stretch.add(turn)
        stretch.frozen_at = position
        newest[turn.chain] = ending_with[turn.index] = stretch
    return found


def _merged(turns: Sequence[Turn]) -> list[_Stretch]:
    at = {turn.index: position for position, turn in enumerate(turns)}
    chains: dict[str, list[Turn]] = {}
    for turn in turns:
        chains.setdefault(turn.chain, []).append(turn)
    found: list[_Stretch] = []
    for own in chains.values():
        sequences = merge_turns(own, token_versions)
        for sequence, following in itertools.zip_longest(sequences, sequences[1:]):
            stretch = _from_slime(sequence, at)
            if following is not None and following.first is not None:
                stretch.frozen_at = at[following.first.index] - 0.5
            found.append(stretch)
    return found


def _slimed(turns: Sequence[Turn]) -> list[_Stretch]:
    said = conversations(turns)
    for turn in turns:
        if not said[turn.index]:
            raise ValueError(f"turn {turn.index} has no messages, which the mode slime needs")
    spoken = [TurnMessages(turn, said[turn.index], answer_of(turn)) for turn in turns]
    at = {turn.index: position for position, turn in enumerate(turns)}
    return [_from_slime(found, at) for found in cut_like_slime(spoken, token_versions)]


def _from_slime(found: TokenSequence, at: Mapping[int, int]) -> _Stretch:
    assert found.last is not None  # it has a trained token
    first = found.prompt
    return _Stretch(
        chain=found.last.chain,
        prompt_ids=tuple(found.ids[:first]),
        response_ids=found.ids[first:],
        loss_mask=found.loss_mask[first:],
        logprobs=found.logprobs[first:],
        versions=found.versions[first:],
        turns=[span.turn.index for span in found.spans],
        sampling=[
            one
            for span in found.spans
            for one in _sampling_span(span.turn, span.start - first, span.end - first)
        ],
        finish_reason=found.last.finish_reason,
        frozen_at=at[found.last.index],
    )


def _sampling_span(turn: Turn, start: int, end: int) -> list[SamplingSpan]:
    """One span; none if the turn's sampling parameters are unknown."""
    if turn.sampling is None:
        return []
    return [SamplingSpan(start=start, end=end, sampling=turn.sampling)]


def _kind(stretch: _Stretch, is_last: bool) -> SegmentKind:
    if not is_last:
        return SegmentKind.WIPE
    return SegmentKind.FINAL if stretch.chain == MAIN else SegmentKind.SUBAGENT

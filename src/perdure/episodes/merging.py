"""`merge_turns`: slime's rule for stitching turns whose prompts were rendered anew.

Turns of this project are bridged from recorded ids and never drift. This rule is for turns that may
drift, and for users who want exactly slime's documented sequences.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from perdure.types import Turn


@dataclass
class _Span:
    """The tokens of the response that are a turn's completion: [start, end)."""

    turn: int
    start: int
    end: int


@dataclass
class Merged:
    """One sequence. Shapes: response_ids, loss_mask, logprobs, versions [R]."""

    prompt_ids: tuple[int, ...]
    response_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    spans: list[_Span] = field(default_factory=list)

    @property
    def trained(self) -> list[int]:
        """Indexes of the turns whose whole completion is in the response, with mask 1."""
        return [span.turn for span in self.spans]

    def follow(self, suffix: Sequence[int]) -> None:
        """Make the response match the next prompt: drop what differs, append the prompt's new ids."""
        kept = _common(self.response_ids, suffix)
        if kept < len(self.response_ids):
            self._drop_from(kept)
        context = suffix[kept:]
        self._append(context, 0, [0.0] * len(context), [-1] * len(context))

    def sample(self, turn: Turn, versions: Sequence[int]) -> None:
        start = len(self.response_ids)
        self._append(turn.completion_ids, 1, turn.logprobs, versions)
        if turn.completion_ids:
            self.spans.append(_Span(turn.index, start, len(self.response_ids)))

    def _drop_from(self, kept: int) -> None:
        for row in (self.response_ids, self.loss_mask, self.logprobs, self.versions):
            del row[kept:]
        for span in self.spans:
            if span.start < kept < span.end:  # the rest of it is no longer one whole sample
                width = kept - span.start
                self.loss_mask[span.start :] = [0] * width
                self.logprobs[span.start :] = [0.0] * width
                self.versions[span.start :] = [-1] * width
        self.spans = [span for span in self.spans if span.end <= kept]

    def _append(
        self, ids: Sequence[int], mask: int, logprobs: Sequence[float], versions: Sequence[int]
    ) -> None:
        self.response_ids += ids
        self.loss_mask += [mask] * len(ids)
        self.logprobs += logprobs
        self.versions += versions


def merge_turns(
    turns: Sequence[Turn], versions_of: Callable[[Turn], Sequence[int]]
) -> Merged | None:
    """One sequence out of the turns of one chain; None when there are none.

    A prompt that does not start with the sequence's leading prompt starts it over and drops all
    before. Otherwise the response is cut back to what that prompt repeats (a completion that the cut
    goes through loses its mask on the rest too), then grows by the prompt's new ids with mask 0 and
    by the completion with mask 1. `versions_of` gives one policy version per sampled token.
    """
    merged: Merged | None = None
    for turn in turns:
        width = len(merged.prompt_ids) if merged else 0
        if merged is None or turn.prompt_ids[:width] != merged.prompt_ids:
            merged = Merged(turn.prompt_ids)
        else:
            merged.follow(turn.prompt_ids[width:])
        merged.sample(turn, versions_of(turn))
    return merged


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    for position, (mine, theirs) in enumerate(zip(one, other, strict=False)):
        if mine != theirs:
            return position
    return min(len(one), len(other))

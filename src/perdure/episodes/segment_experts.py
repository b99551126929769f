"""Joins the experts that a segment's turns recorded, for router replay."""

import itertools
from collections.abc import Mapping, Sequence

from perdure.types import ExpertRows, RoutedExperts, Segment, Turn


def segment_experts(turns: Sequence[Turn], segments: Sequence[Segment]) -> list[ExpertRows | None]:
    """The experts of each segment: row i belongs to token i of prompt and response. Shape
    [P + R - 1, layers, top_k], because no engine read the last token. None unless all turns of the
    segment have experts, because a trainer could not replay the others.
    """
    known = {turn.index: turn for turn in turns}
    return [_joined(_parts(known, segment)) for segment in segments]


def have_experts(turns: Sequence[Turn], segments: Sequence[Segment]) -> list[bool]:
    """For each segment, whether `segment_experts` returns an array."""
    known = {turn.index: turn for turn in turns}
    return [bool(_parts(known, segment)) for segment in segments]


def _parts(known: Mapping[int, Turn], segment: Segment) -> list[RoutedExperts]:
    """The experts of its last turn and of the turns before it, which together cover the segment. Empty
    if they do not."""
    if any(known[index].routed_experts is None for index in segment.turns):
        return []
    turn = known[segment.turns[-1]]
    if turn.prompt_ids + turn.completion_ids != segment.prompt_ids + segment.response_ids:
        return []  # slime's cuts may end with context
    parts: list[RoutedExperts] = []
    at: Turn | None = turn
    while at is not None and (own := at.routed_experts) is not None:
        parts.append(own)
        if own.start == 0:
            return parts if _fit(parts) else []
        at = None if at.parent is None else known.get(at.parent)
    return []


def _fit(parts: Sequence[RoutedExperts]) -> bool:
    pairs = itertools.pairwise(parts)
    shapes = {(one.layers, one.top_k) for one in parts}
    return len(shapes) == 1 and all(later.start <= earlier.end for later, earlier in pairs)


def _joined(parts: Sequence[RoutedExperts]) -> ExpertRows | None:
    if not parts:
        return None
    import numpy

    ends = [parts[0].end, *(one.start for one in parts)]
    rows = [one.array()[: end - one.start] for one, end in zip(parts, ends, strict=False)]
    return numpy.concatenate(rows[::-1])
